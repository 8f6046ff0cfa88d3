"""The installed command where an extra is not installed."""

import subprocess
import sys

import pytest

from tests.tables import slow

WITHOUT = """
import sys
sys.modules[{name!r}] = None
sys.argv = ["jax-dora", *{arguments!r}]
from jax_dora_command import main
main()
"""


@pytest.mark.parametrize(
    ("name", "arguments", "extra"),
    [
        ("tokenizers", ["--help"], "finetune"),
        slow("uvicorn", ["serve", "--model", "none"], "serve"),
    ],
)
def test_the_extra_to_install_is_named(name, arguments, extra):
    code = WITHOUT.format(name=name, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert f"pip install 'jax-dora[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
