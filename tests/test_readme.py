"""README: its snippets run and warn of nothing, and its links, paths and make targets exist."""

import logging
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_snippets_run(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert snippets
    namespace: dict[str, object] = {}
    for number, snippet in enumerate(snippets, 1):
        exec(compile(snippet, f"README.md, snippet {number}", "exec"), namespace)
    assert not [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_is_short():
    assert len(README.splitlines()) <= 110


def test_links_and_paths_exist():
    targets = re.findall(r"\]\((?!https?:)([^)]+)\)", README)
    for row in re.findall(r"^\| (`[^|]+/`) \|", README, re.MULTILINE):
        targets += re.findall(r"`([^`]+)`", row)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|[`;] ?)make ([a-z-]+)", README, re.MULTILINE))
    assert {"parity", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
