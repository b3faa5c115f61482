"""Limits of the machine: the last page, the last inode, a kernel that grants less at once, a memory cgroup."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from procs import PATIENCE, ChildDied, error_of, is_mapped, path_of, wait_until

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")
FALLOCATE_LEN = 3  # the argument that says how many bytes


def numbers_of(text: str) -> set[int]:
    return {int(found) for found in re.findall(r"\d+", text)}


@pytest.mark.case("CA-23", "CA-14")
@pytest.mark.case("FR-62")
def test_a_region_takes_the_filesystem_to_its_last_page(small_shm: Any, engine_id: str, new_id: Any) -> None:
    """Exactly full: every byte can be written, one more region cannot be made, and joining still needs nothing."""
    shm = small_shm(f"size={16 * PAGE}")
    creator, joiner = shm.spawn(), shm.spawn()
    assert creator.run("r = Region(id, 16, page); r.is_creator", id=engine_id, page=PAGE) is True
    assert shm.free_bytes() == 0
    error = error_of(shm.spawn(), "Region(id, 1, 1)", id=new_id())
    assert "NoSpaceError" in error.classes and error.errno == errno.ENOSPC
    assert {1, 0, 16 * PAGE} <= numbers_of(error.text)
    assert joiner.run("r = Region(id, 16, page, populate='join'); r.is_creator", id=engine_id, page=PAGE) is False
    for child in (creator, joiner):
        child.run("ctypes.memset(r._blocks_ptr, 0x5a, r.nbytes)")
    joiner.run("r.cleanup()")
    creator.run("r.cleanup()")
    assert (shm.names(), shm.free_bytes()) == ([], 16 * PAGE)


@pytest.mark.case("CA-14", "CA-08")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT], ids=["ENOSPC", "EDQUOT"])
def test_room_that_goes_between_the_look_and_the_reservation(spawn: Any, engine_id: str, error: int) -> None:
    """The look says that it fits, the reservation has the last word; a quota is named."""
    child = spawn(refuse=[{"call": "fallocate", "error": error}])
    # So small a region is placed by faults, unless nobody wants it mapped.
    caught = error_of(child, "Region(id, 3, 7168, populate='never')", id=engine_id)
    assert "NoSpaceError" in caught.classes and caught.errno == error
    assert 3 * 7168 in numbers_of(caught.text)
    assert ("quota" if error == errno.EDQUOT else "--shm-size") in caught.text.partition("\nhint: ")[2]
    assert not path_of(engine_id).exists()
    assert child.run("'/dev/shm/' in open('/proc/self/maps').read()") is False


@pytest.mark.case("PO-05", "ST-07")
def test_a_reservation_that_fails_half_way_gives_everything_back(small_shm: Any, engine_id: str) -> None:
    """64 MiB are set aside, the last one is refused: the filesystem is as it was."""
    shm = small_shm("size=80m")
    child = shm.spawn(
        refuse=[{"call": "fallocate", "argument": FALLOCATE_LEN, "equals": MIB, "error": errno.ENOSPC}],
    )
    error = error_of(child, "Region(id, 65, 1 << 20)", id=engine_id)
    assert "NoSpaceError" in error.classes
    assert (shm.names(), shm.free_bytes()) == ([], 80 * MIB)
    assert child.run("r = Region(id, 3, 7168); r.is_creator", id=engine_id) is True
    child.run("r.cleanup()")


@pytest.mark.case("PO-11", "PO-10", "PO-14")
@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EINTR], ids=["ENOMEM", "EINTR"])
@pytest.mark.parametrize("granted_mib", [32, 1])
def test_what_is_not_granted_in_one_call_is_granted_in_smaller_ones(
    small_shm: Any, engine_id: str, error: int, granted_mib: int
) -> None:
    """A kernel that refuses large pieces, or never gets through one between two signals."""
    shm = small_shm("size=80m")
    refused = [size for size in (64, 32, 16, 8, 4, 2) if size > granted_mib]
    child = shm.spawn(
        refuse=[
            {"call": "fallocate", "argument": FALLOCATE_LEN, "equals": size * MIB, "error": error} for size in refused
        ]
    )
    assert child.run(
        "r = Region(id, 64, 1 << 20, populate='never'); r.is_creator, os.fstat(r._fd).st_blocks * 512", id=engine_id
    ) == (True, 64 * MIB)
    child.run("r.cleanup()")
    assert shm.free_bytes() == 80 * MIB


@pytest.mark.case("PE-10")
def test_the_last_inode_makes_a_region_and_joiners_need_none(small_shm: Any, engine_id: str, new_id: Any) -> None:
    """One inode for the directory, one for the region."""
    shm = small_shm("size=1m,nr_inodes=2")
    creator, other, joiner = shm.spawn(), shm.spawn(), shm.spawn()
    assert creator.run("r = Region(id, 2, 7168); r.is_creator", id=engine_id) is True
    error = error_of(other, "Region(id, 2, 7168)", id=new_id())
    assert "NoSpaceError" in error.classes and "inode" in error.text
    assert joiner.run("r = Region(id, 2, 7168); r.is_creator", id=engine_id) is False
    joiner.run("r.cleanup()")
    creator.run("r.cleanup()")
    assert other.run("r = Region(id, 2, 7168); r.is_creator", id=engine_id) is True
    other.run("r.cleanup()")
    assert shm.names() == []


@pytest.mark.case("PE-10", "ST-01")
def test_the_last_inode_held_by_the_dead_comes_back(small_shm: Any, new_id: Any) -> None:
    shm = small_shm("size=1m,nr_inodes=2")
    dead = shm.spawn()
    dead.run("r = Region(id, 2, 7168)", id=new_id())
    dead.kill()
    heir = shm.spawn()
    assert heir.run("r = Region(id, 2, 7168); r.is_creator", id=new_id()) is True
    heir.run("r.cleanup()")


class MemoryCgroup:
    """A memory cgroup below this process's own, with a limit; version 1 or 2."""

    def __init__(self, limit_bytes: int) -> None:
        lines = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
        v1 = Path("/sys/fs/cgroup/memory")
        if "memory" in lines and v1.is_dir():
            base, limit = v1 / lines["memory"].lstrip("/"), "memory.limit_in_bytes"
            if not base.is_dir():
                base = v1  # a container sees its own group as the root
        else:
            base, limit = Path("/sys/fs/cgroup") / lines.get("", "/").lstrip("/"), "memory.max"
        self.path = base / f"ec-test-{os.getpid()}"
        try:
            self.path.mkdir()
            (self.path / limit).write_text(str(limit_bytes))
            for swap in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
                if (self.path / swap).exists():
                    (self.path / swap).write_text(str(limit_bytes) if "memsw" in swap else "0")
        except OSError as error:
            self.remove()
            pytest.skip(f"no memory cgroup of our own can be made here: {error}")

    def add(self, child: Any) -> None:
        child.ready()
        (self.path / "cgroup.procs").write_text(str(child.pid))

    def remove(self) -> None:
        def is_gone() -> bool:
            with contextlib.suppress(OSError):  # busy until its last process is reaped
                self.path.rmdir()
            return not self.path.exists()

        wait_until(is_gone, "the cgroup can be removed")


@pytest.fixture
def cgroup(as_root: None) -> Iterator[MemoryCgroup]:
    """To be asked for before the children that go into it, so that they are gone before it is."""
    group = MemoryCgroup(48 * MIB)
    yield group
    group.remove()


@pytest.mark.case("CA-19", "CA-16")
def test_a_creator_that_its_memory_cgroup_kills_leaves_nothing_in_the_way(
    cgroup: MemoryCgroup, small_shm: Any, engine_id: str
) -> None:
    """The filesystem has room, the group has not: the kernel kills, and the next constructor is creator at once."""
    shm = small_shm("size=160m")
    victim = shm.spawn()
    cgroup.add(victim)
    victim.start("r = Region(id, 128, 1 << 20)", id=engine_id)
    with pytest.raises(ChildDied):
        victim.result(PATIENCE)
    heir = shm.spawn()
    assert heir.run(
        "r = Region(id, 16, 1 << 20, timeout=10); r.is_creator, any(memoryview(r).cast('B'))", id=engine_id
    ) == (True, False)
    heir.run("r.cleanup()")
    assert (shm.names(), shm.free_bytes()) == ([], 160 * MIB)


@pytest.mark.case("CA-19")
def test_the_creator_pays_and_joiners_do_not(cgroup: MemoryCgroup, small_shm: Any, engine_id: str) -> None:
    """Memory is charged to the group that touches it first: a joiner whose limit is far below the region may use it."""
    shm = small_shm("size=160m")
    creator, joiner = shm.spawn(), shm.spawn()
    creator.run("r = Region(id, 128, 1 << 20)", id=engine_id)
    cgroup.add(joiner)
    assert joiner.run("r = Region(id, 128, 1 << 20); r.is_creator", id=engine_id) is False
    joiner.run("ctypes.memset(r._blocks_ptr, 1, r.nbytes)")
    assert creator.run("memoryview(r)[127, (1 << 20) - 1]") == 1
    joiner.run("r.cleanup()")
    creator.run("r.cleanup()")


@pytest.mark.case("OB-01")
def test_two_processes_share_the_pages_and_each_counts_half(spawn: Any, engine_id: str) -> None:
    """RSS shows the region in full in each process, PSS shares it out: that is the number to look at."""
    size = 512 * 7168
    children = [spawn(), spawn()]
    for child in children:
        child.run("r = Region(id, 512, 7168, populate='join')", id=engine_id)
    for child in children:
        address = child.run("r._blocks_ptr")
        assert is_mapped(address, child.pid)
        seen = mapping_of(child.pid, address)
        assert seen["Rss"] >= size
        assert abs(seen["Pss"] - seen["Rss"] / 2) <= 2 * PAGE
    for child in reversed(children):
        child.run("r.cleanup()")


def mapping_of(pid: int, address: int) -> dict[str, int]:
    """The kernel's numbers of one mapping of a process, in bytes."""
    found: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head, *rest = line.split()
        if "-" in head and not head.endswith(":"):
            low, high = (int(bound, 16) for bound in head.split("-"))
            inside = low <= address < high
        elif inside and rest and rest[-1] == "kB":
            found[head.rstrip(":")] = int(rest[0]) * 1024
    return found
