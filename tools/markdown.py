"""Tables in Markdown, for the pages that quote measurements."""

from collections.abc import Callable, Iterable, Mapping


def table(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Returns a table with these column names and lines."""
    header = list(header)
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
    )


def grid[L, C](
    corner: str, lines: Mapping[str, L], columns: Mapping[str, C], cell: Callable[[L, C], str]
) -> str:
    """Returns a table whose cells are computed from the values of their line and their column.

    Args:
      corner: name of the first column, which holds the names of the lines.
      lines, columns: names, and the values that `cell` is called with.
    """
    cells = ([name, *(cell(line, one) for one in columns.values())] for name, line in lines.items())
    return table([corner, *columns], cells)


def gib(size: float, digits: int = 1) -> str:
    """Returns a number of bytes in GiB."""
    return f"{size / 2**30:.{digits}f}"
