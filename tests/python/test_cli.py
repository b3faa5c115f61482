"""The command itself: what it answers before it does anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import ec_shared_region
from ec_shared_region import cli


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ec_shared_region", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


def test_version() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"ec-shared-region {ec_shared_region.__version__}\n")


def test_the_installed_command_is_this_one() -> None:
    (script,) = entry_points(group="console_scripts", name="ec-shared-region")
    assert script.load() is cli.main


@pytest.mark.parametrize("name", [None, *cli.cli.commands])
def test_help_teaches(name: str | None) -> None:
    """Every command's help has an example that names the command, and the exit codes."""
    done = command(*filter(None, [name]), "--help")
    assert done.returncode == 0
    assert done.stderr == ""
    assert f"  ec-shared-region {name or 'demo'}" in done.stdout.split("Example", 1)[1]
    assert "Exit codes" in done.stdout
    assert "130" in done.stdout


@pytest.mark.parametrize("name", [None, *cli.cli.commands])
def test_help_loads_nothing_heavy(name: str | None) -> None:
    """What makes the command start at once: no import that takes longer than click's own."""
    code = f"""
import sys
sys.argv = {["ec-shared-region", *filter(None, [name]), "--help"]!r}
from ec_shared_region.cli import main
try:
    main()
finally:
    print({{"torch", "numpy", "rich", "PIL", "skimage", "multiprocessing"}} & set(sys.modules), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "set()\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nonsense"], "nonsense"),
        (["demo", "--workers", "0"], "--workers"),
        (["demo", "--hidden-size", "wide"], "wide"),
        (["demo", "--kill", "nobody"], "creator"),
        (["demo", "--images", "/nonexistent"], "/nonexistent"),
        (["demo", "--engine-id", "a/b"], "a/b"),
        (["demo", "--engine-id", "x" * 300], "at most"),
    ],
)
def test_a_wrong_command_line_is_2_and_says_what(arguments: list[str], named: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert named in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("missing", ["torch", "PIL", "skimage"])
def test_a_missing_extra_says_how_to_get_it(missing: str) -> None:
    code = f"""
import importlib.util, sys
sys.argv = ["ec-shared-region", "demo"]
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == {missing!r} else find_spec(name, package)
from ec_shared_region.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "")
    assert "\nhint: pip install 'ec-shared-region[demo]'" in done.stderr


def test_a_photograph_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    done = command("demo", "--images", str(tmp_path))
    assert done.returncode == 2
    assert f"no photographs in `{tmp_path}`" in done.stderr

    broken = [tmp_path / name for name in ("a.JPG", "b.png")]
    for path in broken:
        path.write_bytes(b"no image")
    done = command("demo", "--images", str(tmp_path))
    assert done.returncode == 2
    assert all(str(path) in done.stderr for path in broken), "all of them, in one run"
    assert "\nhint: take them out" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["demo", "--help"]])
@pytest.mark.case("FR-31")
def test_output_that_cannot_be_written_is_an_error_in_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ec_shared_region", *arguments], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 3
    assert done.stderr == b"error: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.case("FR-31", "FR-32")
def test_a_reader_that_has_enough_is_no_traceback(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "ec_shared_region", "demo", "--help"],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.case("FR-31")
def test_closed_streams_are_no_traceback() -> None:
    done = subprocess.run(["sh", "-c", f'"{sys.executable}" -m ec_shared_region --help >&- 2>&-'], timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--workers", "0"], 2), (["--engine-id", "a/b"], 2), (["--images", "/nonexistent"], 2)]
)
def test_json_is_one_object_also_of_a_wrong_command_line(arguments: list[str], code: int) -> None:
    done = command("demo", "--json", *arguments)
    found = json.loads(done.stdout)
    assert done.returncode == code
    assert found["ok"] is False and found["error"]["text"] in done.stderr
    assert found["verdict"].startswith("FAILED: ")


@pytest.mark.case("FR-33", "FR-34")
@pytest.mark.parametrize("module", ["click", "logging", "ec_shared_region.region"])
def test_ctrl_c_during_the_import_says_nothing(module: str) -> None:
    """It ends by the signal, as a program does that has not begun."""
    code = f"""
import os, signal, sys
sys.orig_argv = [sys.executable, "-P", "/usr/bin/ec-shared-region", "--help"]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.modules.pop({module!r}, None)
sys.meta_path.insert(0, Finder())
from ec_shared_region.cli import main
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_is_left_alone_in_other_programs() -> None:
    """And taken back as soon as the command begins."""
    code = """
import signal, sys
before = signal.getsignal(signal.SIGINT)
import ec_shared_region
assert signal.getsignal(signal.SIGINT) is before
from ec_shared_region import _early
assert _early.is_command(["python", "-P", "-X", "dev", "/usr/bin/ec-shared-region", "demo"])
assert _early.is_command(["python", "-m", "ec_shared_region"])
assert not _early.is_command(["python", "-m", "engine", "ec-shared-region"])
assert not _early.is_command(["python", "-c", "import ec_shared_region"]) and not _early.is_command(["python"])
sys.orig_argv = ["python", "-m", "ec_shared_region"]
_early._leave_ctrl_c_to_the_system()
assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
_early.take_ctrl_c()
assert signal.getsignal(signal.SIGINT) is before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
