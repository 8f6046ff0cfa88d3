"""`tools/gpu_test_report.py`: pytest's JUnit XML, by module, and when it is no success."""

import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree.ElementTree import ParseError

import pytest

from benchmarks import results
from tools import gpu_test_report


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict]]:
    """The exit status and the rows for files of these texts, by module."""

    def run(*texts: str) -> tuple[int, dict]:
        files = [tmp_path / f"{i}.xml" for i in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        out = tmp_path / "results/report.jsonl"
        arguments = ["--out", out, "--commit", "abc", *files]
        monkeypatch.setattr(sys, "argv", ["gpu_test_report.py", *map(str, arguments)])
        code = gpu_test_report.main()
        header, rows = results.read(out)
        assert header["environment"]["commit"] == "abc"
        return code, {row.pop("module"): row for row in rows}

    return run


def cases(*outcomes: str, classname: str = "tests.test_one") -> str:
    each = (f'<testcase classname="{classname}" name="test">{o}</testcase>' for o in outcomes)
    return f"<testsuites><testsuite>{''.join(each)}</testsuite></testsuites>"


def test_adds_files_up_by_module(report):
    unimportable = '<testsuite><testcase name="tests.test_two"><error/></testcase></testsuite>'
    in_a_class = cases("", "<skipped/>", "<error/>", classname="tests.test_one.TestClass")
    stopped = '<testsuite><testcase time="0.002"/></testsuite>'
    code, found = report(cases("", "<failure/>"), in_a_class, unimportable, stopped)
    assert code == 1
    assert found == {
        "tests.test_one": {"passed": 2, "skipped": 1, "failed": ["test", "test"]},
        "tests.test_two": {"passed": 0, "skipped": 0, "failed": ["tests.test_two"]},
    }


@pytest.mark.parametrize(("outcomes", "code"), [(("",), 0), ((), 1), (("<skipped/>",), 1)])
def test_a_run_in_which_none_passed_is_no_success(report, outcomes, code):
    assert report(cases(*outcomes))[0] == code


def test_writes_nothing_of_a_run_that_was_cut_short(report, tmp_path):
    with pytest.raises(ParseError):
        report(cases("")[:-20])
    assert not (tmp_path / "results").exists()
