"""Layers on a GPU that is not CUDA's current device, as with transformers' device_map="auto"."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import torch_dora
from tests.torch_dora.adapters import trained

pytestmark = [
    pytest.mark.gpus,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch.compile raises them
]


def results(model, x, device, compiled):
    model = copy.deepcopy(model).to(device)
    y = (torch.compile(model) if compiled else model)(x.to(device))
    y.backward(torch.ones_like(y))
    gradients = [one.grad for one in model.parameters() if one.requires_grad]
    return [
        y,
        *gradients,
        *torch_dora.norms(model).values(),
        torch_dora.freeze(model)(x.to(device)),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_second_gpu_gives_the_bits_of_the_first(dtype, compiled):
    base = nn.Sequential(nn.Linear(2048, 4096), nn.Tanh(), nn.Linear(4096, 2048)).to(dtype)
    rule = torch_dora.DoRARule("all-linear", rank=32, alpha=32)
    model = trained(torch_dora.apply_dora(base, rule))
    x = torch.randn(512, 2048, dtype=dtype)
    torch.cuda.set_device(0)
    on_each = [results(model, x, f"cuda:{i}", compiled) for i in (0, 1)]
    for first, second in zip(*on_each, strict=True):
        assert second.get_device() == 1
        assert torch.equal(first.cpu(), second.cpu())


def test_jax_starts_without_a_change_of_the_current_gpu():
    program = (
        "import torch; from parity.sides.jax.operators import to_jax; x = torch.ones(3).cuda(); "
        "assert float(to_jax(x).sum()) == 3; assert torch.cuda.current_device() == 0"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
