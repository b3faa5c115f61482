"""`list`, `show` and `reap`: what is printed, as tables and as JSON, and the exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ec_shared_region as ec
from ec_shared_region.ops import report
from procs import path_of
from test_regions import orphan

PAGE = os.sysconf("SC_PAGESIZE")

REGION_TYPES: dict[str, tuple[type, ...]] = {
    "id": (str, type(None)),
    "path": (str,),
    "state": (str,),
    "reason": (str,),
    "num_blocks": (int, type(None)),
    "block_size_bytes": (int, type(None)),
    "size_bytes": (int,),
    "allocated_bytes": (int,),
    "age_seconds": (float,),
    "uid": (int,),
    "owner": (str, type(None)),
    "mode": (int,),
    "identity": (dict, type(None)),
    "holders": (list,),
    "unseen_holders": (int,),
}
HOLDER_TYPES: dict[str, tuple[type, ...]] = {
    "pid": (int,),
    "uid": (int,),
    "user": (str, type(None)),
    "command": (str,),
    "is_open": (bool,),
    "mapped_bytes": (int,),
    "is_dying": (bool,),
}
DECISION_TYPES: dict[str, tuple[type, ...]] = {
    "id": (str, type(None)),
    "path": (str,),
    "state": (str, type(None)),
    "is_removed": (bool,),
    "freed_bytes": (int,),
    "reason": (str,),
}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "ec_shared_region", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


def has_types(data: dict[str, Any], types: dict[str, tuple[type, ...]]) -> None:
    assert list(data) == list(types)
    for name, kinds in types.items():
        assert type(data[name]) in kinds, (name, data[name])


def is_region(data: dict[str, Any]) -> None:
    has_types(data, REGION_TYPES)
    for holder in data["holders"]:
        has_types(holder, HOLDER_TYPES)
    if data["identity"] is not None:
        assert list(data["identity"]) == ["device", "inode", "nonce"]


def row_of(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.strip().startswith(name)]
    return re.split(r"\s{2,}", line.strip())


def test_the_list(open_region: Any, spawn: Any, new_id: Any) -> None:
    live, dead = new_id(), new_id()
    region = open_region(live, 100, 7168)
    orphan(spawn, dead)
    done = command("list")
    assert (done.returncode, done.stderr) == (0, "")
    row = row_of(done.stdout, live)
    owner = report.printable(ec.inspect(live).owner or str(os.geteuid()))  # type: ignore[union-attr]
    assert row[:5] == [live, "live", "100 x 7,168", "700.0 KiB", "700.0 KiB"]
    assert row[6:] == [owner, str(os.getpid())]
    row = row_of(done.stdout, dead)
    assert row[:5] == [dead, "orphan", "-", "28.0 KiB", report.size(-(-4 * 7168 // PAGE) * PAGE)] and row[-1] == "-"
    assert "orphans: 1, " in done.stdout and "`ec-shared-region reap --all` removes them" in done.stdout

    done = command("list", "--json")
    data = json.loads(done.stdout)
    assert (done.returncode, done.stderr, list(data)) == (0, "", ["regions", "size_bytes", "allocated_bytes"])
    for entry in data["regions"]:
        is_region(entry)
    by_id = {entry["id"]: entry for entry in data["regions"]}
    assert by_id[live]["identity"] == region.identity()._asdict()
    assert by_id[live]["holders"][0]["pid"] == os.getpid()
    assert data["size_bytes"] == sum(entry["size_bytes"] for entry in data["regions"])
    assert command("reap", dead).returncode == 0


def test_one_region(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, 100, 7168)
    done = command("show", engine_id)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    identity = region.identity()
    assert lines[0] == region.path
    assert [line.split(maxsplit=1) for line in lines[1:5]] == [
        ["state", "live: processes hold it"],
        ["geometry", "100 blocks x 7,168 bytes"],
        ["size", "700.0 KiB (716,800 bytes)"],
        ["resident", "700.0 KiB (716,800 bytes)"],
    ]
    assert f"nonce {identity.nonce}" in done.stdout
    row = row_of(done.stdout, str(os.getpid()))
    assert row[2:4] == ["700.0 KiB", "yes"]
    data = json.loads(command("show", engine_id, "--json").stdout)
    is_region(data)
    assert data["state"] == "live"
    os.truncate(region.path, 0)
    done = command("show", engine_id)
    assert done.returncode == 1 and "damaged: " in done.stdout


def test_a_region_that_is_not_there(engine_id: str) -> None:
    done = command("show", engine_id)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no region `{engine_id}`" in done.stderr and "\nhint: " in done.stderr
    done = command("show", engine_id, "--json")
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 1 and error["text"] in done.stderr and error["hint"] in done.stderr


def test_reaping_by_name(open_region: Any, spawn: Any, new_id: Any) -> None:
    live, dead, absent = new_id(), new_id(), new_id()
    open_region(live, 2, 64)
    orphan(spawn, dead)
    freed = report.size(-(-4 * 7168 // PAGE) * PAGE)
    done = command("reap", dead, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"would remove {path_of(dead)}: nobody has it open, {freed}",
        f"would remove 1 of 1; {freed} would come back",
    ]
    assert path_of(dead).exists()
    done = command("reap", live, dead, absent)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        f"kept {path_of(live)}: live: processes hold it",
        f"removed {path_of(dead)}: nobody has it open, {freed}",
        f"nothing at {path_of(absent)}: there is no such region",
        f"removed 1 of 3; {freed} came back",
    ]
    assert path_of(live).exists() and not path_of(dead).exists()
    done = command("reap", dead, "--json")
    data = json.loads(done.stdout)
    assert (done.returncode, list(data)) == (0, ["decisions", "dry_run", "freed_bytes"])
    (decision,) = data["decisions"]
    has_types(decision, DECISION_TYPES)
    assert decision["state"] is None and data["freed_bytes"] == 0


def test_reaping_all_is_no_failure_where_somebody_lives(small_shm: Any, new_id: Any) -> None:
    shm = small_shm("size=8m")
    child, dead = shm.spawn(imports=("subprocess",)), shm.spawn()
    child.run("r = Region(id, 2, 64)", id=new_id())
    dead.run("r = Region(id, 2, 64)", id=new_id())
    dead.kill()
    run = """
done = subprocess.run([sys.executable, '-P', '-m', 'ec_shared_region', *arguments], capture_output=True, text=True)
(done.returncode, done.stdout.splitlines()[-1])
"""
    assert child.run(run, arguments=["reap", "--all", "--dry-run"])[1].startswith("would remove 1 of 2")
    code, line = child.run(run, arguments=["reap", "--all"])
    assert code == 0 and line.startswith("removed 1 of 2")
    child.run("r.cleanup()")
    assert child.run(run, arguments=["list"]) == (0, "no regions in /dev/shm")
    assert shm.names() == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["reap"], "--all"),
        (["reap", "x", "--all"], "--all"),
        (["reap", "a/b"], "a/b"),
        (["show"], "ID"),
        (["show", "a/b"], "a/b"),
        (["show", ".."], "dots"),
    ],
)
def test_a_wrong_command_line_is_2(arguments: list[str], named: str) -> None:
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr and "Traceback" not in done.stderr


def test_a_missing_directory_is_3(small_shm: Any) -> None:
    child = small_shm(None).spawn(imports=("subprocess",))
    run = """
done = subprocess.run([sys.executable, '-P', '-m', 'ec_shared_region', *arguments], capture_output=True, text=True)
(done.returncode, done.stdout, 'hint: ' in done.stderr)
"""
    for arguments in (["list"], ["show", "a"], ["reap", "--all"]):
        assert child.run(run, arguments=arguments) == (3, "", True)


def test_names_of_others_do_not_steer_the_terminal(engine_id: str, litter: Any) -> None:
    """Anybody may put a name into /dev/shm."""
    litter(path_of(f"{engine_id}\x1b[31m")).symlink_to("/nonexistent")
    no_text = os.fsencode(path_of(engine_id)).replace(b".mmap", b"\xff.mmap")
    litter(Path(os.fsdecode(no_text))).touch(0o600)
    done = command("list")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and f"{engine_id}\\x1b[31m" in done.stdout
    assert f"vllm_ec_{engine_id}\\udcff.mmap" in done.stdout
    assert json.loads(command("list", "--json").stdout)["regions"]


def test_sizes_and_ages_for_people() -> None:
    sizes = [report.size(number) for number in (0, 1023, 1024, 1536, 7 << 20, 3 << 30, 5 << 40)]
    assert sizes == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "7.0 MiB", "3.0 GiB", "5.0 TiB"]
    ages = [report.age(seconds) for seconds in (0.9, 59, 61, 3600, 90061)]
    assert ages == ["0 s", "59 s", "1 min 1 s", "1 h 0 min", "1 d 1 h"]


@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["show", "x"], ["reap", "x"]])
def test_nothing_heavy_is_loaded(arguments: list[str]) -> None:
    """Neither torch nor what a table needs where none is printed."""
    code = f"""
import sys
sys.argv = {["ec-shared-region", *arguments]!r}
from ec_shared_region.cli import main
try:
    main()
finally:
    heavy = {{"torch", "numpy", "PIL", "multiprocessing"}} | ({{"rich"}} if "--json" in sys.argv else set())
    print("loaded:", heavy & set(sys.modules), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert "loaded: set()" in done.stderr
