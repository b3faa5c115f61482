"""list_regions, inspect and reap: every state that a file can be in, told truly, and nobody alive is ever touched."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ec_shared_region as ec
from procs import path_of, wait_until

PAGE = os.sysconf("SC_PAGESIZE")

# Its creator waits in its own callback, with nothing backed yet or one piece.
STOPPED_CREATOR = """
go = threading.Event()
def progress(done, total):
    go.wait()
thread = threading.Thread(target=lambda: globals().update(r=Region(id, 512, 7168, progress=progress)))
thread.start()
"""


def rounded(size: int) -> int:
    return (size + PAGE - 1) // PAGE * PAGE


def orphan(spawn: Any, engine_id: str, region: str = "ours") -> None:
    child = spawn(region)
    child.run("r = Region(id, 4, 7168)", id=engine_id)
    child.kill()


def listed(engine_id: str) -> ec.RegionInfo:
    """The region as the list has it, which is what inspect says too, but for the time that passed."""
    (info,) = [info for info in ec.list_regions() if info.path == str(path_of(engine_id))]
    alone = ec.inspect(engine_id)
    assert alone is not None and alone.age_seconds >= info.age_seconds
    assert dataclasses.replace(alone, age_seconds=info.age_seconds) == info
    return info


def decided(engine_id: str) -> ec.ReapDecision:
    """What a dry run decides about the region, which is what is done then; and whether that is true."""
    dry = ec.reap([engine_id], dry_run=True)
    assert dry.dry_run and (not dry.decisions[0].is_removed or os.path.lexists(path_of(engine_id)))
    wet = ec.reap([engine_id])
    assert not wet.dry_run and wet.decisions == dry.decisions and wet.freed_bytes == dry.freed_bytes
    (decision,) = wet.decisions
    assert decision.path == str(path_of(engine_id)) and decision.id == engine_id and decision.reason
    if decision.state is not None:
        assert os.path.lexists(path_of(engine_id)) != decision.is_removed
    return decision


@pytest.mark.case("OB-01")
def test_a_live_region_and_every_process_that_has_it(open_region: Any, spawn: Any, engine_id: str) -> None:
    region = open_region(engine_id, 9, 7168)
    joiner = spawn()
    joiner.run("j = Region(id, 9, 7168)", id=engine_id)
    info = listed(engine_id)
    assert (info.id, info.state, info.is_held) == (engine_id, "live", True)
    assert (info.num_blocks, info.block_size_bytes, info.size_bytes) == (9, 7168, 9 * 7168)
    assert info.allocated_bytes == rounded(9 * 7168)
    assert (info.uid, info.mode, info.identity) == (os.geteuid(), 0o600, region.identity())
    assert 0 <= info.age_seconds < 3600
    assert sorted(holder.pid for holder in info.holders) == sorted([os.getpid(), joiner.pid])
    assert info.unseen_holders == 0
    for holder in info.holders:
        assert holder.is_open and not holder.is_dying and holder.mapped_bytes == rounded(9 * 7168)
        assert (holder.uid, holder.user) == (os.geteuid(), info.owner)
        assert "python" in holder.command
    assert any("worker.py" in holder.command for holder in info.holders)

    assert decided(engine_id).state == "live"
    memoryview(region)[3, 4] = 5
    assert joiner.run("memoryview(j)[3, 4]") == 5
    joiner.run("j.cleanup()")


@pytest.mark.case("ST-11")
@pytest.mark.parametrize("made_by", ["ours", "original"])
def test_an_orphan_is_listed_and_reaped(spawn: Any, engine_id: str, made_by: str) -> None:
    orphan(spawn, engine_id, made_by)
    info = listed(engine_id)
    assert (info.state, info.is_held, info.holders, info.unseen_holders) == ("orphan", False, (), 0)
    assert (info.num_blocks, info.identity) == (None, None)
    assert (info.size_bytes, info.allocated_bytes) == (4 * 7168, rounded(4 * 7168))
    decision = decided(engine_id)
    assert (decision.state, decision.is_removed, decision.freed_bytes) == ("orphan", True, rounded(4 * 7168))
    assert ec.inspect(engine_id) is None
    again = decided(engine_id)
    assert (again.state, again.is_removed, again.freed_bytes) == (None, False, 0)


def test_a_region_whose_creator_is_at_work(spawn: Any, engine_id: str) -> None:
    creator = spawn()
    creator.run(STOPPED_CREATOR, id=engine_id)
    wait_until(path_of(engine_id).exists, "the region has its name")
    info = listed(engine_id)
    assert (info.state, info.num_blocks, info.block_size_bytes) == ("being_made", 512, 7168)
    assert [holder.pid for holder in info.holders] == [creator.pid]
    decision = decided(engine_id)
    assert (decision.state, decision.is_removed) == ("being_made", False)
    creator.run("go.set(); thread.join()")
    assert listed(engine_id).state == "live"
    creator.run("r.cleanup()")


def test_a_region_of_the_original_class(spawn: Any, engine_id: str) -> None:
    original = spawn("original")
    original.run("r = Region(id, 4, 7168)", id=engine_id)
    info = listed(engine_id)
    assert (info.state, info.num_blocks, info.identity) == ("original", None, None)
    assert [holder.pid for holder in info.holders] == [original.pid]
    assert decided(engine_id).state == "original"
    original.run("os.close(r._fd); r._fd = None; None")
    assert decided(engine_id).state == "original", "it has it mapped"
    ours = spawn()
    ours.run("j = Region(id, 4, 7168)", id=engine_id)
    info = listed(engine_id)
    assert (info.state, info.num_blocks, len(info.holders)) == ("live", 4, 2), "one of ours announces the geometry"
    ours.run("j.cleanup()")
    original.run("r.cleanup()")


def test_an_original_that_has_not_sized_its_file(spawn: Any, engine_id: str) -> None:
    original = spawn("original")
    original.run("fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)", path=str(path_of(engine_id)))
    assert listed(engine_id).state == "being_made"
    assert decided(engine_id).state == "being_made"
    original.kill()
    assert listed(engine_id).state == "orphan"
    assert decided(engine_id).is_removed


def symlink(path: Path) -> None:
    path.symlink_to("/nonexistent")


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def folder(path: Path) -> None:
    path.mkdir()


def open_mode(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0o644)


def other_owner(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make files of another user")
    path.write_bytes(b"theirs")
    path.chmod(0o600)
    os.chown(path, 1234, 1234)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (symlink, "symbolic link"),
        (fifo, "FIFO"),
        (folder, "directory"),
        (open_mode, "0644"),
        (other_owner, "uid 1234"),
    ],
)
def test_what_is_foreign_is_listed_and_left(
    engine_id: str, litter: Callable[[Path], Path], make: Callable[[Path], None], words: str
) -> None:
    path = litter(path_of(engine_id))
    make(path)
    before = path.lstat()
    info = listed(engine_id)
    assert info.state == "foreign" and words in info.reason
    assert info.uid == before.st_uid
    decision = decided(engine_id)
    assert (decision.state, decision.is_removed, decision.freed_bytes) == ("foreign", False, 0)
    assert words in decision.reason
    after = path.lstat()
    assert (after.st_ino, after.st_mode, after.st_uid, after.st_size) == (
        before.st_ino,
        before.st_mode,
        before.st_uid,
        before.st_size,
    )


@pytest.mark.parametrize("size", [0, 1, 7168, 4 * 7168])
def test_a_region_that_was_shortened_under_its_holders_is_damaged(open_region: Any, engine_id: str, size: int) -> None:
    """Also to a whole number of blocks: then by what its holders have mapped."""
    region = open_region(engine_id, 8, 7168)
    os.truncate(region.path, size)
    info = listed(engine_id)
    assert info.state == "damaged" and "bus error" in info.reason
    assert [holder.pid for holder in info.holders] == [os.getpid()]
    assert not decided(engine_id).is_removed


def test_neither_user_reaps_the_others(as_root: None, spawn: Any, new_id: Any) -> None:
    """Also root judges only its own; who holds the file is told all the same."""
    theirs, mine = new_id(), new_id()
    other = spawn(uid=1000, imports=("ec_shared_region",))
    other.run("r = Region(id, 2, 64)", id=theirs)
    info = listed(theirs)
    assert (info.state, info.uid) == ("foreign", 1000)
    assert [(holder.pid, holder.uid) for holder in info.holders] == [(other.pid, 1000)]
    assert decided(theirs).state == "foreign"
    orphan(spawn, mine)
    code = "[(d.state, d.is_removed) for d in ec_shared_region.reap([id]).decisions]"
    assert other.run(code, id=mine) == [("foreign", False)]
    assert other.run("ec_shared_region.inspect(id).state", id=theirs) == "live"
    assert path_of(mine).exists() and path_of(theirs).exists()
    assert decided(mine).is_removed
    other.run("r.cleanup()")


def test_holders_in_another_pid_namespace_are_elsewhere(open_region: Any, as_root: None, engine_id: str) -> None:
    """As in another container that shares the mount: nobody is seen, and the region lives."""
    region = open_region(engine_id, 2, 64)
    other = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-P", "-c"]
    code = """
import sys, ec_shared_region as ec
info = ec.inspect(sys.argv[1])
print(info.state, len(info.holders), info.unseen_holders, ec.reap([sys.argv[1]]).decisions[0].is_removed)
mine = ec.ECSharedRegion(sys.argv[1], 2, 64)
info = ec.inspect(sys.argv[1])
print(info.state, len(info.holders), info.unseen_holders, mine.check().unseen_holders)
"""
    done = subprocess.run([*other, code, engine_id], capture_output=True, text=True, timeout=60)
    if done.returncode != 0 and "unshare" in done.stderr:
        pytest.skip(f"not permitted here: {done.stderr}")
    assert done.stdout.splitlines() == ["live 0 1 False", "live 1 1 1"], done.stderr
    assert region.check()


def test_reaping_all_takes_the_dead_and_spares_everybody_else(small_shm: Any, new_id: Any) -> None:
    shm = small_shm("size=16m")
    live, original, dead = shm.spawn(), shm.spawn("original"), shm.spawn()
    ids = {name: new_id() for name in ("live", "original", "dead", "short")}
    live.run("r = Region(id, 4, 7168)", id=ids["live"])
    original.run("r = Region(id, 4, 7168)", id=ids["original"])
    dead.run("r = Region(id, 4, 7168); s = Region(short, 1, 100)", id=ids["dead"], short=ids["short"])
    dead.kill()
    shm.anchor.run("open('/dev/shm/other', 'wb').close()")
    shm.anchor.run("open(os.open('/dev/shm/.vllm_ec_unnamed_1_2', os.O_CREAT, 0o600), 'rb').close()")
    free = shm.free_bytes()
    asker = shm.spawn(imports=("ec_shared_region",))
    reap = """
result = ec_shared_region.reap(dry_run=dry)
sorted((d.id or '', d.state, d.is_removed) for d in result.decisions), result.freed_bytes, len(result.removed)
"""
    expected = sorted(
        [
            ("", "orphan", True),
            (ids["live"], "live", False),
            (ids["original"], "original", False),
            (ids["dead"], "orphan", True),
            (ids["short"], "orphan", True),
        ]
    )
    freed = rounded(4 * 7168) + PAGE
    assert asker.run(reap, dry=True) == (expected, freed, 3)
    assert shm.free_bytes() == free
    assert asker.run(reap, dry=False) == (expected, freed, 3)
    assert shm.free_bytes() == free + freed
    assert shm.names() == sorted(["other", *(f"vllm_ec_{ids[name]}.mmap" for name in ("live", "original"))])
    assert asker.run(reap, dry=False)[1:] == (0, 0)
    for child in (live, original):
        child.run("r.cleanup()")


def test_reaping_while_others_construct_and_die(small_shm: Any, new_id: Any) -> None:
    """A sweeper in a loop never takes what a constructor has just made."""
    shm = small_shm("size=32m")
    sweeper, worker = shm.spawn(imports=("ec_shared_region",)), shm.spawn()
    sweeper.run(
        """
stop = threading.Event()
def sweep():
    while not stop.is_set():
        ec_shared_region.reap()
thread = threading.Thread(target=sweep)
thread.start()
"""
    )
    rounds = """
losses = []
for _ in range(100):
    r = Region(id, 4, 7168)
    if not os.path.exists(r.path) or not r.is_creator:
        losses.append(r.check().name)
    r.cleanup()
losses
"""
    assert worker.run(rounds, id=new_id()) == []
    sweeper.run("stop.set(); thread.join()")
    assert shm.names() == []


def test_a_thousand_regions(small_shm: Any) -> None:
    shm = small_shm("size=32m")
    asker = shm.spawn(imports=("ec_shared_region",))
    asker.run("r = Region('many1000', 2, 64)")  # first, since it would remove the others
    shm.anchor.run(
        """
for number in range(1000):
    os.close(os.open(f"/dev/shm/vllm_ec_many{number:04}.mmap", os.O_CREAT | os.O_RDWR, 0o600))
"""
    )
    code = "[(i.id, i.state, len(i.holders)) for i in ec_shared_region.list_regions()]"
    expected = [(f"many{number:04}", "orphan", 0) for number in range(1000)]
    assert asker.run(code) == [*expected, ("many1000", "live", 1)]
    assert asker.run("len(ec_shared_region.reap().removed)") == 1000
    asker.run("r.cleanup()")
    assert shm.names() == []


def test_an_id_that_no_region_can_have(engine_id: str) -> None:
    for question in (ec.inspect, lambda id: ec.reap([id])):
        with pytest.raises(ec.InvalidArgumentError, match="holds a `/`"):
            question("a/b")
        with pytest.raises(ec.ArgumentTypeError):
            question(7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="list of engine ids"):
        ec.reap(engine_id)


def test_a_missing_directory_is_an_error(small_shm: Any) -> None:
    child = small_shm(None).spawn(imports=("ec_shared_region",))
    for question in ("list_regions()", "inspect('a')", "reap()", "preflight(1, 1)"):
        code = f"try: ec_shared_region.{question}\nexcept FileNotFoundError as error: caught = str(error)\ncaught"
        assert "is `/dev/shm` mounted?" in child.run(code)


def test_a_directory_that_is_locked_is_a_timeout_and_no_hang(spawn: Any, engine_id: str) -> None:
    holder = spawn(imports=("fcntl",))
    holder.run("fd = os.open('/dev/shm', os.O_RDONLY); fcntl.flock(fd, fcntl.LOCK_EX)")
    with pytest.raises(TimeoutError, match="lock of the directory"):
        ec.reap([engine_id])
    holder.run("os.close(fd)")


def test_other_threads_run_while_it_looks(open_region: Any, engine_id: str) -> None:
    open_region(engine_id, 2, 64)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(ec.inspect(engine_id))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [info.state for info in results] == ["live"] * 4
