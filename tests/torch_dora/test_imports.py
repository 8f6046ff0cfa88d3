import importlib.metadata
import subprocess
import sys

import pytest

import torch_dora

WITHOUT_TRITON = """
import sys
for name in ("triton", "jax", "flax", "jax_dora", "parity", "accelerate", "transformers", "peft"):
    sys.modules[name] = None
import torch
from torch_dora import DoRALinear
from torch_dora.ops import compose
DoRALinear(8, 8, rank=2, alpha=2)(torch.ones(3, 8)).sum().backward()
try:
    compose(torch.ones(2, 2), torch.ones(2, 2), torch.ones(2), 1.0, implementation="triton")
except NotImplementedError as error:
    print(error)
"""
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
try:
    import torch_dora
except ImportError as error:
    print(error)
"""


def printed(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ci
def test_works_without_triton_and_without_jax():
    assert "the triton package is not installed" in printed(WITHOUT_TRITON)


def test_without_torch_the_extra_to_install_is_named():
    assert "pip install 'jax-dora[torch]'" in printed(WITHOUT_TORCH)


def test_the_version_is_the_distributions():
    assert torch_dora.__version__ == importlib.metadata.version("jax-dora")
