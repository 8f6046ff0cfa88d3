"""Writes docs/commands.md, all commands with all flags, from the parser of `jax-dora`.

python tools/command_page.py
"""

import argparse
from pathlib import Path

from jax_dora.lm.commands import parser

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"


def page() -> str:
    """Returns the text of the page."""
    text = [
        "# Commands and flags",
        "",
        "This page lists every command of `jax-dora` and all its flags. Install it with",
        "`pip install '.[finetune,serve]'`; `python -m jax_dora` runs the same commands.",
        "",
        "| exit status | meaning |",
        "| --- | --- |",
        "| 2 | a flag has a value that is not allowed; one line says why |",
        "| 1 | the run diverged, logits are not finite, the disk is full, or memory is too small |",
        "| 130 | Ctrl-C |",
    ]
    subparsers = (action.choices for action in parser()._actions)
    [commands] = (choices for choices in subparsers if isinstance(choices, dict))
    for name, command in commands.items():
        text += ["", f"## {name}", "", *_paragraphs(command.description)]
        for group in command._action_groups:
            actions = [action for action in group._group_actions if action.dest != "help"]
            if actions:
                title = "" if group.title in ("options", "positional arguments") else group.title
                rows: list[tuple[str, ...]]
                rows = [(str(title), "default", ""), ("---",) * 3, *map(_cells, actions)]
                if not any(cells[1] for cells in rows[2:]):
                    rows = [(name, help_text) for name, _, help_text in rows]
                text += ["", *(f"| {' | '.join(cells)} |" for cells in rows)]
    return "\n".join(text) + "\n"


def _paragraphs(description: str | None) -> list[str]:
    """Returns the lines of a description; indented paragraphs become blocks of shell commands."""
    text: list[str] = []
    for block in (description or "").strip().split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("    "):
            lines = ["```sh", *(line.removeprefix("    ") for line in lines), "```"]
        text += [*lines, ""]
    return text[:-1]


def _cells(action: argparse.Action) -> tuple[str, str, str]:
    name = ", ".join(action.option_strings) or str(action.metavar)
    if action.choices:
        name += f" {'|'.join(action.choices)}"
    has_default = action.default is not None and action.default is not False
    default = str(action.default) if has_default else ""
    text = (action.help or "").strip()
    name, default, text = (cell.replace("|", "\\|") for cell in (name, default, text))
    return f"`{name}`", f"`{default}`" if default else "", text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
