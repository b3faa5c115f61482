"""check() and identity(): what a careful operator asks of a live region."""

from __future__ import annotations

import os
from typing import Any

import pytest


@pytest.mark.case("OB-01")
def test_a_healthy_region_has_no_problem(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, 9, 7168)
    result = region.check()
    assert result and result.problems == () and result.name == "ours"
    assert (result.size_bytes, result.expected_bytes) == (region.nbytes, region.nbytes)
    assert result.allocated_bytes >= region.nbytes
    assert result.holders == (os.getpid(),) and result.unseen_holders == 0


def test_holders_in_other_processes_are_named(open_region: Any, spawn: Any, engine_id: str) -> None:
    region = open_region(engine_id, 2, 64)
    child = spawn()
    child.run("j = Region(id, 2, 64)", id=engine_id)
    pid = child.run("os.getpid()")
    assert sorted(region.check().holders) == sorted([os.getpid(), pid])
    child.run("j.cleanup()")
    assert region.check().holders == (os.getpid(),)


@pytest.mark.case("AT-02")
@pytest.mark.case("FR-48")
def test_a_lost_name_is_told_and_nothing_is_put_in_its_place(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, 2, 64)
    joiner = open_region(engine_id, 2, 64)
    os.unlink(region.path)
    for holder in (region, joiner):
        result = holder.check()
        assert not result and result.name == "lost"
        (problem,) = result.problems
        assert "RemoveIPC" in problem and region.path in problem
    assert not os.path.exists(region.path)
    memoryview(region)[1, 3] = 7
    assert memoryview(joiner)[1, 3] == 7


def test_a_replaced_name_is_told(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, 2, 64)
    os.unlink(region.path)
    successor = open_region(engine_id, 2, 64)
    assert region.check().name == "replaced" and successor.check()
    assert region.identity() != successor.identity()


@pytest.mark.case("LI-11")
@pytest.mark.case("FR-47")
def test_a_file_that_shrank_or_grew_is_told_without_touching_it(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, 2, 4096)
    for size, words in ((0, "bus error"), (8193, "grown")):
        os.truncate(region.path, size)
        result = region.check()
        assert not result and result.size_bytes == size
        assert words in result.problems[0]
    os.truncate(region.path, 8192)
    assert "backed" in region.check().problems[0]


def test_a_second_name_and_an_open_mode_are_told(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, 2, 64)
    os.link(region.path, region.path + ".second")
    try:
        assert "2 names" in region.check().problems[0]
    finally:
        os.unlink(region.path + ".second")
    os.chmod(region.path, 0o644)
    assert "0644" in region.check().problems[0]
    os.chmod(region.path, 0o600)
    assert region.check()


@pytest.mark.case("MN-04", "MN-02", "CR-05")
def test_the_identity_is_shared_by_all_and_new_after_a_restart(open_region: Any, spawn: Any, engine_id: str) -> None:
    region = open_region(engine_id, 2, 64)
    identity = region.identity()
    stat = os.stat(region.path)
    assert (identity.device, identity.inode) == (stat.st_dev, stat.st_ino)
    child = spawn()
    child.run("j = Region(id, 2, 64)", id=engine_id)
    assert tuple(child.run("tuple(j.identity())")) == tuple(identity)
    region.cleanup()
    assert tuple(child.run("tuple(j.identity())")) == tuple(identity), "it outlives the creator"
    nonces = set()
    for _ in range(20):
        again = open_region(engine_id, 2, 64)
        nonces.add(again.identity().nonce)
        again.cleanup()
    assert len(nonces) == 20 and identity.nonce not in nonces
    child.run("j.cleanup()")


def test_a_closed_region_cannot_be_asked(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, 2, 64)
    region.cleanup()
    for question in (region.check, region.identity):
        with pytest.raises(ValueError, match="closed"):
            question()
