import pytest
import torch

from torch_dora.ops.norm import assemble_norm
from torch_dora.ops.triton import norm_assembly


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("features", [1, 255, 1000])
@pytest.mark.parametrize("scale", [0.7, -3.0, 1e-3])
def test_equals_torchs_evaluation_bit_for_bit(device, features, scale):
    base_sq, ba_sq = (torch.rand(features, device=device) for _ in range(2))
    # Large enough that some sums are negative.
    cross = torch.randn(features, device=device)
    got = norm_assembly.launch(base_sq, cross, ba_sq, scale)
    assert torch.equal(got, assemble_norm(base_sq, cross, ba_sq, scale))


def test_negative_becomes_zero_and_nan_stays(device):
    base_sq = torch.tensor([1.0, torch.nan, 4.0, torch.inf], device=device)
    cross = torch.tensor([-9.0, 1.0, 0.0, 0.0], device=device)
    got = norm_assembly.launch(base_sq, cross, torch.zeros_like(cross), 1.0)
    assert torch.equal(got.nan_to_num(-1.0, torch.inf), torch.tensor([0, -1, 2, torch.inf]).to(got))
