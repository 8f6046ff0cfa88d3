"""`tools/gpu_test_report.py`: pytest's JUnit XML, by module, and when it is no success."""

import sys

import pytest

from benchmarks import results
from tools import gpu_test_report


def cases(*outcomes: str, classname: str = "tests.test_one") -> str:
    each = (f'<testcase classname="{classname}" name="test">{o}</testcase>' for o in outcomes)
    return f"<testsuites><testsuite>{''.join(each)}</testsuite></testsuites>"


UNIMPORTABLE = '<testsuite><testcase name="tests.test_two"><error/></testcase></testsuite>'
IN_A_CLASS = cases("", "<skipped/>", "<error/>", classname="tests.test_one.TestClass")
STOPPED = '<testsuite><testcase time="0.002"/></testsuite>'
ONE = {"passed": 2, "skipped": 1, "failed": ["test", "test"]}
TWO = {"passed": 0, "skipped": 0, "failed": ["tests.test_two"]}


@pytest.mark.parametrize(
    ("texts", "code", "modules"),
    [
        ([cases("", "<failure/>"), IN_A_CLASS, UNIMPORTABLE, STOPPED], 1, [ONE, TWO]),
        ([cases("")], 0, [{"passed": 1, "skipped": 0, "failed": []}]),
        ([cases("<skipped/>")], 1, [{"passed": 0, "skipped": 1, "failed": []}]),
        ([cases()], 1, []),
    ],
)
def test_adds_files_up_by_module(texts, code, modules, tmp_path, monkeypatch):
    """A run in which a test failed, or none passed, is no success."""
    files = [tmp_path / f"{number}.xml" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    out = tmp_path / "results/report.jsonl"
    arguments = ["--out", out, "--commit", "abc", *files]
    monkeypatch.setattr(sys, "argv", ["gpu_test_report.py", *map(str, arguments)])
    assert gpu_test_report.main() == code
    header, rows = results.read(out)
    assert header["environment"]["commit"] == "abc"
    names = ["tests.test_one", "tests.test_two"]
    assert rows == [{"module": name} | one for name, one in zip(names, modules, strict=False)]
