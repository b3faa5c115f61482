"""The exceptions of this package.

Each is a :class:`RegionError` and the built-in exception that callers already catch. The text says
what failed, with the values, and on a second line what to do about it (also in ``hint``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .pin import PinResult

__all__ = [
    "AccessDeniedError",
    "ArgumentTypeError",
    "BlockIndexError",
    "DirectoryMissingError",
    "ForeignFileError",
    "GeometryMismatchError",
    "InvalidArgumentError",
    "NoHugePagesError",
    "NoSpaceError",
    "PinError",
    "RegionClosedError",
    "RegionError",
    "RegionExistsError",
    "RegionNotFoundError",
    "RegionTimeoutError",
    "SizeOverflowError",
    "SystemCallError",
]


class RegionError(Exception):
    """Base of every exception that this package raises on purpose."""

    hint: str | None = None
    """What to do about it, in one line."""

    def __str__(self) -> str:
        # An OSError would add "[Errno N]" and the file name, which the text has already.
        text = (isinstance(self, OSError) and self.strerror) or super().__str__()
        return text if self.hint is None else f"{text}\nhint: {self.hint}"


class InvalidArgumentError(RegionError, ValueError):
    """A value that no region can have: zero, negative, a bad id, an unknown word; or bytes that fit no copy."""


class SizeOverflowError(InvalidArgumentError, OverflowError):
    """``num_blocks * block_size_bytes`` is beyond what a file offset can hold (2**60 bytes)."""


class ArgumentTypeError(RegionError, TypeError):
    """An argument of the wrong type: a float or bool as a size, an id that is no string, a tensor on a device."""


class BlockIndexError(InvalidArgumentError, IndexError):
    """A block id below 0, or one that the region does not reach."""


class GeometryMismatchError(RegionError, ValueError):
    """A live region under this id has another shape."""


class RegionClosedError(RegionError, ValueError):
    """The region was closed by ``cleanup()``."""


class PinError(RegionError, RuntimeError):
    """The memory could not be registered with CUDA; the region itself works."""

    result: PinResult
    """What ``pin_memory()`` would have returned."""


class NoSpaceError(RegionError, OSError):
    """Filesystem, inodes, memory or a limit cannot hold the region (``ENOSPC``, ``ENOMEM``, ``EFBIG``).

    Nothing is left reserved.
    """


class NoHugePagesError(RegionError, OSError):
    """``huge_pages="require"``, and not every whole huge page of the region is one (``ENOMEM``).

    Nothing is left reserved.
    """


class ForeignFileError(RegionError, PermissionError):
    """What stands at the path is not a region file of this user; it was not touched.

    ``errno`` tells a symbolic link (``ELOOP``), a directory (``EISDIR``), another filesystem (``EXDEV``)
    and the rest (``EPERM``) apart.
    """


class RegionExistsError(RegionError, FileExistsError):
    """``mode="create"``, and the region is in use."""


class RegionTimeoutError(RegionError, TimeoutError):
    """A wait came to its end; the text says what was waited for."""


class RegionNotFoundError(RegionTimeoutError, FileNotFoundError):
    """``mode="join"``, and no such region appeared in time."""


class SystemCallError(RegionError, OSError):
    """A system call failed; ``errno`` and ``filename`` are those of the call."""


class DirectoryMissingError(SystemCallError, FileNotFoundError):
    """``/dev/shm`` is not there."""


class AccessDeniedError(SystemCallError, PermissionError):
    """The system does not let this process do it."""


def argument_error(kind: type[RegionError], text: str, hint: str) -> RegionError:
    """An exception with its hint, to be raised."""
    error = kind(text)
    error.hint = hint
    return error
