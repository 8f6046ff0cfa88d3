"""The site builds without a warning and runs its notebook, every page's snippets run, and the
reference is complete."""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import jax_dora
import jax_dora.finetune.command as finetune
import jax_dora.linen
import jax_dora.ops
import jax_dora.peft
import torch_dora
import torch_dora.peft

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SNIPPETS = {
    path.relative_to(DOCS).as_posix(): snippets
    for path in sorted(DOCS.glob("**/*.md"))
    if (snippets := SNIPPET.findall(path.read_text()))
}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """Snippets this small take far longer to compile than to run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# As test_checkpoint.py: orbax in its oldest version warns.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
# PEFT asks transformers by a name that the newest transformers calls deprecated.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("page", SNIPPETS)
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    # As a user's process has it.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for number, snippet in enumerate(SNIPPETS[page], 1):
            exec(compile(snippet, f"{page}, snippet {number}", "exec"), namespace)


def test_options_exist():
    """Every option that the guide names is one of the script's."""
    known = {option for action in finetune.parser()._actions for option in action.option_strings}
    named = set(re.findall(r"--[a-z]+(?:-[a-z]+)*", (DOCS / "finetuning.md").read_text()))
    assert named
    assert named <= known


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
    assert "DoRALinear" in page
    notebook = (tmp_path / "site" / "notebooks" / "quickstart.html").read_text()
    # What its cells printed.
    loss = re.search(r"loss (\d\.\d+) -&gt; (\d\.\d+)", notebook)
    assert loss
    assert float(loss[2]) < float(loss[1])
    assert re.search(r"largest difference of the logits: \d\.\de-0[5-9]", notebook)
    # Nothing that a reader's browser would have to fetch from elsewhere.
    for html in (page, notebook):
        assert not re.findall(r'(?:src|href)="https?://[^"]+\.(?:js|css|woff2?)', html)
        assert "cdn" not in html.lower()


@pytest.mark.parametrize(
    "package",
    [jax_dora, jax_dora.linen, jax_dora.ops, jax_dora.peft, torch_dora, torch_dora.peft],
    ids=lambda package: package.__name__,
)
def test_reference_is_complete(package):
    """Every public name that has a docstring of its own stands in the reference, as what it is: two
    packages may have functions of one name."""
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    names = getattr(package, "__all__", None) or [n for n in vars(package) if n[0].isalpha()]
    public = [getattr(package, name) for name in names]
    public = {f"{one.__module__}.{one.__qualname__}" for one in public if not inspect.ismodule(one)}
    assert public
    assert public <= documented
