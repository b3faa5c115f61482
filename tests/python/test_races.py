"""Processes that construct one id at the same instant: one creator, one inode, the same bytes."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from procs import path_of

RACERS = 8
ROUNDS = 60

# All racers block in a read of one pipe; the writer ends and all are released by the same close.
READY = "gate = os.open(path, os.O_RDONLY)"
RACE = """
os.read(gate, 1)
os.close(gate)
r = Region(id, 3, 7168)
view = memoryview(r).cast("B")
r._is_creator, os.fstat(r._fd).st_ino, bytes(view[:8])
"""


class Gate:
    """A named pipe as a starting gate: readers get end-of-file together when the only writer closes."""

    def __init__(self, directory: Any) -> None:
        self._directory = directory
        self._number = 0

    def new(self) -> str:
        self._number += 1
        path = str(self._directory / f"gate{self._number}")
        os.mkfifo(path)
        return path


def race(children: list[Any], gate: Gate, engine_id: str) -> list[tuple[bool, int, bytes]]:
    path = gate.new()
    for child in children:
        child.start(READY, path=path)
    writer = os.open(path, os.O_WRONLY)
    for child in children:
        child.result()
    for child in children:
        child.start(RACE, id=engine_id)
    os.close(writer)
    return [child.result(timeout=10) for child in children]


@pytest.mark.case("CR-01", "CR-04")
def test_eight_processes_race_from_a_gate(spawn: Any, new_id: Any, tmp_path: Any) -> None:
    """G1, G3, G4 in many rounds of one set of processes: no twin, no short file, no stale byte, no leftover."""
    children = [spawn() for _ in range(RACERS)]
    gate = Gate(tmp_path)
    engine_id = new_id()
    for number in range(ROUNDS):
        answers = race(children, gate, engine_id)
        assert sum(is_creator for is_creator, _, _ in answers) == 1
        assert len({inode for _, inode, _ in answers}) == 1
        assert {first for _, _, first in answers} == {bytes(8)}
        # Each process writes one byte of its own; all must see all.
        for position, child in enumerate(children):
            child.run("view[at] = 1 + at", at=position)
        expected = bytes(range(1, RACERS + 1))
        assert {child.run("bytes(view[:8])") for child in children} == {expected}
        for child in children if number % 2 else reversed(children):
            child.run("del view; r.cleanup()")
        assert not path_of(engine_id).exists()


NO_TMPFILE = {"call": "openat", "argument": 2, "bits": 0o20000000, "error": errno.EOPNOTSUPP}
NO_LEASE = {"call": "fcntl", "argument": 1, "equals": 1024, "error": errno.EINVAL}


@pytest.mark.case("ST-23", "CR-04")
@pytest.mark.parametrize("rules", [[], [NO_TMPFILE], [NO_LEASE]], ids=["kernel of today", "no O_TMPFILE", "no leases"])
def test_a_race_over_an_orphan(spawn: Any, new_id: Any, tmp_path: Any, rules: list[dict[str, Any]]) -> None:
    """The racers look alive to one another; the dead one's bytes must be taken up by none of them."""
    children = [spawn(refuse=rules).ready() for _ in range(4)]
    gate = Gate(tmp_path)
    engine_id = new_id()
    for number in range(ROUNDS):
        # A file that nobody holds, of the same or another size, as a dead engine leaves it.
        size = 3 * 7168 + (0, 1, -1)[number % 3]
        descriptor = path_of(engine_id)
        descriptor.write_bytes(b"\x4f" * size)
        descriptor.chmod(0o600)
        answers = race(children, gate, engine_id)
        assert sum(is_creator for is_creator, _, _ in answers) == 1
        assert len({inode for _, inode, _ in answers}) == 1
        assert {first for _, _, first in answers} == {bytes(8)}
        for child in children:
            child.run("del view; r.cleanup()")
        assert not path_of(engine_id).exists()


LOOP = """
import ec_shared_region as ec
joined = 0
for _ in range(200):
    r = Region(id, 2, 64)
    joined += not r._is_creator
    assert r.nbytes == 128
    r.cleanup()
joined
"""


@pytest.mark.case("CR-07")
def test_two_processes_construct_and_clean_up_in_loops(spawn: Any, engine_id: str) -> None:
    """Every construct succeeds, and nothing is left at the end."""
    children = [spawn(), spawn()]
    for child in children:
        child.start(LOOP, id=engine_id)
    for child in children:
        child.result()
    assert not path_of(engine_id).exists()


@pytest.mark.case("ST-16")
def test_loops_while_others_sweep(spawn: Any, new_id: Any) -> None:
    """Constructors of other ids sweep the directory while this one comes and goes."""
    engine_id = new_id()
    pair, sweepers = [spawn(), spawn()], [spawn(), spawn()]
    for child in pair:
        child.start(LOOP, id=engine_id)
    for sweeper in sweepers:
        sweeper.start(LOOP, id=new_id())
    for child in [*pair, *sweepers]:
        child.result()
    assert not path_of(engine_id).exists()


ORIGINAL_LOOP = """
refused = 0
for _ in range(100):
    try:
        r = Region(id, 2, 64)
    except (FileNotFoundError, ValueError):
        refused += 1  # its own gap between two opens: the name went in the middle
        continue
    r.cleanup()
refused
"""


@pytest.mark.case("CR-07")
def test_loops_against_the_original(spawn: Any, engine_id: str) -> None:
    """The original may trip over its own gaps; ours never fails, whatever moment it meets the other in."""
    original, ours = spawn("original"), spawn("ours")
    original.start(ORIGINAL_LOOP, id=engine_id)
    ours.start(LOOP, id=engine_id)
    ours.result()
    original.result()
    path_of(engine_id).unlink(missing_ok=True)
