"""Runs a program of PEFT's users whose DoRA layers compute by torch_dora.

    python -m torch_dora.accelerate train.py --lr 1e-4
    torchrun --nproc-per-node 2 -m torch_dora.accelerate -m axolotl.cli.train config.yml

In this process every model that PEFT adapts is accelerated as by
:func:`torch_dora.peft.accelerate`, and the report is printed to stderr. Python processes that the
program itself starts are not changed.
"""

import os
import runpy
import sys

USAGE = "usage: python -m torch_dora.accelerate (program.py | -m module) [arguments of the program]"


def main() -> None:
    """Runs the program that the command line names."""
    is_module, program = sys.argv[1:2] == ["-m"], sys.argv[1:]
    program = program[is_module:]
    if not program or program[0].startswith("-"):
        sys.exit(USAGE)
    from torch_dora.peft.acceleration import accelerate_process

    is_first = os.environ.get("RANK", "0") == "0"
    accelerate_process(lambda report: is_first and print(report, file=sys.stderr, flush=True))
    sys.argv = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        # As the interpreter does for a program's path.
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
