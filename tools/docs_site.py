"""Hooks of mkdocs.yml: MathJax as a part of the site, and the version in its footer."""

import importlib.util
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from dora_common.version import __version__

# One file, fonts included.
MATHJAX = "static/mathjax/es5/tex-svg.js"


def on_config(config: Any) -> None:
    config.copyright = f"jax_dora {__version__}, Apache-2.0"


def on_files(files: Files, *, config: Any) -> None:
    """Adds MathJax as the package django-static-mathjax has it; importing Django is not needed."""
    spec = importlib.util.find_spec("mathjax")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("MathJax is not installed; pip install 'jax-dora[docs]'")
    source = Path(spec.submodule_search_locations[0]) / MATHJAX
    files.append(File.generated(config, "javascripts/tex-svg.js", abs_src_path=str(source)))
