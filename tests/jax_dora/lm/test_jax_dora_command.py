"""The installed command: its quick help, and errors where an extra is not installed."""

import os
import subprocess
import sys

import pytest

import jax_dora_command
from jax_dora.lm.commands import parser
from tests.tables import ci, slow

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
        ci("tokenizers", ["finetune", "--help"], "finetune"),
        slow("uvicorn", ["serve", "--model", "none"], "serve"),
    ],
)
def test_the_extra_to_install_is_named(name, arguments, extra):
    code = WITHOUT.format(name=name, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert f"pip install 'jax-dora[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_takes_less_than_a_second():
    """Of CPU time, because it imports no package."""
    command = [sys.executable, "-c", WITHOUT.format(name="jax", arguments=["--help"])]
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = os.times()
    spent = after.children_user + after.children_system
    assert spent - before.children_user - before.children_system < 1
    assert done.stdout == jax_dora_command.overview() == parser().format_help()
