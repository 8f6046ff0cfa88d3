"""The format knows no framework, and neither package's reader brings in the other's."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("dora_common.peft.folder, dora_common.peft.save", ("jax", "torch", "flax")),
        ("jax_dora.peft", ("torch", "peft", "transformers")),
        ("torch_dora.peft", ("jax", "flax", "peft", "transformers")),
    ],
)
def test_imports_alone(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}\nprint(sorted({set(absent)} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
