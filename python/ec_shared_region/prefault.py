"""What preparing a region came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import _core

__all__ = ["PrefaultReport"]


@dataclass(frozen=True, slots=True)
class PrefaultReport:
    """How the pages of a region were put in place and mapped by this process."""

    tier: str
    """``"mount"``: huge pages by the mount's own option (``huge=``); ``"collapse"``: huge pages by
    ``MADV_COLLAPSE``; ``"base"``: base pages only; ``"none"``: this process placed no page, as a joiner does."""
    method: str
    """``"populate_write"`` or ``"populate_read"`` (``madvise``, Linux 5.14), ``"touch_write"`` or ``"touch_read"``
    (a byte of each page, on older kernels), ``"none"``: nothing was mapped ahead."""
    huge_bytes: int
    """Bytes that huge pages map in this process."""
    base_bytes: int
    """Bytes that base pages map, of what was mapped ahead."""
    threads: int
    """Threads that did it, the calling one among them."""
    seconds: float
    """Seconds that it took."""
    fallback: str | None
    """Why a lower tier was taken than the machine could have."""


def report_of(opened: _core.OpenReport) -> PrefaultReport:
    """The core's report as a value of this package."""
    return PrefaultReport(
        tier=opened.tier,
        method=opened.method,
        huge_bytes=opened.huge_bytes,
        base_bytes=opened.base_bytes,
        threads=opened.threads,
        seconds=opened.prefault_seconds,
        fallback=opened.fallback,
    )
