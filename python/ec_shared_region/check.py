"""What :meth:`ECSharedRegion.check` and :meth:`ECSharedRegion.identity` answer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from . import _core

__all__ = ["CheckResult", "Identity"]


class Identity(NamedTuple):
    """Which creation of a region a process has: equal in all that share the bytes, different after a restart.

    Plain numbers, to be compared over a channel of the participants' own.
    """

    device: int
    """Device number of the filesystem; each mount of a tmpfs has its own."""
    inode: int
    """Inode number of the file. tmpfs uses these again."""
    nonce: int
    """A random number of this creation, used once."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a live region looks like from outside. True as a whole if there is no problem."""

    ok: bool
    """No problem was found."""
    name: str
    """``"ours"``; ``"lost"``: nothing stands at the path; ``"replaced"``: another file does."""
    size_bytes: int
    """Size of the file now."""
    expected_bytes: int
    """Size that is mapped."""
    allocated_bytes: int
    """Bytes that the filesystem holds for the file."""
    holders: tuple[int, ...]
    """Processes that have the file open or mapped and can be seen from here, this one among them."""
    unseen_holders: int
    """Holders in other PID namespaces, of which only the lock is seen."""
    problems: tuple[str, ...]
    """One line for each problem: what it is, what still works, what to do."""

    def __bool__(self) -> bool:
        return self.ok


def result_of(report: _core.CheckReport, path: str) -> CheckResult:
    """The core's findings in words."""
    problems = _problems(report, path)
    return CheckResult(
        ok=not problems,
        name=report.name,
        size_bytes=report.size_bytes,
        expected_bytes=report.expected_bytes,
        allocated_bytes=report.allocated_bytes,
        holders=tuple(report.holders),
        unseen_holders=report.unseen_holders,
        problems=tuple(problems),
    )


def _problems(report: _core.CheckReport, path: str) -> list[str]:
    problems = []
    if report.name == "lost":
        problems.append(
            f"the name `{path}` is lost: processes that have the region mapped go on sharing it, late joiners will "
            "make another one; a name cannot be given back. The creator's cleanup() or release_name() takes it; so "
            "does systemd-logind when the user's last session ends (RemoveIPC=yes): run under a system user, or enable "
            "lingering"
        )
    elif report.name == "replaced":
        problems.append(
            f"another file stands at `{path}`: processes that have this region mapped go on sharing it, late "
            "joiners get the other one; restart the processes that must share"
        )
    if report.size_bytes < report.expected_bytes:
        problems.append(
            f"the file was shortened to {report.size_bytes} of {report.expected_bytes} bytes: touching what lies "
            "behind is a bus error; stop using the region"
        )
    elif report.size_bytes > report.expected_bytes:
        problems.append(
            f"the file has grown to {report.size_bytes} bytes, {report.expected_bytes} are mapped: no constructor will "
            "join it any more"
        )
    elif report.allocated_bytes < report.expected_bytes and not report.is_being_prepared:
        problems.append(
            f"only {report.allocated_bytes} of {report.expected_bytes} bytes are backed by the filesystem: somebody "
            "punched a hole, and a touch may be a bus error when it is full"
        )
    if report.foreign_block_size is not None:
        problems.append(f"another process uses this file with blocks of {report.foreign_block_size} bytes")
    if report.links > 1:
        problems.append(f"the file has {report.links} names: no constructor will join it any more")
    if report.uid != os.geteuid():
        problems.append(
            f"the file belongs to uid {report.uid}, this process runs as uid {os.geteuid()}: no constructor of either "
            "user joins what the other has; open regions after privileges are dropped, and give no file away"
        )
    if report.mode & 0o077:
        problems.append(f"the mode {report.mode:04o} lets other users in: no constructor will join it any more")
    return problems
