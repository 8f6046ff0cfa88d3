"""Hooks of mkdocs.yml: MathJax as a part of the site; version and repository in its footer."""

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from dora_common.version import __version__

# One file, fonts included.
MATHJAX = "static/mathjax/es5/tex-svg.js"
ORIGIN = re.compile(
    r"(?:https://|ssh://|(?=git@))(?:[^@/]+@)?([^/:]+)(?::\d+)?[:/]+(.+?)(?:\.git)?/?"
)


def on_config(config: Any) -> None:
    config.copyright = f"jax_dora {__version__}, Apache-2.0"
    git = ["git", "config", "remote.origin.url"]
    origin = subprocess.run(git, capture_output=True, text=True, check=False).stdout
    if address := page_of(origin.strip()):
        # As a footer's link: for the theme's own the site would ask a host for numbers of stars.
        config.copyright += f', <a href="{address}">source</a>'


def page_of(origin: str) -> str | None:
    """Returns where a browser finds the repository that git fetches from `origin`, or None of one
    that is on no host; a user's name or token in `origin` is left out."""
    found = ORIGIN.fullmatch(origin)
    return f"https://{found[1]}/{found[2]}" if found else None


def on_files(files: Files, *, config: Any) -> None:
    """Adds MathJax as the package django-static-mathjax has it; importing Django is not needed."""
    spec = importlib.util.find_spec("mathjax")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("MathJax is not installed; pip install 'jax-dora[docs]'")
    source = Path(spec.submodule_search_locations[0]) / MATHJAX
    files.append(File.generated(config, "javascripts/tex-svg.js", abs_src_path=str(source)))
