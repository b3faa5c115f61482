"""Looks at the region files of ``/dev/shm``, and removes the dead ones.

The core judges each file by the constructors' own probe and looks up who holds it in one pass over ``/proc``
for all of them. Here it becomes plain values.
"""

from __future__ import annotations

import pwd
from collections.abc import Iterable
from dataclasses import dataclass

from .. import _core
from ..check import Identity
from ..region import _text

__all__ = ["Holder", "ReapDecision", "ReapResult", "RegionInfo", "inspect", "list_regions", "reap"]

_DIRECTORY = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has a region's file open for writing, or mapped."""

    pid: int
    """As seen from this process's PID namespace."""
    uid: int
    """Its user."""
    user: str | None
    """The name of that user, where there is one."""
    command: str
    """Its command line, or its short name in brackets where it has none."""
    is_open: bool
    """It has a descriptor that it can write through."""
    mapped_bytes: int
    """Up to which byte of the file it has it mapped, in whole pages; 0: it has only opened it."""
    is_dying: bool
    """It was killed, or is exiting, and has not let go yet."""


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """One region's file, from outside. No byte of it was touched."""

    id: str | None
    """The engine id; None where the name holds none."""
    path: str
    """Path of the file; bytes that are no text are surrogates, as in all paths of Python."""
    state: str
    """``"live"``; ``"being_made"``: its creator is at work; ``"original"``: only processes of the original class
    hold it; ``"orphan"``: proven dead; ``"foreign"``: no region of this user, so nobody of theirs touches it;
    ``"damaged"``: shortened under its holders; ``"unclear"``: it could not be judged, and is left alone."""
    reason: str
    """Why, and what follows from it, in one line."""
    num_blocks: int | None
    """Number of blocks; None unless a living process of ours announces their size."""
    block_size_bytes: int | None
    """Bytes of one block, likewise."""
    size_bytes: int
    """Size of the file."""
    allocated_bytes: int
    """Bytes that it takes in the filesystem, which is memory."""
    age_seconds: float
    """Seconds since the file was made (where the filesystem does not tell, since it got its size)."""
    uid: int
    """Owner of the file."""
    owner: str | None
    """The name of that user, where there is one."""
    mode: int
    """Permission bits; a region has 0o600."""
    identity: Identity | None
    """Which creation this is, to be compared with :meth:`ECSharedRegion.identity`; None unless a living process of
    ours announces it."""
    holders: tuple[Holder, ...]
    """The processes that have it, by pid, as far as they can be seen from here."""
    unseen_holders: int
    """Holders elsewhere, at least: in other PID namespaces (containers), or hidden by rights."""

    @property
    def is_held(self) -> bool:
        """Somebody has it open or mapped."""
        return self.state in ("live", "being_made", "original", "damaged")


@dataclass(frozen=True, slots=True)
class ReapDecision:
    """What was decided about one file."""

    id: str | None
    """The engine id; None where the name holds none."""
    path: str
    """Path of the file."""
    state: str | None
    """As in :class:`RegionInfo`; None: there is no such file."""
    is_removed: bool
    """It was removed; in a dry run: it would be."""
    freed_bytes: int
    """Bytes that came back to the filesystem, or would."""
    reason: str
    """Why."""


@dataclass(frozen=True, slots=True)
class ReapResult:
    """Every decision of one :func:`reap`."""

    decisions: tuple[ReapDecision, ...]
    """By name, or in the order of the ids that were given."""
    dry_run: bool
    """Nothing was removed."""

    @property
    def freed_bytes(self) -> int:
        """Bytes that came back in all, or would."""
        return sum(decision.freed_bytes for decision in self.decisions)

    @property
    def removed(self) -> tuple[ReapDecision, ...]:
        """The files that were removed, or would be."""
        return tuple(decision for decision in self.decisions if decision.is_removed)


def list_regions() -> list[RegionInfo]:
    """Every region file in ``/dev/shm``, by name: also orphans, files of other users and of the original class.

    Takes milliseconds, and one pass over ``/proc`` whatever the number of regions.

    :raises OSError: ``/dev/shm`` is not there, or cannot be read.
    :raises TimeoutError: somebody holds the directory's lock for seconds.
    """
    user_of = _Users()
    return [_info(entry, user_of) for entry in _core.list_regions()]


def inspect(id: str) -> RegionInfo | None:
    """The region of one engine id. None where there is none.

    :raises ValueError: an id that no region can have.
    :raises TypeError: an id that is no string.
    :raises OSError: as :func:`list_regions`.
    """
    entry = _core.inspect(_text("engine_id", id))
    return None if entry is None else _info(entry, _Users())


def reap(ids: Iterable[str] | None = None, *, dry_run: bool = False) -> ReapResult:
    """Removes the regions that are proven dead, and explains every decision.

    What a constructor does by itself, on demand and under the same lock. It never removes what somebody
    holds, also if that is the original class, nothing of another user, and nothing that cannot be judged.

    :param ids: the engine ids to look at. Default: every region file.
    :param dry_run: decide and remove nothing.
    :raises ValueError: an id that no region can have.
    :raises TypeError: an id that is no string, or a string in place of several.
    :raises OSError: as :func:`list_regions`. A file that cannot be removed is a decision that says why.
    """
    if isinstance(ids, (str, bytes)):
        raise TypeError(f"ids: {ids!r:.80}: give a list of engine ids, for example [{ids!r:.80}]")
    names = None if ids is None else [_text("engine_id", id) for id in ids]
    decisions = tuple(
        ReapDecision(
            id=decision.id,
            path=f"{_DIRECTORY}/{decision.file_name}",
            state=decision.state,
            is_removed=decision.is_removed,
            freed_bytes=decision.bytes,
            reason=decision.reason,
        )
        for decision in _core.reap(names, dry_run)
    )
    return ReapResult(decisions, dry_run)


class _Users:
    """Names of users, each asked for once: behind it may be a directory service."""

    def __init__(self) -> None:
        self._names: dict[int, str | None] = {}

    def __call__(self, uid: int) -> str | None:
        if uid not in self._names:
            try:
                self._names[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._names[uid] = None
        return self._names[uid]


def _info(entry: _core.Entry, user_of: _Users) -> RegionInfo:
    return RegionInfo(
        id=entry.id,
        path=f"{_DIRECTORY}/{entry.file_name}",
        state=entry.state,
        reason=entry.reason,
        num_blocks=entry.num_blocks,
        block_size_bytes=entry.block_size_bytes,
        size_bytes=entry.size_bytes,
        allocated_bytes=entry.allocated_bytes,
        age_seconds=entry.age_seconds,
        uid=entry.uid,
        owner=user_of(entry.uid),
        mode=entry.mode,
        identity=None if entry.nonce is None else Identity(entry.device, entry.inode, entry.nonce),
        holders=tuple(
            Holder(pid, uid, user_of(uid), command, is_open, mapped_bytes, is_dying)
            for pid, uid, command, is_open, mapped_bytes, is_dying in entry.holders
        ),
        unseen_holders=entry.unseen_holders,
    )
