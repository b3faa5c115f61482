"""One flat, pinned region of ``/dev/shm``, shared by every process of an inference engine.

Importing this package loads neither torch nor CUDA: torch comes with the first use of
:attr:`ECSharedRegion.blocks`, CUDA with :meth:`ECSharedRegion.pin_memory`.
"""

from __future__ import annotations

from . import _early  # isort: skip  # before what takes its time to import
from ._core import build_info
from ._core import wait_for_file_size as _wait_for_file_size
from .check import CheckResult, Identity
from .errors import (
    AccessDeniedError,
    ArgumentTypeError,
    BlockIndexError,
    DirectoryMissingError,
    ForeignFileError,
    GeometryMismatchError,
    InvalidArgumentError,
    NoHugePagesError,
    NoSpaceError,
    PinError,
    RegionClosedError,
    RegionError,
    RegionExistsError,
    RegionNotFoundError,
    RegionTimeoutError,
    SizeOverflowError,
    SystemCallError,
)
from .ops.fit import PreflightProblem, PreflightResult, preflight
from .ops.regions import Holder, ReapDecision, ReapResult, RegionInfo, inspect, list_regions, reap
from .pin import PinResult
from .prefault import PrefaultReport
from .region import ECSharedRegion, logger
from .stats import Counters, RegionStats

__all__ = [
    "AccessDeniedError",
    "ArgumentTypeError",
    "BlockIndexError",
    "CheckResult",
    "Counters",
    "DirectoryMissingError",
    "ECSharedRegion",
    "ForeignFileError",
    "GeometryMismatchError",
    "Holder",
    "Identity",
    "InvalidArgumentError",
    "NoHugePagesError",
    "NoSpaceError",
    "PinError",
    "PinResult",
    "PrefaultReport",
    "PreflightProblem",
    "PreflightResult",
    "ReapDecision",
    "ReapResult",
    "RegionClosedError",
    "RegionError",
    "RegionExistsError",
    "RegionInfo",
    "RegionNotFoundError",
    "RegionStats",
    "RegionTimeoutError",
    "SizeOverflowError",
    "SystemCallError",
    "__version__",
    "_wait_for_file_size",
    "build_info",
    "inspect",
    "list_regions",
    "logger",
    "preflight",
    "reap",
]

del _early

__version__: str = build_info()["version"]
