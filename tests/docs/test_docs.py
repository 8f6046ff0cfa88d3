"""The site builds without a warning, every page's snippets run, and the reference is complete."""

import importlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import jax_dora
import jax_dora.linen
import jax_dora.lm.encoder
import jax_dora.lm.finetune
import jax_dora.lm.models
import jax_dora.lm.serve
import jax_dora.ops
import jax_dora.peft
import torch_dora
import torch_dora.peft
from jax_dora.lm.commands import parser
from tools import command_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Of `vllm serve`, which vllm.md names; tests/torch_dora/vllm/test_server.py passes them to it.
VLLM_OPTIONS = {
    *("--enable-lora", "--fully-sharded-loras", "--lora-modules"),
    *("--max-cpu-loras", "--max-lora-rank", "--max-loras"),
}
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
TEXT = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
SNIPPETS = {
    path.relative_to(DOCS).as_posix(): snippets
    for path in sorted(DOCS.glob("**/*.md"))
    if (snippets := SNIPPET.findall(path.read_text()))
}


# As test_checkpoint.py: orbax in its oldest version warns.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("page", SNIPPETS)
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for number, snippet in enumerate(SNIPPETS[page], 1):
        exec(compile(snippet, f"{page}, snippet {number}", "exec"), namespace)


def test_the_page_of_flags_is_the_parsers():
    assert command_page.PAGE.read_text() == command_page.page(), "run tools/command_page.py"


def test_commands_are_accepted():
    """Every command that a page shows has flags and values that the parser takes."""
    shown = [
        shlex.split(line.rstrip(" &"), comments=True)[1:]
        for page in ("finetuning.md", "tutorial.md", "commands.md", "coming-from.md", "serving.md")
        for block in SHELL.findall((DOCS / page).read_text())
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("jax-dora ")
    ]
    assert len(shown) > 10
    for command in shown:
        parser().parse_args(command)


@pytest.mark.slow
def test_the_tutorial_leads_to_a_served_answer(tmp_path):
    """Its commands, in their order, with a free port, print what the page shows."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = str(one.getsockname()[1])
    for name, line in (("jax-dora", f'exec "{sys.executable}" -m jax_dora "$@"'), ("pip", "true")):
        shim = tmp_path / "bin" / name
        shim.parent.mkdir(exist_ok=True)
        shim.write_text(f"#!/bin/sh\n{line}\n")
        shim.chmod(0o755)
    commands = "".join(SHELL.findall((DOCS / "tutorial.md").read_text()))
    commands = commands.replace(":8000/", f":{port}/")
    commands = commands.replace("--adapters run &", f"--adapters run --port {port} &")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    told = subprocess.run(
        ["bash", "-ec", commands],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert told.returncode == 0, told.stderr
    shown = "\n".join(TEXT.findall((DOCS / "tutorial.md").read_text()))
    for line in shown.splitlines():
        if found := re.fullmatch(r"step (\d+): evaluation loss ([\d.]+).*", line):
            [loss] = re.findall(rf"step {found[1]}: evaluation loss ([\d.]+)", told.stdout)
            # The page says that another processor's rounding grows over the epochs.
            most = float(found[2]) + (0.03 if found[1] == "100" else 0.1)
            assert float(loss) < most
        elif re.match(r" (parameters|data|steps) |'|\{\"prompt\"|\d", line):
            assert line.strip() in told.stdout
    [answer] = map(json.loads, re.findall(r'\{"id": "cmpl-.*\}', told.stdout))
    assert answer["model"] == "best"
    assert answer["choices"][0]["text"] == "42"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_options_exist():
    """Every option that a guide names is one of the command's, or of vLLM's."""
    [commands] = (one for one in parser()._actions if isinstance(one.choices, dict))
    known = {
        option
        for command in commands.choices.values()
        for action in command._actions
        for option in action.option_strings
    }
    for page in ("finetuning.md", "tutorial.md", "coming-from.md", "serving.md"):
        named = set(re.findall(r"--[a-z]+(?:-[a-z]+)*", (DOCS / page).read_text()))
        assert named
        assert named <= known | VLLM_OPTIONS


@pytest.mark.slow
def test_site_builds(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "site" / "reference" / "jax_dora.html").read_text()
    assert 'id="jax_dora.DoRALinear"' in page
    assert re.search(r'id="jax_dora\.norms\.norms"[^>]*>\s*jax_dora\.norms\s', page)
    assert (tmp_path / "site" / "javascripts" / "tex-svg.js").stat().st_size > 10**6
    assert r"\odot" in (tmp_path / "site" / "maths.html").read_text()
    # Nothing that a reader's browser would have to fetch from elsewhere.
    assert not re.findall(r'(?:src|href)="https?://[^"]+\.(?:js|css|woff2?)', page)
    assert "cdn" not in page.lower()


def reference() -> list[tuple[str, object]]:
    """Returns each entry of the reference by its name."""
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    found = []
    for entry in re.findall(r"^::: (\S+)$", text, re.MULTILINE):
        parent, _, name = entry.rpartition(".")
        found.append((entry, getattr(importlib.import_module(parent), name)))
    return found


def test_functions_called_like_their_modules_stand_by_their_whole_names():
    """By a shorter one the site would have the module in their place."""
    wrong = {
        entry: module
        for entry, value in reference()
        if (module := getattr(value, "__module__", "")).endswith(f".{entry.rpartition('.')[2]}")
        and not entry.startswith(f"{module}.")
    }
    assert not wrong


@pytest.mark.parametrize(
    "package",
    [
        jax_dora,
        jax_dora.linen,
        jax_dora.lm.encoder,
        jax_dora.lm.finetune,
        jax_dora.lm.models,
        jax_dora.ops,
        jax_dora.peft,
        jax_dora.lm.serve,
        torch_dora,
        torch_dora.ops,
        torch_dora.peft,
    ],
    ids=lambda package: package.__name__,
)
def test_reference_is_complete(package):
    """Every public class and function stands in the reference once, by a name to import it by."""
    documented = [value for _, value in reference()]
    packages = ("jax_dora", "torch_dora", "dora_common")
    public = {
        name: value
        for name, value in vars(package).items()
        if name[0].isalpha() and callable(value) and value.__module__.split(".")[0] in packages
    }
    assert public
    counts = {name: sum(value is one for one in documented) for name, value in public.items()}
    assert {name: count for name, count in counts.items() if count != 1} == {}
