"""`tools/gpu_test_report.py` summarises pytest's JUnit XML by module."""

import sys

import pytest

from benchmarks import results
from tools.gpu_test_report import main, summarise


def cases(*outcomes: str, classname: str = "tests.test_one") -> str:
    each = (f'<testcase classname="{classname}" name="test">{o}</testcase>' for o in outcomes)
    return f"<testsuites><testsuite>{''.join(each)}</testsuite></testsuites>"


UNIMPORTABLE = '<testsuite><testcase name="tests.test_two"><error/></testcase></testsuite>'
IN_A_CLASS = cases("", "<skipped/>", "<error/>", classname="tests.test_one.TestClass")
STOPPED = '<testsuite><testcase time="0.002"/></testsuite>'


def test_adds_files_up_by_module(tmp_path):
    texts = cases("", "<failure/>"), IN_A_CLASS, UNIMPORTABLE, STOPPED
    files = [tmp_path / f"{number}.xml" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    assert summarise(files) == {
        "tests.test_one": {"passed": 2, "skipped": 1, "failed": ["test", "test"]},
        "tests.test_two": {"passed": 0, "skipped": 0, "failed": ["tests.test_two"]},
    }


@pytest.mark.parametrize(
    ("outcomes", "code"), [(("", ""), 0), (("", "<failure/>"), 1), (("<skipped/>",), 1), ((), 1)]
)
def test_only_a_run_in_which_tests_passed_and_none_failed_ends_with_0(
    outcomes, code, tmp_path, monkeypatch
):
    file, out = tmp_path / "run.xml", tmp_path / "report.jsonl"
    file.write_text(cases(*outcomes))
    arguments = ["--out", str(out), "--commit", "abc", str(file)]
    monkeypatch.setattr(sys, "argv", ["gpu_test_report.py", *arguments])
    assert main() == code
    header, rows = results.read(out)
    assert header["environment"]["commit"] == "abc"
    assert rows == [{"module": name} | entry for name, entry in summarise([file]).items()]
