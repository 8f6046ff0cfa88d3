"""`tools/setup.sh` finds an interpreter, installs once, and reports what is missing."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = ("sh", "cat", "cksum", "dirname", "mkdir", "cp", "ln", "rm", "grep")

# A fake interpreter: it passes every check, environments get a copy of it, other calls are logged.
PYTHON = """\
#!/bin/sh
case "$*" in
    *"-m venv"*) for venv; do :; done; mkdir -p "$venv/bin"; cp "$0" "$venv/bin/python" ;;
    *"-m pip --version"* | "-c "*) ;;
    *) echo "$*" >>"$LOG" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with its own PATH, which has no Python."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("tools/setup.sh", "tools/oldest.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in COMMANDS:
        command = shutil.which(name)
        assert command, name
        (tmp_path / "bin" / name).symlink_to(command)
    return tmp_path


def put_python(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PYTHON)
    path.chmod(0o755)
    return path


def set_up(checkout: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (checkout / "log").write_text("")
    return subprocess.run(
        [checkout / "bin/sh", "tools/setup.sh", *arguments],
        cwd=checkout,
        env={
            "PATH": str(checkout / "bin"),
            "HOME": str(checkout),
            "LOG": str(checkout / "log"),
            **variables,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def installed(checkout: Path) -> list[str]:
    return [line.split()[-1] for line in (checkout / "log").read_text().splitlines()]


@pytest.mark.parametrize(
    "place",
    ["bin/python3", "bin/python3.13", ".pyenv/versions/3.12.9/bin/python", "other/bin/python"],
)
def test_finds_an_interpreter_and_installs_once(checkout, place):
    python = put_python(checkout / place)
    variables = {"PYTHON": str(python)} if place.startswith("other") else {}
    result = set_up(checkout, **variables)
    assert result.returncode == 0, result.stderr
    assert "Making .venv" in result.stdout
    assert installed(checkout) == [".[dev]"]

    result = set_up(checkout, **variables)
    assert (result.returncode, result.stdout) == (0, "")
    assert installed(checkout) == []


def test_a_change_refreshes_the_environment_in_place(checkout):
    put_python(checkout / "bin/python3")
    set_up(checkout)
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    result = set_up(checkout)
    assert "Making" not in result.stdout
    assert ".[dev]" in installed(checkout)
    set_up(checkout, EXTRAS="dev,cuda13")
    assert ".[dev,cuda13]" in installed(checkout)


def test_constraints_reach_pip(checkout):
    put_python(checkout / "bin/python3")
    result = set_up(checkout, ".venv-oldest", "tools/oldest.txt")
    assert result.returncode == 0, result.stderr
    assert (checkout / ".venv-oldest/bin/python").exists()
    assert "--constraint tools/oldest.txt" in (checkout / "log").read_text()


def test_says_what_to_install(checkout):
    result = set_up(checkout)
    assert result.returncode == 1
    assert "No Python 3.12 or newer" in result.stderr
    assert "apt-get install python3.12" in result.stderr


def test_refuses_a_named_interpreter_that_does_not_fit(checkout):
    old = put_python(checkout / "bin/python3.9")
    old.write_text("#!/bin/sh\nexit 1\n")
    result = set_up(checkout, PYTHON=str(old))
    assert result.returncode == 1
    assert f"PYTHON={old} cannot be used: expected Python 3.12 or newer" in result.stderr
