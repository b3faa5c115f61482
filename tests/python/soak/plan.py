"""What is at stake in a soak: ids, shapes, and the words that actors write into the bytes. Pure.

A region is cut into 16 slots. Slot 0 is the creator's, slot n + 1 that of actor n, whatever process of that number
is alive. A slot holds one 32-bit word over and over, which says whose it is, in which file (the low bits of its
inode number) and how often it was written. So one look at any region tells a foreign, torn or stale byte, and two
processes that believe to share a region but do not are told by numbers that stand still.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

SLOTS = 16
MOST_ACTORS = SLOTS - 1
HEADER = 62  # the creator's slot goes by this number, which no actor has
MIB = 1 << 20
# Beyond this only every 16th word of the others' slots is looked at: the soak is about races, not about bandwidth.
CLOSE_LOOK_BYTES = 4 * MIB
SEQUENCES = 1 << 10


@dataclass(frozen=True)
class Shape:
    num_blocks: int
    block_size_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_size_bytes


@dataclass(frozen=True)
class Place:
    """One id, its shape, and two wrong ones: of the same total, told apart by the block size, and of another."""

    engine_id: str
    right: Shape
    same_total: Shape
    other_total: Shape
    weight: float
    # At the start of a stampede: the larger, the longer everybody waits for a creator that may die.
    stampede_weight: float


# An unlinked region stays for as long as anybody maps it, so one id may take many times its size.
COPIES = 16


def places(prefix: str, room_bytes: float) -> list[Place]:
    """Those for which a file system with so much room is large enough."""
    every = [
        Place(f"{prefix}-tiny", Shape(1, 64), Shape(2, 32), Shape(3, 64), 0.42, 1.0),
        # Rows of a real encoder: not a multiple of a page.
        Place(f"{prefix}-rows", Shape(36, 7168), Shape(72, 3584), Shape(37, 7168), 0.32, 1.0),
        Place(f"{prefix}-some", Shape(768, 4096), Shape(1536, 2048), Shape(512, 4096), 0.24, 2.0),
        Place(f"{prefix}-big", Shape(16384, 4096), Shape(8192, 8192), Shape(16383, 4096), 0.02, 1.0),
    ]
    return [place for place in every if place.right.total_bytes * COPIES <= room_bytes]


def word(number: int, inode: int, sequence: int) -> int:
    return (number + 1) << 26 | (inode & 0xFFFF) << 10 | sequence % SEQUENCES


def sequence_of(value: int) -> int:
    return value % SEQUENCES


def is_behind(value: int, known: int) -> bool:
    """Was `value` written before `known`? Both of one slot; sequences wrap."""
    return (sequence_of(value) - sequence_of(known)) % SEQUENCES >= SEQUENCES // 2


def owner_of_slot(slot: int) -> int:
    return HEADER if slot == 0 else slot - 1


def grid(words: Words) -> Words:
    """The slots as rows."""
    length = len(words) // SLOTS
    return words[: SLOTS * length].reshape(SLOTS, length)


def fault_in(words: Words, inode: int) -> str | None:
    """What cannot be there: neither zero nor a word of the slot's owner in this very file."""
    slots = grid(words)
    stride = 1 if words.nbytes <= CLOSE_LOOK_BYTES else 16
    for slot in range(SLOTS):
        row = slots[slot, ::stride]
        key = word(owner_of_slot(slot), inode, 0) >> 10
        bad = np.flatnonzero((row != 0) & (row >> 10 != key))
        if len(bad):
            place, value = int(bad[0]), int(row[bad[0]])
            return (
                f"slot {slot} of inode {inode} holds 0x{value:08x} at word {place * stride}, and {len(bad)} such: "
                f"actor {(value >> 26) - 1}, inode & 0xffff = {value >> 10 & 0xFFFF}, should be {inode & 0xFFFF}"
            )
    tail = words[slots.size :]
    return f"the tail of inode {inode}, which nobody writes, is not zero" if tail.any() else None
