"""The command itself: what it answers before it does anything."""

from __future__ import annotations

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

    broken = tmp_path / "broken.JPG"
    broken.write_bytes(b"no image")
    done = command("demo", "--images", str(tmp_path))
    assert done.returncode == 2
    assert str(broken) in done.stderr
    assert "Traceback" not in done.stderr
