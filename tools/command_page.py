"""Writes docs/commands.md, every flag of every command, from the parser.

python tools/command_page.py
"""

import argparse
import sys
from pathlib import Path

from jax_dora.commands import parser

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "commands.md"


def page() -> str:
    """Returns the page."""
    text = [
        "# Commands and flags",
        "",
        "This page lists every command of `jax-dora` and all its flags. Install it with",
        "`pip install 'jax-dora[finetune,serve]'`; `python -m jax_dora` runs the same commands.",
        "",
        "| exit status | meaning |",
        "| --- | --- |",
        "| 2 | a flag has a value that is not allowed; one line says why |",
        "| 1 | the run diverged, logits are not finite, the disk is full, or memory is too small |",
        "| 130 | Ctrl-C |",
    ]
    [commands] = (one.choices for one in parser()._actions if isinstance(one.choices, dict))
    for name, command in commands.items():
        text += ["", f"## {name}", "", *_paragraphs(command.description)]
        for group in command._action_groups:
            actions = [one for one in group._group_actions if one.dest != "help"]
            if actions:
                title = (
                    group.title if group.title not in ("options", "positional arguments") else ""
                )
                text += ["", f"| {title} | default | |", "| --- | --- | --- |"]
                text += [_row(one) for one in actions]
    return "\n".join(text) + "\n"


def _paragraphs(description: str | None) -> list[str]:
    text: list[str] = []
    for block in (description or "").strip().split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("    "):
            lines = ["```sh", *(line.removeprefix("    ") for line in lines), "```"]
        text += [*lines, ""]
    return text[:-1]


def _row(action: argparse.Action) -> str:
    name = ", ".join(action.option_strings) or str(action.metavar)
    if action.choices:
        name += f" {'|'.join(action.choices)}"
    has_default = action.default is not None and action.default is not False
    default = str(action.default) if has_default else ""
    told = (action.help or "").replace("(%(default)s)", "").replace("%(default)s", "").strip()
    name, default, told = (one.replace("|", "\\|") for one in (name, default, told))
    return f"| `{name}` | {f'`{default}`' if default else ''} | {told} |"


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
