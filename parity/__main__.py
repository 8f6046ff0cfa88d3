"""`python -m parity`: runs one command; the exit code is 1 if a comparison fails."""

import importlib
import sys
from collections.abc import Sequence

from parity import command, report
from parity.environment import choose_device


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["report"]:
        return report.main(arguments[1:])
    name = arguments.pop(0) if arguments and arguments[0] in command.MODULES else ""
    options = command.parse(name, arguments)
    options.device = choose_device(options.device)
    try:
        level = importlib.import_module(command.MODULES[name])
    except ModuleNotFoundError as error:
        sys.exit(f"{command.program(name)}: {error}; pip install 'jax-dora[dev]'")
    return level.main(options)


if __name__ == "__main__":
    sys.exit(main())
