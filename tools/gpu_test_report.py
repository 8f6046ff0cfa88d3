"""Writes a report of `make test-gpu` from pytest's JUnit XML.

    python -m pytest -m gpu --junitxml=FILE.xml ...
    python tools/gpu_test_report.py --out benchmarks/results/h200/test_gpu.jsonl FILE.xml ...

The report has one line of JSON for each test file: how many tests passed, how many were skipped,
and the names of those that failed. The exit status is 1 if a test failed or none passed.
"""

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


def summarise(files: list[Path]) -> dict[str, dict[str, Any]]:
    """Returns the outcomes by test module, from pytest's JUnit XML."""
    modules: dict[str, dict[str, Any]] = {}
    for file in files:
        for case in ElementTree.parse(file).getroot().iter("testcase"):
            # If a module could not be imported, its name is that of a case without a class.
            module = (case.get("classname") or case.get("name", "")).split(".Test")[0]
            if not module:
                continue  # The test that ran when pytest was stopped.
            entry = modules.setdefault(module, {"passed": 0, "skipped": 0, "failed": []})
            if case.find("failure") is not None or case.find("error") is not None:
                entry["failed"].append(case.get("name"))
            else:
                outcome = "passed" if case.find("skipped") is None else "skipped"
                entry[outcome] += 1
    return dict(sorted(modules.items()))


def main() -> int:
    from benchmarks.results import Writer
    from parity.environment import environment

    parser = argparse.ArgumentParser(description="Write a report of make test-gpu.")
    parser.add_argument("files", nargs="+", type=Path, help="pytest's JUnit XML")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="commit to record, if this is not a git checkout")
    options = parser.parse_args()
    modules = summarise(options.files)
    passed = sum(entry["passed"] for entry in modules.values())
    failed = sum(len(entry["failed"]) for entry in modules.values())
    facts = environment("cuda", options.commit)
    writer = Writer(options.out, {"kind": "tests", "level": "test_gpu", "environment": facts})
    for module, entry in modules.items():
        writer.add({"module": module} | entry)
    print(f"{passed} passed, {failed} failed: {options.out}")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
