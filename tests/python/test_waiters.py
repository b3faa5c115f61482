"""Those who wait learn what became of what they wait for, and no wait is without an end."""

from __future__ import annotations

import fcntl
import os
import signal
from typing import Any

import pytest

import ec_shared_region as ec
from ec_shared_region import ECSharedRegion
from procs import SHM, ChildDied, ChildError, error_of, path_of, wait_until

MIB = 1 << 20
LARGE = "r = Region(id, 512, 1 << 20); r.is_creator"
LEARNED = 10  # seconds; whoever has not learned it waits 30


def begin_preparing(shm: Any, engine_id: str) -> Any:
    """A creator that is in the middle of reserving half a GiB, stopped there."""
    free = shm.free_bytes()
    creator = shm.spawn().ready()
    creator.start(LARGE, id=engine_id)
    wait_until(lambda: shm.free_bytes() < free - 8 * MIB, "the preparation has begun")
    creator.signal(signal.SIGSTOP)
    if creator.answered(0.05):
        pytest.skip("this machine prepares half a GiB faster than a signal comes")
    return creator


@pytest.mark.case("CR-04", "AT-01")
def test_a_living_but_stopped_creator_is_waited_for(large_shm: Any, engine_id: str) -> None:
    """Slow is not dead: nobody takes its file, and the wait ends with its own error, in the constructor of a joiner
    that maps ahead and at the first use of the bytes in any other."""
    creator = begin_preparing(large_shm, engine_id)
    for wait in (
        "Region(id, 512, 1 << 20, timeout=0.2, populate='join')",
        "memoryview(Region(id, 512, 1 << 20, timeout=0.2))",
    ):
        error = error_of(large_shm.spawn(), wait, id=engine_id)
        assert "RegionTimeoutError" in error.classes
        assert str(path_of(engine_id)) in error.text and "0.2" in error.text
    waiter = large_shm.spawn()
    waiter.start("r = Region(id, 512, 1 << 20); r.wait_until_ready(); r.is_creator", id=engine_id)
    assert not waiter.answered(0.1)
    creator.signal(signal.SIGCONT)
    assert creator.result() is True
    assert waiter.result(LEARNED) is False
    waiter.run("r.cleanup()")
    creator.run("r.cleanup()")


@pytest.mark.case("CA-02")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("populate", ["create", "join"])
def test_waiters_of_a_creator_that_dies_or_gives_up(large_shm: Any, engine_id: str, end: int, populate: str) -> None:
    """G6: well under the limit they share a region of zero bytes, all of them backed. Who waited outside, to map
    ahead, makes it anew; who was in already finishes what the creator began."""
    free = large_shm.free_bytes()
    creator = begin_preparing(large_shm, engine_id)
    waiters = [large_shm.spawn(), large_shm.spawn()]
    code = """
r = Region(id, 512, 1 << 20, populate=populate)
r.wait_until_ready()
r.is_creator, os.fstat(r._fd).st_ino, os.fstat(r._fd).st_blocks * 512
"""
    for waiter in waiters:
        waiter.start(code, id=engine_id, populate=populate)
    assert not any(waiter.answered(0.1) for waiter in waiters)
    creator.signal(end)
    creator.signal(signal.SIGCONT)
    with pytest.raises((ChildError, ChildDied)):
        creator.result()
    answers = [waiter.result(LEARNED) for waiter in waiters]
    assert sorted(is_creator for is_creator, _, _ in answers) == [False, populate == "join"]
    assert len({inode for _, inode, _ in answers}) == 1
    assert {backed for _, _, backed in answers} == {512 * MIB}
    assert waiters[0].run("memoryview(r)[511, (1 << 20) - 1]") == 0
    for waiter in waiters:
        waiter.run("r.cleanup()")
    assert large_shm.names() == []
    assert large_shm.free_bytes() == free


def test_another_geometry_is_told_while_the_creator_prepares(large_shm: Any, engine_id: str) -> None:
    """G9 needs no finished file."""
    creator = begin_preparing(large_shm, engine_id)
    error = error_of(large_shm.spawn(), "Region(id, 1024, 1 << 19)", timeout=LEARNED, id=engine_id)
    assert "GeometryMismatchError" in error.classes
    creator.kill()


def test_other_ids_do_not_wait_for_a_creator_that_prepares(large_shm: Any, engine_id: str, new_id: Any) -> None:
    """No lock that they share is held over the slow part."""
    creator = begin_preparing(large_shm, engine_id)
    other = large_shm.spawn()
    assert other.run("r = Region(id, 2, 64); r.is_creator", timeout=LEARNED, id=new_id()) is True
    other.run("r.cleanup()", timeout=LEARNED)
    creator.kill()


def test_a_directory_lock_that_somebody_sits_on_ends_in_a_timeout(
    open_region: Any, engine_id: str, new_id: Any
) -> None:
    """Whoever may read the directory may lock it: no constructor hangs for it, and no cleanup either."""
    before = open_region(engine_id, 2, 64)
    descriptor = os.open(SHM, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        region = open_region(new_id(), 2, 64, timeout=0.2)
    except ec.RegionTimeoutError as error:
        assert "lock" in str(error)
        assert "hint:" in str(error)
    else:
        assert region.is_creator  # a design that does not lock it is as good
    before.cleanup()
    assert not path_of(engine_id).exists()
    os.close(descriptor)


def test_a_file_locked_by_somebody_elses_preparation_is_waited_for(
    open_region: Any, engine_id: str, litter: Any
) -> None:
    """A maker that holds the same lock exclusively until it is done: alive, so it is not taken for an orphan."""
    path = litter(path_of(engine_id))
    maker = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.ftruncate(maker, 128)
    os.pwrite(maker, b"v", 0)
    fcntl.flock(maker, fcntl.LOCK_EX)
    with pytest.raises(ec.RegionTimeoutError):
        ECSharedRegion(engine_id, 2, 64, timeout=0.2)
    assert os.path.samestat(os.fstat(maker), path.stat())
    fcntl.flock(maker, fcntl.LOCK_SH)
    joiner = open_region(engine_id, 2, 64)
    assert not joiner.is_creator
    assert memoryview(joiner)[0, 0] == ord("v")
    joiner.cleanup()
    os.close(maker)


@pytest.mark.case("CA-08")
def test_a_joiner_of_an_unbacked_original_is_refused_rather_than_killed_later(small_shm: Any, engine_id: str) -> None:
    """Sized beyond the file system: a later touch would be SIGBUS, so joining it is an error of space."""
    shm = small_shm("size=1m")
    shm.anchor.run(
        "held = os.open(f'/dev/shm/vllm_ec_{id}.mmap', os.O_CREAT | os.O_RDWR, 0o600); os.ftruncate(held, 4 << 20)",
        id=engine_id,
    )
    error = error_of(shm.spawn(), "Region(id, 4, 1 << 20, timeout=5)", timeout=LEARNED, id=engine_id)
    assert "NoSpaceError" in error.classes
    assert shm.anchor.run("os.fstat(held).st_size, os.fstat(held).st_nlink") == (4 * MIB, 1)
