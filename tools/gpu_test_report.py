"""Writes what `make test-gpu` showed, a line of JSON for each test file.

    python -m pytest -m gpu --junitxml=FILE.xml …
    python tools/gpu_test_report.py --out benchmarks/results/h200/test_gpu.jsonl FILE.xml …

For every test file: how many tests passed, were skipped, and which failed. Ends with 1 if any did,
or if none passed.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


def summarise(files: list[Path]) -> dict[str, dict[str, Any]]:
    """Returns the outcomes by test module, from pytest's JUnit XML."""
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        for case in ElementTree.parse(file).getroot().iter("testcase"):
            # A module that could not be imported is the name of a case without a class.
            module = (case.get("classname") or case.get("name", "")).split(".Test")[0]
            if not module:
                continue  # What was running as pytest was stopped.
            entry = found.setdefault(module, {"passed": 0, "skipped": 0, "failed": []})
            if case.find("failure") is not None or case.find("error") is not None:
                entry["failed"].append(case.get("name"))
            else:
                outcome = "passed" if case.find("skipped") is None else "skipped"
                entry[outcome] += 1
    return dict(sorted(found.items()))


def main() -> int:
    from benchmarks.results import Writer
    from parity.environment import environment

    parser = argparse.ArgumentParser(description="Write what make test-gpu showed.")
    parser.add_argument("files", nargs="+", type=Path, help="pytest's JUnit XML")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="to record, where there is no git checkout")
    options = parser.parse_args()
    modules = summarise(options.files)
    passed = sum(entry["passed"] for entry in modules.values())
    failed = sum(len(entry["failed"]) for entry in modules.values())
    header = {"kind": "tests", "level": "test_gpu"}
    header |= {"environment": environment("cuda", options.commit)}
    writer = Writer(options.out, header)
    for module, entry in modules.items():
        writer.add({"module": module} | entry)
    print(f"{passed} passed, {failed} failed: {options.out}")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
