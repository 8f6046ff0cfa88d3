"""Hooks of mkdocs.yml: MathJax in the site's own files; version and repository in the footer."""

import functools
import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from dora_common.version import __version__

# MathJax as one file, with its fonts.
MATHJAX = "static/mathjax/es5/tex-svg.js"
ORIGIN = re.compile(
    r"(?:https://|ssh://|(?=git@))(?:[^@/]+@)?([^/:]+)(?::\d+)?[:/]+(.+?)(?:\.git)?/?"
)


def on_config(config: Any) -> None:
    config.copyright = f"jax_dora {__version__}, Apache-2.0"
    if address := repository():
        # A link in the footer, because the theme's own link makes a reader's browser ask the host
        # for the number of stars.
        config.copyright += f', <a href="{address}">source</a>'


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Gives the link `[text][repository]` its address, or removes it if there is none."""
    address = repository()
    return re.sub(r"\[([^]]+)\]\[repository\]", rf"[\1]({address})" if address else r"\1", markdown)


@functools.cache
def repository() -> str | None:
    """Returns the web address of the repository, or None if the clone has no remote on a host."""
    git = ["git", "config", "remote.origin.url"]
    origin = subprocess.run(git, capture_output=True, text=True, check=False).stdout
    return page_of(origin.strip())


def page_of(origin: str) -> str | None:
    """Returns the web address of the repository at the git remote `origin`, without a user's name
    or token, or None if the remote is not on a host."""
    found = ORIGIN.fullmatch(origin)
    return f"https://{found[1]}/{found[2]}" if found else None


def on_files(files: Files, *, config: Any) -> None:
    """Adds MathJax from the package django-static-mathjax; Django is not imported."""
    spec = importlib.util.find_spec("mathjax")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("MathJax is not installed; pip install 'jax-dora[docs]'")
    source = Path(spec.submodule_search_locations[0]) / MATHJAX
    files.append(File.generated(config, "javascripts/tex-svg.js", abs_src_path=str(source)))
