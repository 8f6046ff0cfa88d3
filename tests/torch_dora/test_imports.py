import subprocess
import sys

CODE = """
import sys
for name in ("triton", "jax", "flax", "jax_dora", "parity"):
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


def test_works_without_triton_and_without_jax():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the triton package is not installed" in done.stdout


PEFT = """
import sys
import torch_dora
assert "torch_dora.peft" not in sys.modules
assert "peft" in dir(torch_dora)
print(torch_dora.peft.load_adapter.__name__)
try:
    torch_dora.other
except AttributeError as error:
    print(error)
"""


def test_peft_is_imported_when_asked_for():
    done = subprocess.run([sys.executable, "-c", PEFT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == [
        "load_adapter",
        "module 'torch_dora' has no attribute 'other'",
    ]
