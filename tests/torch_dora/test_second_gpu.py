"""Layers on a GPU that is not CUDA's current device, as with transformers' device_map="auto"."""

import copy
import functools
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_dora
from tests.torch_dora.adapters import trained

pytestmark = [
    pytest.mark.gpus,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch.compile raises them
    # Inductor recommends TF32, which would not compute the same.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
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
def test_the_second_gpu_computes_what_the_first_does(dtype, compiled):
    base = nn.Sequential(nn.Linear(2048, 4096), nn.Tanh(), nn.Linear(4096, 2048)).to(dtype)
    rule = torch_dora.DoRARule("all-linear", rank=32, alpha=32)
    model = trained(torch_dora.apply_dora(base, rule))
    x = torch.randn(512, 2048, dtype=dtype)
    torch.cuda.set_device(0)
    on_each = [results(model, x, f"cuda:{i}", compiled) for i in (0, 1)]
    for first, second in zip(*on_each, strict=True):
        assert second.get_device() == 1
        first, second = first.cpu(), second.cpu()
        if compiled:
            # Inductor times its own kernels on each GPU and may choose others, with sums in another
            # order: numbers that are stored in `dtype` in between differ by a rounding error.
            difference = (first - second).abs().max()
            assert difference <= 4 * torch.finfo(dtype).eps * first.abs().max()
        else:
            assert torch.equal(first, second)


@pytest.mark.parametrize("dropout_mode", ["adapter", "input"])
def test_checkpoints_on_the_second_gpu(dropout_mode):
    """The backward pass makes the second GPU current, the forward pass does not."""
    base = nn.Linear(256, 512).to(torch.bfloat16)
    options = {"rank": 32, "alpha": 32, "dropout": 0.2, "dropout_mode": dropout_mode}
    model = trained(torch_dora.apply_dora(base, torch_dora.DoRARule(".*", **options))).cuda(1)
    x = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda:1")
    torch.cuda.set_device(0)
    found = []
    for call in (model, functools.partial(checkpoint, model, use_reentrant=False)):
        torch.manual_seed(3)
        model.zero_grad()
        call(x).square().sum().backward()
        found.append([one.grad for one in model.parameters() if one.requires_grad])
    for plain, repeated in zip(*found, strict=True):
        assert torch.equal(plain, repeated)


def test_jax_starts_without_a_change_of_the_current_gpu():
    program = (
        "import torch; from parity.sides.jax.operators import to_jax; x = torch.ones(3).cuda(); "
        "assert float(to_jax(x).sum()) == 3; assert torch.cuda.current_device() == 0"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
