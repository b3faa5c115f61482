"""preflight: the constructor's answer about room, without a constructor."""

from __future__ import annotations

import errno
from typing import Any

import pytest

import ec_shared_region as ec
from procs import error_of
from test_cgroup import FAKE_CONTROL_GROUP

MIB = 1 << 20
ASK = """
p = ec_shared_region.preflight(blocks, 1 << 20)
(bool(p), p.wanted_bytes, p.filesystem_bytes, p.free_bytes, [(q.what, q.is_refused) for q in p.problems])
"""


@pytest.mark.case("OB-02")
def test_it_says_what_the_constructor_says_and_makes_nothing(small_shm: Any, engine_id: str) -> None:
    shm = small_shm("size=8m")
    child = shm.spawn(imports=("ec_shared_region",))
    assert child.run(ASK, blocks=8) == (True, 8 * MIB, 8 * MIB, 8 * MIB, [])
    assert child.run(ASK, blocks=9) == (False, 9 * MIB, 8 * MIB, 8 * MIB, [("space", True)])
    assert (shm.names(), shm.free_bytes()) == ([], 8 * MIB)
    text, hint = child.run("(p.problems[0].text, p.problems[0].hint)")
    error = error_of(child, "Region(id, 9, 1 << 20)", id=engine_id)
    assert error.errno == errno.ENOSPC and error.hint == hint
    # The same words about another path.
    assert error.text.split(": ", 1)[1].split("\n")[0] == text.split(": ", 1)[1]
    child.run("r = Region(id, 8, 1 << 20)", id=engine_id)
    assert child.run(ASK, blocks=1) == (False, MIB, 8 * MIB, 0, [("space", True)])
    child.run("r.cleanup()")


def test_what_the_dead_take_counts_as_free(small_shm: Any, engine_id: str) -> None:
    """As for a constructor, which removes them first."""
    shm = small_shm("size=8m")
    dead, child = shm.spawn(), shm.spawn(imports=("ec_shared_region",))
    dead.run("r = Region(id, 6, 1 << 20)", id=engine_id)
    assert child.run(ASK, blocks=8)[0] is False
    dead.kill()
    assert child.run(ASK, blocks=8) == (True, 8 * MIB, 8 * MIB, 8 * MIB, [])
    assert child.run("p.reclaimable_bytes") == 6 * MIB
    assert shm.names() != [], "it removes nothing"
    assert child.run("r = Region(id, 8, 1 << 20); r.is_creator", id=engine_id + "b") is True
    child.run("r.cleanup()")


def test_inodes_that_are_used_up(small_shm: Any) -> None:
    shm = small_shm("size=8m,nr_inodes=3")
    child = shm.spawn(imports=("ec_shared_region",))
    shm.anchor.run("[open(f'/dev/shm/{n}', 'wb').close() for n in (1, 2)]")
    assert child.run(ASK, blocks=1)[4] == [("inodes", True)]
    assert child.run("(p.inodes, p.free_inodes)") == (3, 0)


def test_the_limit_of_a_file_comes_first_as_in_the_constructor(small_shm: Any, engine_id: str) -> None:
    child = small_shm("size=8m").spawn(imports=("ec_shared_region", "resource"))
    child.run("resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))")
    assert child.run(ASK, blocks=16)[4] == [("file_size_limit", True), ("space", True)]
    assert child.run("p.file_size_limit_bytes") == MIB
    assert error_of(child, "Region(id, 16, 1 << 20)", id=engine_id).errno == errno.EFBIG


def test_a_control_group_with_too_little_left_is_a_problem_that_is_not_refused(small_shm: Any) -> None:
    child = small_shm("size=16m").spawn(imports=("ec_shared_region",))
    child.run(FAKE_CONTROL_GROUP, limit_bytes=5 * MIB, current_bytes=3 * MIB)
    assert child.run(ASK, blocks=4)[4] == [("control_group", False)]
    assert child.run("(p.control_group_limit_bytes, p.control_group_used_bytes)") == (5 * MIB, 3 * MIB)
    assert "memory limit" in child.run("p.problems[0].hint")
    assert child.run(ASK, blocks=2)[0] is True


def test_an_absurd_size_and_a_wrong_one() -> None:
    result = ec.preflight(1 << 29, 1 << 30)
    assert not result and {"space", "memory"} & {problem.what for problem in result.problems}
    with pytest.raises(ec.SizeOverflowError):
        ec.preflight(1 << 40, 1 << 40)
    with pytest.raises(ec.InvalidArgumentError, match="num_blocks"):
        ec.preflight(0, 64)
    with pytest.raises(ec.ArgumentTypeError):
        ec.preflight(1.5, 64)  # type: ignore[arg-type]
