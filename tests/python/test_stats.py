"""stats() of a region, and release_name(), which gives the name up early."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest

import ec_shared_region as ec
from procs import error_of, path_of

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.mark.case("OB-01")
def test_the_numbers_of_a_region(open_region: Any, engine_id: str) -> None:
    creator = open_region(engine_id, 9, 7168)
    joiner = open_region(engine_id, 9, 7168)
    for region, role in ((creator, "creator"), (joiner, "joiner")):
        stats = region.stats()
        assert (stats.role, stats.nbytes) == (role, 9 * 7168)
        assert stats.allocated_bytes == -(-9 * 7168 // PAGE) * PAGE
        assert (stats.pinned_bytes, stats.pinned_pieces, stats.pin_seconds) == (0, 0, None)
        assert stats.open_seconds >= stats.waited_seconds >= 0 and stats.prefault_seconds >= 0
        assert 0 <= stats.huge_bytes <= stats.nbytes
    joiner.cleanup()
    with pytest.raises(ValueError, match="closed"):
        joiner.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.role = "x"  # type: ignore[misc]


def test_huge_pages_are_counted_as_they_are_now(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, 4, 1 << 21)
    assert region.stats().huge_bytes == region.prefault_report.huge_bytes
    joiner = open_region(engine_id, 4, 1 << 21)
    assert joiner.stats().huge_bytes == 0, "it has touched nothing"
    assert not any(memoryview(joiner).cast("B"))
    assert joiner.stats().huge_bytes == region.prefault_report.huge_bytes


def test_the_counters_of_a_process(spawn: Any, engine_id: str) -> None:
    dead = spawn()
    dead.run("r = Region(id, 1, 100)", id=engine_id + "x")
    dead.kill()
    child = spawn(imports=("dataclasses",), env={"EC_SHARED_REGION_PIN": "0"})
    counters = "dataclasses.asdict(r.stats().counters)"
    before = child.run(f"r = Region(id, 3, 64); {counters}", id=engine_id)
    assert before["created"] == 1 and before["reclaimed_files"] >= 1 and before["reclaimed_bytes"] >= PAGE
    assert (before["joined"], before["failed"], before["pinned"], before["pins_skipped"]) == (0, 0, 0, 0)
    child.run("j = Region(id, 3, 64); bool(r.pin_memory())", id=engine_id)
    error_of(child, "Region(id, 4, 64)", id=engine_id)
    after = child.run(counters)
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    # A joiner places nothing, so it has nothing to fall back from.
    assert changed == {"joined": 1, "failed": 1, "pins_skipped": 1}
    child.run("j.cleanup(); r.cleanup()")


@pytest.mark.case("ST-04")
def test_a_released_name_frees_the_memory_however_the_processes_end(small_shm: Any, engine_id: str) -> None:
    shm = small_shm("size=8m")
    creator, joiner = shm.spawn(), shm.spawn()
    creator.run("r = Region(id, 4, 1 << 20)", id=engine_id)
    joiner.run("r = Region(id, 4, 1 << 20)", id=engine_id)
    assert joiner.run("r.release_name()") is False
    assert len(shm.names()) == 1, "a joiner changes nothing"
    assert creator.run("r.release_name()") is True
    assert shm.names() == []
    assert creator.run("r.release_name()") is False
    assert creator.run("r.check().name") == "lost"
    creator.run("memoryview(r)[3, 4] = 5")
    assert joiner.run("memoryview(r)[3, 4]") == 5
    assert shm.free_bytes() == 4 << 20
    creator.kill()
    joiner.kill()
    assert shm.free_bytes() == 8 << 20


@pytest.mark.case("ST-04")
def test_a_successor_is_another_region_and_survives_the_cleanup(open_region: Any, spawn: Any, engine_id: str) -> None:
    region = open_region(engine_id, 2, 64)
    joiner = open_region(engine_id, 2, 64)
    memoryview(region)[1, 3] = 7
    assert region.release_name() is True
    late = spawn()
    assert late.run("r = Region(id, 2, 64); (r.is_creator, memoryview(r)[1, 3])", id=engine_id) == (True, 0)
    assert region.check().name == "replaced"
    assert region.release_name() is False
    inode = path_of(engine_id).stat().st_ino
    region.cleanup()
    assert memoryview(joiner)[1, 3] == 7
    joiner.cleanup()
    assert path_of(engine_id).stat().st_ino == inode
    late.run("r.cleanup()")
    assert not path_of(engine_id).exists()


def test_a_forked_child_does_not_release_its_parents_name(spawn: Any, engine_id: str) -> None:
    child = spawn()
    code = """
r = Region(id, 2, 64)
pid = os.fork()
if pid == 0:
    os._exit(1 if r.release_name() else 0)
os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    assert child.run(code, id=engine_id) == 0
    assert path_of(engine_id).exists()
    child.run("r.cleanup()")


def test_a_closed_region_has_no_name_to_release(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, 2, 64)
    region.cleanup()
    with pytest.raises(ec.RegionClosedError):
        region.release_name()
