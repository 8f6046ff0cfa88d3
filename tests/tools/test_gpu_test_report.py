"""`tools/gpu_test_report.py`: pytest's JUnit XML, by module, and when it is no success."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree.ElementTree import ParseError

import pytest

from benchmarks import results
from tools import gpu_test_report

SUITE = {
    "test_mixed.py": """
import pytest

@pytest.mark.parametrize("n", [0, 1])
def test_passes_if_zero(n):
    assert n == 0

class TestClass:
    def test_in_a_class(self):
        pass

@pytest.fixture
def broken():
    raise RuntimeError

def test_is_never_reached(broken):
    pass

@pytest.fixture
def untidy():
    yield
    raise RuntimeError

def test_is_not_cleaned_up(untidy):
    pass

@pytest.mark.skip
def test_skips():
    pass

@pytest.mark.xfail
def test_fails_as_expected():
    raise RuntimeError
""",
    "test_sound.py": "def test_passes(): pass",
    "test_unimportable.py": "import nothing_of_this_name",
}
MIXED = {
    "passed": 2,
    "skipped": 2,
    "failed": ["test_passes_if_zero[1]", "test_is_never_reached", "test_is_not_cleaned_up"],
}
SOUND = {"passed": 1, "skipped": 0, "failed": []}
UNIMPORTABLE = {"passed": 0, "skipped": 0, "failed": ["tests.test_unimportable"]}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The XML of a run of SUITE with these arguments."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "tests").mkdir()
    for name, text in SUITE.items():
        (folder / "tests" / name).write_text(text)

    def run(name: str, *arguments: str) -> Path:
        file = folder / f"{name}.xml"
        options = ["--rootdir=.", "-p", "no:cacheprovider", f"--junitxml={file}"]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        subprocess.run(command, cwd=folder, capture_output=True, check=False)
        return file

    return run


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict]]:
    """The exit status and the rows for these files, by module."""

    def run(*files: Path) -> tuple[int, dict]:
        out = tmp_path / "results/report.jsonl"
        arguments = ["--out", out, "--commit", "abc", *files]
        monkeypatch.setattr(sys, "argv", ["gpu_test_report.py", *map(str, arguments)])
        code = gpu_test_report.main()
        header, rows = results.read(out)
        assert header["environment"]["commit"] == "abc"
        return code, {row.pop("module"): row for row in rows}

    return run


def test_tells_by_module_what_passed_was_skipped_and_failed(suite, report, capsys):
    code, found = report(suite("all", "--continue-on-collection-errors", "tests"))
    assert code == 1
    assert found == {
        "tests.test_mixed": MIXED,
        "tests.test_sound": SOUND,
        "tests.test_unimportable": UNIMPORTABLE,
    }
    assert list(found) == sorted(found)
    assert capsys.readouterr().out.startswith("3 passed, 4 failed: ")


def test_a_run_in_which_all_passed_ends_with_0(suite, report):
    code, found = report(suite("sound", "tests/test_sound.py"))
    assert code == 0
    assert found == {"tests.test_sound": SOUND}


def cases(*outcomes: str) -> str:
    each = (f'<testcase classname="tests.test_one" name="test">{o}</testcase>' for o in outcomes)
    return f"<testsuites><testsuite>{''.join(each)}</testsuite></testsuites>"


def test_adds_files_up(report, tmp_path):
    for name, outcomes in {"a": ("", "<failure/>"), "b": ("", "<skipped/>", "<error/>")}.items():
        (tmp_path / f"{name}.xml").write_text(cases(*outcomes))
    code, found = report(tmp_path / "a.xml", tmp_path / "b.xml")
    module = {"passed": 2, "skipped": 1, "failed": ["test", "test"]}
    assert (code, found) == (1, {"tests.test_one": module})


@pytest.mark.parametrize("outcomes", [(), ("<skipped/>",)])
def test_a_run_in_which_none_passed_is_no_success(report, tmp_path, outcomes):
    (tmp_path / "run.xml").write_text(cases(*outcomes))
    code, found = report(tmp_path / "run.xml")
    assert (code, sum(module["passed"] for module in found.values())) == (1, 0)


def test_writes_nothing_of_a_run_that_was_cut_short(report, tmp_path):
    (tmp_path / "run.xml").write_text(cases("")[:-20])
    with pytest.raises(ParseError):
        report(tmp_path / "run.xml")
    assert not (tmp_path / "results").exists()
