"""Would a region fit here? The constructor's own checks, without constructing."""

from __future__ import annotations

from dataclasses import dataclass

from .. import _core
from ..region import _whole_number

__all__ = ["PreflightProblem", "PreflightResult", "preflight"]


@dataclass(frozen=True, slots=True)
class PreflightProblem:
    """One thing that stands against a region."""

    what: str
    """``"space"``, ``"quota"``, ``"inodes"``, ``"memory"``, ``"file_size_limit"`` or ``"control_group"``."""
    text: str
    """What it is, with the numbers."""
    hint: str
    """What to do about it."""
    is_refused: bool
    """The constructor raises :class:`NoSpaceError`. Else it warns and goes on, and the kernel may kill."""


@dataclass(frozen=True, slots=True)
class PreflightResult:
    """What a constructor would find at this moment. True as a whole if nothing stands against the region."""

    fits: bool
    """There is no problem."""
    wanted_bytes: int
    """Bytes of the region: ``num_blocks * block_size_bytes``."""
    filesystem_bytes: int
    """Size of the mount ``/dev/shm``; 0: it has no limit."""
    free_bytes: int
    """Bytes that a constructor finds free there: it removes the dead first."""
    reclaimable_bytes: int
    """Bytes of those that dead regions of this user still take."""
    inodes: int
    """Files that the mount can have; 0: it has no limit."""
    free_inodes: int
    """Files that can still be made; a region takes one, a joiner none."""
    memory_bytes: int
    """RAM and swap of the machine."""
    file_size_limit_bytes: int | None
    """``RLIMIT_FSIZE`` of this process; None: no limit."""
    control_group_limit_bytes: int | None
    """The tightest memory limit of the control groups above this process; None: no limit."""
    control_group_used_bytes: int | None
    """What that group uses now."""
    problems: tuple[PreflightProblem, ...]
    """Everything that stands against it; the constructor raises the first that is refused."""

    def __bool__(self) -> bool:
        return self.fits


def preflight(num_blocks: int, block_size_bytes: int) -> PreflightResult:
    """Would a region of this geometry fit into ``/dev/shm`` now? Makes nothing.

    An answer for this moment: only the constructor, which reserves every byte, can promise.

    :raises ValueError: a geometry that no region can have.
    :raises TypeError: sizes that are no integers.
    :raises OSError: as :func:`list_regions`.
    """
    found = _core.preflight(
        _whole_number("num_blocks", num_blocks), _whole_number("block_size_bytes", block_size_bytes)
    )
    problems = tuple(PreflightProblem(*problem) for problem in found.problems)
    return PreflightResult(
        fits=not problems,
        wanted_bytes=found.wanted_bytes,
        filesystem_bytes=found.filesystem_bytes,
        free_bytes=found.free_bytes,
        reclaimable_bytes=found.reclaimable_bytes,
        inodes=found.inodes,
        free_inodes=found.free_inodes,
        memory_bytes=found.memory_bytes,
        file_size_limit_bytes=found.file_size_limit_bytes,
        control_group_limit_bytes=found.control_group_limit_bytes,
        control_group_used_bytes=found.control_group_used_bytes,
        problems=problems,
    )
