"""Room is reserved before anyone sees the region, or refused with numbers and a remedy."""

from __future__ import annotations

import errno
import os
import re
from typing import Any

import pytest

from procs import ChildDied, error_of

MIB = 1 << 20
FILL = """
# A neighbour fills the file system to its last page.
descriptor = os.open("/dev/shm/neighbour", os.O_CREAT | os.O_WRONLY, 0o600)
try:
    while True:
        os.write(descriptor, bytes(1 << 20))
except OSError as error:
    assert error.errno == errno.ENOSPC
s = os.statvfs("/dev/shm")
s.f_bavail
"""


def assert_no_space(error: Any, asked: int, free: int) -> None:
    assert "NoSpaceError" in error.classes
    assert "OSError" in error.classes
    assert error.errno == errno.ENOSPC
    assert "/dev/shm" in error.filename
    numbers = {int(found) for found in re.findall(r"\d+", error.text.replace(",", "").replace("_", ""))}
    assert asked in numbers and free in numbers, error.text
    hint = error.text.partition("\nhint: ")[2]
    for words in ("--shm-size", "--ipc=host", "emptyDir"):
        assert words in hint


@pytest.mark.case("CA-01", "CA-05", "PO-05", "CA-02")
@pytest.mark.parametrize("populate", ["create", "never"])
@pytest.mark.parametrize("mode", ["create_or_join", "create"])
@pytest.mark.case("FR-57")
@pytest.mark.case("FR-59")
def test_too_small_is_refused_with_both_numbers(small_shm: Any, engine_id: str, populate: str, mode: str) -> None:
    shm = small_shm("size=1m")
    child = shm.spawn()
    error = error_of(
        child, "Region(id, 4, 1 << 20, populate=populate, mode=mode)", id=engine_id, populate=populate, mode=mode
    )
    assert_no_space(error, 4 * MIB, MIB)
    assert shm.names() == []
    assert shm.free_bytes() == MIB
    assert child.run("r = Region(id, 1, 1 << 20); r.is_creator", id=engine_id) is True, "and what fits still fits"
    child.run("r.cleanup()")


@pytest.mark.case("CA-05", "CA-07")
@pytest.mark.case("FR-56")
def test_the_unconfigured_container(small_shm: Any, engine_id: str) -> None:
    shm = small_shm("size=64m")
    child = shm.spawn()
    assert_no_space(error_of(child, "Region(id, 65, 1 << 20)", id=engine_id), 65 * MIB, 64 * MIB)
    assert shm.free_bytes() == 64 * MIB


@pytest.mark.case("CA-13")
@pytest.mark.case("FR-60")
def test_a_one_page_shm(small_shm: Any, engine_id: str) -> None:
    shm = small_shm("size=4k")
    child = shm.spawn()
    free = shm.free_bytes()
    assert_no_space(error_of(child, "Region(id, 2, size)", id=engine_id, size=free), 2 * free, free)
    assert shm.free_bytes() == free


@pytest.mark.case("CA-08")
def test_room_that_a_neighbour_took(small_shm: Any, engine_id: str) -> None:
    """The file system is large enough, what is free is not."""
    shm = small_shm("size=4m")
    shm.spawn(None).run("open('/dev/shm/neighbour', 'wb').write(bytes(3 << 20))")
    error = error_of(shm.spawn(), "Region(id, 2, 1 << 20)", id=engine_id)
    assert_no_space(error, 2 * MIB, MIB)
    assert shm.names() == ["neighbour"]
    assert shm.free_bytes() == MIB


@pytest.mark.parametrize(
    ("options", "blocks"),
    [("size=8m", 1 << 20), ("size=8m", 1 << 40), ("size=0", 1 << 40), ("size=0", (1 << 59) // 7168)],
)
def test_an_absurd_size_reserves_nothing(small_shm: Any, engine_id: str, options: str, blocks: int) -> None:
    """Reserving it piece by piece would fill the machine before it failed."""
    shm = small_shm(options)
    free = shm.free_bytes()
    child = shm.spawn()
    # Whoever fills an unlimited tmpfs takes the machine down: a reservation that is tried is cut off early.
    child.run("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))")
    error = error_of(child, "Region(id, n, 7168)", id=engine_id, n=blocks)
    assert "NoSpaceError" in error.classes
    assert str(blocks * 7168) in error.text
    assert shm.free_bytes() == free
    assert shm.names() == []


@pytest.mark.case("CA-04", "PO-08")
@pytest.mark.parametrize("populate", ["create", "join", "never"])
def test_every_page_is_backed_when_the_constructor_returns(open_region: Any, engine_id: str, populate: str) -> None:
    region = open_region(engine_id, 100, 7168, populate=populate)
    assert os.stat(region.path).st_blocks * 512 >= region.nbytes


@pytest.mark.case("CA-08")
@pytest.mark.parametrize("populate", ["create", "never"])
@pytest.mark.case("FR-61")
def test_every_block_can_be_written_after_a_neighbour_filled_the_rest(
    small_shm: Any, engine_id: str, populate: str
) -> None:
    """A check is not a reservation: only a reservation survives this."""
    shm = small_shm("size=4m")
    creator, neighbour = shm.spawn(), shm.spawn(None)
    creator.run("r = Region(id, 300, 7168, populate=populate)", id=engine_id, populate=populate)
    joiner = shm.spawn()
    joiner.run("r = Region(id, 300, 7168)", id=engine_id)
    assert neighbour.run(FILL) == 0
    for child in (creator, joiner):
        child.run("ctypes.memset(r._blocks_ptr, 0x33, r.nbytes)")
    assert joiner.run("bytes(memoryview(r).cast('B')) == b'\\x33' * r.nbytes") is True
    joiner.run("r.cleanup()")
    creator.run("r.cleanup()")


@pytest.mark.case("CA-08", "CA-13")
def test_the_original_dies_by_a_signal_there(small_shm: Any, engine_id: str) -> None:
    """What the reservation is for: the original populates past the limit and leaves the file system full."""
    shm = small_shm("size=1m")
    child = shm.spawn("original")
    error = error_of(child, "r = Region(id, 4, 1 << 20)", id=engine_id)
    assert error.errno == errno.EFAULT
    assert shm.free_bytes() == 0
    late = shm.spawn("original")
    late.run("r = Region(id, 4, 1 << 20)", id=engine_id)
    with pytest.raises(ChildDied):
        late.run("ctypes.memset(r._blocks_ptr, 1, 4 << 20)")


@pytest.mark.case("CA-02")
def test_a_waiter_learns_that_the_creator_failed_for_space(small_shm: Any, engine_id: str) -> None:
    """Neither waits out the 30 s: both are told of the space."""
    shm = small_shm("size=1m")
    children = [shm.spawn() for _ in range(3)]
    for child in children:
        child.start("Region(id, 4, 1 << 20)", id=engine_id)
    for child in children:
        with pytest.raises(Exception) as caught:
            child.result(timeout=10)
        assert_no_space(caught.value, 4 * MIB, MIB)
    assert shm.names() == []


@pytest.mark.case("CA-10")
@pytest.mark.case("FR-64")
def test_it_never_moves_to_another_directory(small_shm: Any, engine_id: str, tmp_path: Any) -> None:
    shm = small_shm("size=1m")
    child = shm.spawn(env={"TMPDIR": str(tmp_path)})
    child.run("os.chdir(path)", path=str(tmp_path))
    error_of(child, "Region(id, 4, 1 << 20)", id=engine_id)
    assert list(tmp_path.iterdir()) == []
    for directory in ("/tmp", "/var/tmp"):
        assert not [name for name in os.listdir(directory) if engine_id in name]


def test_the_place_of_an_orphan_is_room_for_its_successor(small_shm: Any, engine_id: str) -> None:
    """G3: at no time are there two copies, so a region that fills the file system can be made again."""
    shm = small_shm("size=1m")
    first = shm.spawn()
    first.run("r = Region(id, 16, 65536); ctypes.memset(r._blocks_ptr, 1, r.nbytes)", id=engine_id)
    first.kill()
    assert shm.free_bytes() == 0
    second = shm.spawn()
    assert second.run("r = Region(id, 16, 65536); r.is_creator, any(memoryview(r).cast('B'))", id=engine_id) == (
        True,
        False,
    )
    second.run("r.cleanup()")


def test_racers_pay_once(small_shm: Any, engine_id: str) -> None:
    """G3: room for one region and a page, and four processes that race for it."""
    shm = small_shm(f"size={MIB + 4096}")
    children = [shm.spawn().ready() for _ in range(4)]
    for _ in range(10):
        for child in children:
            child.start("r = Region(id, 16, 65536); r.is_creator", id=engine_id)
        assert sorted(child.result(timeout=10) for child in children) == [False, False, False, True]
        for child in children:
            child.run("r.cleanup()")
        assert shm.names() == []
