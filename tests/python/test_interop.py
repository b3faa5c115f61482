"""The original class and ours in one live region, each in each role."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

import ec_shared_region as ec
from ec_shared_region import ECSharedRegion
from oracle import ECSharedRegion as Original
from procs import error_of, path_of

# The pause between make and size of an original is a file that the test makes when it wants it to go on.
SLOW_ORIGINAL = """
class Slow(Region):
    def _between_make_and_size(self):
        os.write(made, b"m")
        os.read(go, 1)
made_here, made = os.pipe()
go, go_here = os.pipe()
region = None
def construct():
    global region
    region = Slow(id, 8, 64)
thread = threading.Thread(target=construct, daemon=True)
thread.start()
os.read(made_here, 1)
"""
LET_IT_SIZE = "os.write(go_here, b'g'); thread.join(); region._is_creator"


@pytest.mark.parametrize(("creator", "joiner"), [("original", "ours"), ("ours", "original")])
def test_separate_processes_share_bytes(spawn: Any, engine_id: str, creator: str, joiner: str) -> None:
    """G8, and MN-08: no common parent, only the id."""
    one, two = spawn(creator), spawn(joiner)
    assert one.run("r = Region(id, 8, 64); r._is_creator", id=engine_id) is True
    assert two.run("r = Region(id, 8, 64); r._is_creator", id=engine_id) is False
    one.run("ctypes.memset(r._blocks_ptr, 0x5a, 512)")
    assert two.run("ctypes.string_at(r._blocks_ptr, 512)") == b"\x5a" * 512
    two.run("ctypes.memset(r._blocks_ptr + 511, 0x21, 1)")
    assert one.run("ctypes.string_at(r._blocks_ptr + 511, 1)") == b"\x21"
    two.run("r.cleanup()")
    assert path_of(engine_id).exists()
    one.run("r.cleanup()")
    assert not path_of(engine_id).exists()


@pytest.mark.parametrize("creator_first", [True, False])
@pytest.mark.parametrize(("creator", "joiner"), [(Original, ECSharedRegion), (ECSharedRegion, Original)])
def test_in_one_process(engine_id: str, creator: type, joiner: type, creator_first: bool) -> None:
    torch = pytest.importorskip("torch")
    one, two = creator(engine_id, 8, 64), joiner(engine_id, 8, 64)
    assert (one._is_creator, two._is_creator) == (True, False)
    one.blocks.copy_(torch.arange(512, dtype=torch.int16).to(torch.int8).view(8, 64))
    assert torch.equal(one.blocks, two.blocks)
    for region in (one, two) if creator_first else (two, one):
        region.cleanup()
    assert not path_of(engine_id).exists()


def test_a_live_original_is_no_orphan(spawn: Any, open_region: Any, engine_id: str, new_id: Any) -> None:
    """G8: it takes no lock, so the lock alone would call it dead. Neither its own id nor a sweep may take it."""
    original = spawn("original")
    original.run("r = Region(id, 8, 64); ctypes.memset(r._blocks_ptr, 1, 512)", id=engine_id)
    inode = path_of(engine_id).stat().st_ino
    with ECSharedRegion(new_id(), 2, 64) as other:  # a constructor reclaims orphans of other ids
        assert other.is_creator
    ours = open_region(engine_id, 8, 64)
    assert not ours.is_creator
    assert path_of(engine_id).stat().st_ino == inode
    assert bytes(memoryview(ours).cast("B")) == b"\x01" * 512
    assert original.run("ctypes.string_at(r._blocks_ptr, 512)") == b"\x01" * 512
    ours.cleanup()
    assert path_of(engine_id).exists(), "the original still lives"
    original.run("r.cleanup()")


def test_a_live_original_is_no_orphan_where_the_kernel_has_no_leases(spawn: Any, engine_id: str, new_id: Any) -> None:
    """A sandbox that cannot be asked for writers: /proc shows who has the file open, mapped or not."""
    rule = {"call": "fcntl", "argument": 1, "equals": 1024, "error": errno.EINVAL}
    ours = spawn(refuse=[rule]).ready()
    original = spawn("original")
    original.run("r = Region(id, 8, 64); ctypes.memset(r._blocks_ptr, 1, 512)", id=engine_id)
    ours.run("Region(other, 2, 64).cleanup()", other=new_id())
    assert ours.run("r = Region(id, 8, 64); r.is_creator, memoryview(r)[7, 63]", id=engine_id) == (False, 1)
    ours.run("r.cleanup()")
    assert path_of(engine_id).exists()
    original.kill()
    assert ours.run("r = Region(id, 8, 64); r.is_creator, memoryview(r)[7, 63]", id=engine_id) == (True, 0)
    ours.run("r.cleanup()")


def test_a_live_original_joiner_keeps_the_region_alive(spawn: Any, open_region: Any, engine_id: str) -> None:
    """Our creator was killed; only an original joiner, without a lock, still uses the bytes."""
    creator, joiner = spawn("ours"), spawn("original")
    creator.run("r = Region(id, 8, 64); memoryview(r)[0, 0] = 5", id=engine_id)
    joiner.run("r = Region(id, 8, 64)", id=engine_id)
    creator.kill()
    late = open_region(engine_id, 8, 64)
    assert not late.is_creator
    assert memoryview(late)[0, 0] == 5
    joiner.kill()


def test_mode_create_against_a_live_original(spawn: Any, engine_id: str) -> None:
    original = spawn("original")
    original.run("r = Region(id, 8, 64)", id=engine_id)
    with pytest.raises(ec.RegionExistsError):
        ECSharedRegion(engine_id, 8, 64, mode="create")
    original.run("r.cleanup()")


@pytest.mark.case("CR-01", "CR-02")
def test_a_slow_original_is_waited_for(spawn: Any, engine_id: str) -> None:
    """Nothing is mapped while the file is empty, and the first try succeeds."""
    original, ours = spawn("original"), spawn("ours")
    original.run(SLOW_ORIGINAL, id=engine_id)
    assert path_of(engine_id).stat().st_size == 0
    ours.start("r = Region(id, 8, 64); r._is_creator", id=engine_id)
    assert not ours.answered(0.1)
    assert original.run(LET_IT_SIZE) is True
    assert ours.result() is False
    original.run("ctypes.memset(region._blocks_ptr, 3, 512)")
    assert ours.run("ctypes.string_at(r._blocks_ptr, 512)") == b"\x03" * 512
    ours.run("r.cleanup()")
    original.run("region.cleanup()")


@pytest.mark.case("CR-01", "AT-01")
def test_an_original_that_never_sizes_is_a_timeout(spawn: Any, engine_id: str) -> None:
    original = spawn("original")
    original.run(SLOW_ORIGINAL, id=engine_id)
    with pytest.raises(ec.RegionTimeoutError) as caught:
        ECSharedRegion(engine_id, 8, 64, timeout=0.1)
    for part in (str(path_of(engine_id)), "512", "0.1", "hint:"):
        assert part in str(caught.value)
    assert path_of(engine_id).stat().st_size == 0, "a failed attach touches nothing"
    assert original.run(LET_IT_SIZE) is True
    original.run("region.cleanup()")


@pytest.mark.case("CR-04")
def test_ten_openers_meet_one_slow_original(spawn: Any, engine_id: str) -> None:
    """Size 0 is no proof of death: nobody deletes the file, all eleven meet in one inode."""
    original = spawn("original")
    original.run(SLOW_ORIGINAL, id=engine_id)
    inode = path_of(engine_id).stat().st_ino
    openers = [spawn("ours") for _ in range(10)]
    for opener in openers:
        opener.start("r = Region(id, 8, 64); r._is_creator, os.fstat(r._fd).st_ino", id=engine_id)
    assert not any(opener.answered(0.05) for opener in openers)
    assert original.run(LET_IT_SIZE) is True
    assert [opener.result() for opener in openers] == [(False, inode)] * 10
    assert path_of(engine_id).stat().st_ino == inode
    for opener in openers:
        opener.run("r.cleanup()")
    original.run("region.cleanup()")


@pytest.mark.case("CR-01")
@pytest.mark.case("FR-54")
def test_an_original_killed_before_it_sized_is_replaced(spawn: Any, open_region: Any, engine_id: str) -> None:
    original = spawn("original")
    original.run(SLOW_ORIGINAL, id=engine_id)
    original.kill()
    assert path_of(engine_id).stat().st_size == 0
    region = open_region(engine_id, 8, 64, timeout=10)
    assert region.is_creator
    assert os.path.getsize(region.path) == 512


@pytest.mark.case("CR-01", "CA-02")
def test_waiters_learn_that_an_original_was_killed_before_it_sized(spawn: Any, engine_id: str) -> None:
    """G6: far sooner than the 30 s that the original waits out, one becomes creator and the other joins it."""
    original = spawn("original")
    original.run(SLOW_ORIGINAL, id=engine_id)
    waiters = [spawn("ours"), spawn("ours")]
    for waiter in waiters:
        waiter.start("r = Region(id, 8, 64); r._is_creator, os.fstat(r._fd).st_ino", id=engine_id)
    assert not any(waiter.answered(0.1) for waiter in waiters)
    original.kill()
    answers = [waiter.result(timeout=10) for waiter in waiters]
    assert sorted(is_creator for is_creator, _ in answers) == [False, True]
    assert len({inode for _, inode in answers}) == 1
    for waiter in waiters:
        waiter.run("r.cleanup()")


def test_the_original_waits_on_its_own_stub(engine_id: str, litter: Any) -> None:
    """The fault that ours cures: a stub without a creator is waited on until the limit."""
    litter(path_of(engine_id)).touch(0o600)
    import oracle

    descriptor = os.open(path_of(engine_id), os.O_RDWR)
    with pytest.raises(TimeoutError):
        oracle._wait_for_file_size(descriptor, 512, timeout=0.05)
    os.close(descriptor)


@pytest.mark.case("AT-13", "CA-20")
def test_a_larger_live_original_is_refused_and_untouched(spawn: Any, engine_id: str) -> None:
    original = spawn("original")
    original.run("r = Region(id, 16, 64)", id=engine_id)
    with pytest.raises(ec.GeometryMismatchError) as caught:
        ECSharedRegion(engine_id, 8, 64)
    assert "1024" in str(caught.value) and "512" in str(caught.value)
    assert path_of(engine_id).stat().st_size == 1024
    original.run("r.cleanup()")


def test_a_smaller_live_original_is_waited_for_then_a_timeout(spawn: Any, engine_id: str) -> None:
    """It carries no mark: smaller may mean that it is still being sized."""
    original = spawn("original")
    original.run("r = Region(id, 4, 64)", id=engine_id)
    with pytest.raises(ec.RegionTimeoutError) as caught:
        ECSharedRegion(engine_id, 8, 64, timeout=0.1)
    assert "256" in str(caught.value) and "512" in str(caught.value)
    assert path_of(engine_id).stat().st_size == 256
    assert original.run("r._is_creator") is True
    original.run("r.cleanup()")


@pytest.mark.parametrize("left_blocks", [8, 4, 16])
@pytest.mark.case("ST-23")
def test_a_dead_originals_bytes_are_never_fresh(spawn: Any, open_region: Any, engine_id: str, left_blocks: int) -> None:
    original = spawn("original")
    original.run("r = Region(id, n, 64); ctypes.memset(r._blocks_ptr, 0x4f, n * 64)", id=engine_id, n=left_blocks)
    original.kill()
    region = open_region(engine_id, 8, 64, timeout=10)
    assert region.is_creator
    assert bytes(memoryview(region).cast("B")) == bytes(512)


def test_the_original_adopts_a_dead_ones_bytes(spawn: Any, engine_id: str, litter: Any) -> None:
    """The fault of the test above, in the original."""
    first = spawn("original")
    first.run("r = Region(id, 8, 64); ctypes.memset(r._blocks_ptr, 0x4f, 512)", id=engine_id)
    first.kill()
    litter(path_of(engine_id))
    second = Original(engine_id, 8, 64)
    assert not second._is_creator
    assert second._mmap_obj[0] == 0x4F
    second.cleanup()


@pytest.mark.parametrize("kind", ["ours", "original"])
def test_joiners_of_both_kinds_outlive_our_creators_cleanup(
    spawn: Any, open_region: Any, engine_id: str, kind: str
) -> None:
    creator = open_region(engine_id, 8, 64)
    joiner = spawn(kind)
    joiner.run("r = Region(id, 8, 64)", id=engine_id)
    memoryview(creator)[0, 0] = 17
    creator.cleanup()
    assert not path_of(engine_id).exists()
    assert joiner.run("ctypes.string_at(r._blocks_ptr, 1)[0]") == 17
    joiner.run("r.cleanup()")


def test_an_original_joins_ours_only_when_it_is_whole(spawn: Any, engine_id: str) -> None:
    """An original opens while ours is being made, again and again: it never sees a short file."""
    original, ours = spawn("original"), spawn("ours")
    original.start(
        """
seen = []
while len(seen) < 40:
    try:
        descriptor = os.open(f"/dev/shm/vllm_ec_{id}.mmap", os.O_RDWR)
    except FileNotFoundError:
        continue
    seen.append(os.fstat(descriptor).st_size)
    os.close(descriptor)
set(seen)
""",
        id=engine_id,
    )
    while not original.answered():
        ours.run("r = Region(id, 64, 7168); r.cleanup()", id=engine_id)
    assert original.result() == {64 * 7168}


def test_errors_for_an_original_name_the_path(spawn: Any, engine_id: str) -> None:
    original, ours = spawn("original"), spawn("ours")
    original.run("r = Region(id, 16, 64)", id=engine_id)
    error = error_of(ours, "Region(id, 8, 64)", timeout=10, id=engine_id)
    assert str(path_of(engine_id)) in error.text
    original.run("r.cleanup()")
