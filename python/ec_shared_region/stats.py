"""What :meth:`ECSharedRegion.stats` answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import _core

if TYPE_CHECKING:
    from .pin import PinResult

__all__ = ["Counters", "RegionStats"]


@dataclass(frozen=True, slots=True)
class Counters:
    """What this process did since it began, over all its regions. A forked child goes on from its parent's numbers."""

    created: int
    """Constructors that made a region."""
    joined: int
    """Constructors that joined one."""
    failed: int
    """Constructors that ended in an error, a timeout or Ctrl-C."""
    reclaimed_files: int
    """Files of the dead that were removed: by constructors, by the last to leave, by :func:`reap`."""
    reclaimed_bytes: int
    """Bytes that came back with them."""
    fallbacks: int
    """Constructors that prepared a region in a slower way than the machine could have: see
    ``prefault_report.fallback``."""
    pinned: int
    """Regions that were registered with CUDA."""
    pins_refused: int
    """Registrations that the runtime refused."""
    pins_skipped: int
    """Registrations that were not tried: no CUDA, or switched off."""


@dataclass(frozen=True, slots=True)
class RegionStats:
    """Numbers of one region in this process, for a log line or a metrics exporter.

    Cheap: it looks at no other process.
    """

    role: str
    """``"creator"`` or ``"joiner"``."""
    nbytes: int
    """Bytes of the region."""
    allocated_bytes: int
    """Bytes that the filesystem holds for it now, in whole pages; less than ``nbytes`` while it is being prepared."""
    huge_bytes: int
    """Bytes of it that huge pages map in this process now; where the kernel does not tell, when it was opened."""
    pinned_bytes: int
    """Bytes that are registered with CUDA in this process: all or none."""
    pinned_pieces: int
    """Registrations that they take; 0 where another library made them."""
    open_seconds: float
    """Seconds from the call of the constructor to the finished region."""
    waited_seconds: float
    """Seconds of that until the file was made or attached to."""
    prefault_seconds: float
    """Seconds of that for reserving and mapping ahead."""
    pin_seconds: float | None
    """Seconds of the last :meth:`ECSharedRegion.pin_memory` that came to an answer; None: there was none."""
    counters: Counters
    """What this process did over all its regions."""


def counters() -> Counters:
    """The numbers of this process now."""
    return Counters(**dict(_core.counters()))


def stats_of(
    opened: _core.OpenReport, nbytes: int, usage: tuple[int, int | None], is_pinned: bool, pin: PinResult | None
) -> RegionStats:
    """Numbers of an open region; ``usage`` is allocated bytes, and mapped huge bytes if they are known."""
    allocated_bytes, huge_bytes = usage
    return RegionStats(
        role="creator" if opened.is_creator else "joiner",
        nbytes=nbytes,
        allocated_bytes=allocated_bytes,
        huge_bytes=opened.huge_bytes if huge_bytes is None else huge_bytes,
        pinned_bytes=nbytes if is_pinned else 0,
        pinned_pieces=pin.pieces if is_pinned and pin is not None else 0,
        open_seconds=opened.elapsed_seconds,
        waited_seconds=opened.waited_seconds,
        prefault_seconds=opened.prefault_seconds,
        pin_seconds=None if pin is None else pin.seconds,
        counters=counters(),
    )
