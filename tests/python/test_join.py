"""Two and more holders of one region: joining, modes, geometry, and who takes the name away."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

import ec_shared_region as ec
from ec_shared_region import ECSharedRegion
from procs import error_of, path_of


@pytest.mark.case("MN-08")
def test_processes_without_a_common_parent_share_bytes(spawn: Any, engine_id: str) -> None:
    one, two = spawn(), spawn()
    assert one.run("r = Region(id, 4, 7168); r.is_creator", id=engine_id) is True
    assert two.run("r = Region(id, 4, 7168); r.is_creator", id=engine_id) is False
    one.run("memoryview(r)[3, 7167] = 42")
    assert two.run("memoryview(r)[3, 7167]") == 42
    two.run("memoryview(r)[0, 0] = -1")
    assert one.run("memoryview(r)[0, 0]") == -1
    two.run("r.cleanup()")
    one.run("r.cleanup()")
    assert not path_of(engine_id).exists()


@pytest.mark.case("PI-47")
@pytest.mark.parametrize("creator_first", [True, False])
def test_two_objects_of_one_id_in_one_process(engine_id: str, creator_first: bool) -> None:
    one, two = ECSharedRegion(engine_id, 2, 64), ECSharedRegion(engine_id, 2, 64)
    assert (one.is_creator, two.is_creator) == (True, False)
    assert one._blocks_ptr != two._blocks_ptr
    memoryview(one)[1, 1] = 5
    first, second = (one, two) if creator_first else (two, one)
    first.cleanup()
    assert memoryview(second)[1, 1] == 5
    assert path_of(engine_id).exists() is not creator_first
    second.cleanup()
    assert not path_of(engine_id).exists()


@pytest.mark.case("AT-11")
def test_a_joiner_that_leaves_takes_no_name_away(open_region: Any, engine_id: str) -> None:
    creator = open_region(engine_id, 2, 64)
    memoryview(creator)[0, 0] = 9
    open_region(engine_id, 2, 64).cleanup()
    late = open_region(engine_id, 2, 64)
    assert not late.is_creator
    assert memoryview(late)[0, 0] == 9


@pytest.mark.case("AT-08", "AT-10")
def test_a_joiner_that_exits_without_cleanup_takes_no_name_away(open_region: Any, spawn: Any, engine_id: str) -> None:
    creator = open_region(engine_id, 2, 64)
    memoryview(creator)[0, 0] = 9
    child = spawn()
    assert child.run("r = Region(id, 2, 64); r.is_creator", id=engine_id) is False
    assert child.finish() == 0
    assert child.stderr == ""
    assert path_of(engine_id).exists()
    assert memoryview(creator)[0, 0] == 9


def test_last_one_out_takes_the_name_away(open_region: Any, spawn: Any, engine_id: str) -> None:
    """The creator was killed; whoever leaves last owns the clean-up."""
    creator = spawn()
    creator.run("r = Region(id, 2, 64)", id=engine_id)
    first, last = open_region(engine_id, 2, 64), open_region(engine_id, 2, 64)
    creator.kill()
    first.cleanup()
    assert path_of(engine_id).exists()
    last.cleanup()
    assert not path_of(engine_id).exists()


def test_last_one_out_by_normal_exit_takes_the_name_away(spawn: Any, engine_id: str) -> None:
    creator, joiner = spawn(), spawn()
    creator.run("r = Region(id, 2, 64)", id=engine_id)
    joiner.run("r = Region(id, 2, 64)", id=engine_id)
    creator.kill()
    assert joiner.finish() == 0
    assert joiner.stderr == ""
    assert not path_of(engine_id).exists()


def test_joiners_of_a_killed_creator_are_still_joined(open_region: Any, spawn: Any, engine_id: str) -> None:
    """G1: the bytes are in use, so a newcomer meets them rather than make a twin."""
    creator = spawn()
    creator.run("r = Region(id, 2, 64)", id=engine_id)
    joiner = open_region(engine_id, 2, 64)
    creator.kill()
    memoryview(joiner)[0, 0] = 3
    late = open_region(engine_id, 2, 64)
    assert not late.is_creator
    assert memoryview(late)[0, 0] == 3


@pytest.mark.case("CR-05")
def test_after_the_creator_left_a_newcomer_is_never_silently_a_twin(open_region: Any, engine_id: str) -> None:
    creator, joiner = open_region(engine_id, 2, 64), open_region(engine_id, 2, 64)
    memoryview(joiner)[0, 0] = 3
    creator.cleanup()
    with pytest.raises(FileNotFoundError):
        ECSharedRegion(engine_id, 2, 64, mode="join", timeout=0.05)
    newcomer = open_region(engine_id, 2, 64)
    assert newcomer.is_creator
    assert memoryview(newcomer)[0, 0] == 0
    assert memoryview(joiner)[0, 0] == 3
    joiner.cleanup()
    assert path_of(engine_id).exists(), "the name belongs to the newcomer"


def test_mode_create(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, 2, 64, mode="create")
    assert region.is_creator
    with pytest.raises(ec.RegionExistsError) as caught:
        ECSharedRegion(engine_id, 2, 64, mode="create")
    assert isinstance(caught.value, FileExistsError)
    assert str(path_of(engine_id)) in str(caught.value)
    assert "hint:" in str(caught.value)
    assert not open_region(engine_id, 2, 64).is_creator


@pytest.mark.case("AT-01")
@pytest.mark.case("FR-65")
def test_mode_join_without_a_file_says_what_was_waited_for(engine_id: str) -> None:
    with pytest.raises(ec.RegionNotFoundError) as caught:
        ECSharedRegion(engine_id, 2, 4711, mode="join", timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, ec.RegionTimeoutError)
    for part in (str(path_of(engine_id)), "0.05", "hint:"):
        assert part in str(caught.value)
    assert not path_of(engine_id).exists()


@pytest.mark.case("MN-05")
@pytest.mark.case("FR-66")
def test_mode_join_mentions_similar_names(open_region: Any, engine_id: str) -> None:
    open_region(engine_id, 2, 64)
    wanted = engine_id.replace("_dp0", "_dp1")
    with pytest.raises(ec.RegionNotFoundError) as caught:
        ECSharedRegion(wanted, 2, 64, mode="join", timeout=0.05)
    assert engine_id in str(caught.value)


def test_mode_join_waits_for_the_creator(open_region: Any, spawn: Any, engine_id: str) -> None:
    joiner = spawn()
    joiner.start("r = Region(id, 2, 64, mode='join'); r.is_creator", id=engine_id)
    assert not joiner.answered(0.05)
    open_region(engine_id, 2, 64)
    assert joiner.result() is False


@pytest.mark.case("PE-02", "PE-04", "AT-13", "CA-11")
@pytest.mark.parametrize(
    "rule",
    [
        {"call": "openat", "argument": 2, "bits": os.O_CREAT},
        {"call": "ftruncate"},
        {"call": "fallocate"},
        {"call": "madvise", "argument": 2, "equals": 23},
        {"call": "unlinkat"},
        {"call": "linkat"},
    ],
    ids=lambda rule: rule["call"],
)
def test_a_joiner_neither_creates_sizes_reserves_nor_populates(
    open_region: Any, spawn: Any, engine_id: str, rule: dict[str, Any]
) -> None:
    """The kernel refuses the call to the joiner, which joins all the same."""
    creator = open_region(engine_id, 2, 7168)
    memoryview(creator)[1, 1] = 7
    child = spawn(refuse=[{**rule, "error": errno.EPERM}])
    assert child.run("r = Region(id, 2, 7168); r.is_creator, memoryview(r)[1, 1]", id=engine_id) == (False, 7)
    child.run("r.cleanup()")


@pytest.mark.case("AT-14", "AT-16", "OB-04")
@pytest.mark.parametrize("mode", ["create_or_join", "join"])
@pytest.mark.parametrize(("blocks", "block_bytes"), [(4, 128), (8, 32), (16, 64), (8, 65)])
def test_another_geometry_is_an_error_at_once(
    open_region: Any, engine_id: str, mode: str, blocks: int, block_bytes: int
) -> None:
    """8 x 64 and 4 x 128 are both 512 bytes and must not meet."""
    creator = open_region(engine_id, 8, 64)
    memoryview(creator)[0, 0] = 1
    before = os.stat(creator.path)
    with pytest.raises(ec.GeometryMismatchError) as caught:
        ECSharedRegion(engine_id, blocks, block_bytes, mode=mode)
    assert isinstance(caught.value, ValueError)
    for number in (8, 64, blocks, block_bytes):
        assert str(number) in str(caught.value)
    assert "hint:" in str(caught.value)
    after = os.stat(creator.path)
    assert (after.st_ino, after.st_size, after.st_blocks) == (before.st_ino, before.st_size, before.st_blocks)
    assert memoryview(creator)[0, 0] == 1


@pytest.mark.case("AT-14")
def test_the_geometry_is_the_creators_in_other_processes_too(open_region: Any, spawn: Any, engine_id: str) -> None:
    open_region(engine_id, 8, 64)
    child = spawn()
    error = error_of(child, "Region(id, 4, 128)", timeout=10, id=engine_id)
    assert "GeometryMismatchError" in error.classes
    assert child.run("r = Region(id, 8, 64); r.is_creator", id=engine_id) is False
    child.run("r.cleanup()")


@pytest.mark.case("AT-02")
def test_a_name_removed_by_hand_disturbs_no_holder(open_region: Any, engine_id: str) -> None:
    creator, joiner = open_region(engine_id, 2, 64), open_region(engine_id, 2, 64)
    path_of(engine_id).unlink()
    memoryview(creator)[0, 0] = 1
    assert memoryview(joiner)[0, 0] == 1


@pytest.mark.case("ST-14")
def test_removing_the_file_by_hand_is_always_a_valid_repair(open_region: Any, spawn: Any, engine_id: str) -> None:
    child = spawn()
    child.run("r = Region(id, 2, 64)", id=engine_id)
    child.kill()
    path_of(engine_id).unlink()
    assert open_region(engine_id, 4, 64).is_creator


def test_a_late_cleanup_does_not_rob_the_successor(open_region: Any, engine_id: str) -> None:
    """G7: unlink is by identity of the file, not by name."""
    late = open_region(engine_id, 2, 64)
    path_of(engine_id).unlink()
    successor = open_region(engine_id, 2, 64)
    assert successor.is_creator
    late.cleanup()
    assert os.path.samestat(os.stat(path_of(engine_id)), os.fstat(successor._fd))


def test_the_original_robs_its_successor(engine_id: str) -> None:
    from oracle import ECSharedRegion as Original

    late = Original(engine_id, 2, 64)
    path_of(engine_id).unlink()
    successor = Original(engine_id, 2, 64)
    late.cleanup()
    assert not path_of(engine_id).exists()
    successor.cleanup()


@pytest.mark.case("ST-22")
def test_old_views_read_old_bytes_under_a_new_generation(open_region: Any, engine_id: str) -> None:
    first = open_region(engine_id, 2, 64)
    joiner = open_region(engine_id, 2, 64)
    memoryview(first)[0, 0] = 11
    old = memoryview(joiner)
    first.cleanup()
    second = open_region(engine_id, 2, 64)
    memoryview(second)[0, 0] = 22
    joiner.cleanup()
    assert old[0, 0] == 11


@pytest.mark.case("MN-01")
@pytest.mark.case("FR-43")
def test_two_hosts_make_a_region_each(small_shm: Any, engine_id: str) -> None:
    one, two = small_shm("size=1m").spawn(), small_shm("size=1m").spawn()
    for host in (one, two):
        assert host.run("r = Region(id, 2, 64); r.is_creator", id=engine_id) is True
    assert one.run("os.fstat(r._fd).st_dev") != two.run("os.fstat(r._fd).st_dev")


@pytest.mark.case("MN-02")
@pytest.mark.case("FR-37")
def test_two_engines_of_one_id_and_other_sizes_name_both_shapes(open_region: Any, engine_id: str) -> None:
    open_region(engine_id, 100, 64)
    with pytest.raises(ec.GeometryMismatchError) as caught:
        ECSharedRegion(engine_id, 200, 96)
    for number in ("100", "64", "200", "96"):
        assert number in str(caught.value)


@pytest.mark.case("CR-07")
def test_one_id_again_and_again(new_id: Callable[[], str]) -> None:
    engine_id = new_id()
    for generation in range(50):
        with ECSharedRegion(engine_id, 2, 64) as region:
            assert region.is_creator
            assert memoryview(region)[0, 0] == 0
            memoryview(region)[0, 0] = 1 + generation % 100
