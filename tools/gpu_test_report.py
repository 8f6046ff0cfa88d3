"""What `make test-gpu` showed, as JSON.

    python -m pytest -m gpu --junitxml=FILE.xml …
    python tools/gpu_test_report.py --out benchmarks/results/h200/test_gpu.json FILE.xml …

For every test file: how many tests passed, were skipped, and which failed. Ends with 1 if any did,
or if none passed.
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def summarise(files: list[Path]) -> dict[str, dict[str, object]]:
    """By test module, from pytest's JUnit XML."""
    found: dict[str, dict[str, object]] = {}
    for file in files:
        for case in ElementTree.parse(file).getroot().iter("testcase"):
            # A module that could not be imported is the name of a case without a class.
            module = (case.get("classname") or case.get("name", "")).split(".Test")[0]
            entry = found.setdefault(module, {"passed": 0, "skipped": 0, "failed": []})
            if case.find("failure") is not None or case.find("error") is not None:
                entry["failed"] = [*entry["failed"], case.get("name")]  # pyright: ignore[reportGeneralTypeIssues]
            else:
                outcome = "passed" if case.find("skipped") is None else "skipped"
                entry[outcome] = int(str(entry[outcome])) + 1
    return dict(sorted(found.items()))


def main() -> int:
    from benchmarks.environment import environment

    parser = argparse.ArgumentParser(description="What make test-gpu showed, as JSON.")
    parser.add_argument("files", nargs="+", type=Path, help="pytest's JUnit XML")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="to record, where there is no git checkout")
    options = parser.parse_args()
    modules = summarise(options.files)
    failed = [name for entry in modules.values() for name in entry["failed"]]  # pyright: ignore[reportGeneralTypeIssues]
    report = {
        "environment": environment("cuda", options.commit),
        "passed": sum(int(str(entry["passed"])) for entry in modules.values()),
        "failed": len(failed),
        "modules": modules,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(f"{report['passed']} passed, {len(failed)} failed: {options.out}")
    return 1 if failed or not report["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
