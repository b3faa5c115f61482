"""What the processes of the demo's engine say to each other, over pipes."""

from __future__ import annotations

import contextlib
import enum
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import ec_shared_region

if TYPE_CHECKING:
    from .photos import Photograph

__all__ = [
    "Closed",
    "DemoError",
    "Failed",
    "Finished",
    "Job",
    "JobKind",
    "Opened",
    "Order",
    "Plan",
    "ProcessRecord",
    "Progress",
    "Ready",
    "Stopped",
    "Verified",
    "expect",
    "run_child",
]


class DemoError(Exception):
    """The demo cannot go on: one line that says why, and perhaps one that says what to do."""

    def __init__(self, text: str, *, hint: str | None = None, exit_code: int = 3) -> None:
        super().__init__(text, hint, exit_code)
        self.text, self.hint, self.exit_code = text, hint, exit_code

    def __str__(self) -> str:
        return self.text if self.hint is None else f"{self.text}\nhint: {self.hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _demo_error, (self.text, self.hint, self.exit_code)


def _demo_error(text: str, hint: str | None, exit_code: int) -> DemoError:
    return DemoError(text, hint=hint, exit_code=exit_code)


@dataclass(frozen=True, slots=True)
class Plan:
    """What every process of the engine is told when it is started."""

    engine_id: str
    num_blocks: int
    block_size_bytes: int
    hidden_size: int
    seed: int
    rounds: int
    workers: int
    photographs: tuple[Photograph, ...]
    timeout_seconds: float
    """How long one answer may take."""

    @property
    def max_rows(self) -> int:
        return max(photograph.rows for photograph in self.photographs)


@dataclass(slots=True)
class ProcessRecord:
    """What one process did, as it tells itself. Sizes in bytes, times in seconds of the monotonic clock."""

    role: str
    pid: int
    is_creator: bool = False
    inode: int = 0
    open_seconds: float = 0.0
    nonzero_fresh_bytes: int = 0
    """Bytes that were not zero when the region was opened, before anybody saved."""
    saved_bytes: int = 0
    save_seconds: float = 0.0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    differing_bytes: int = 0
    """Loaded bytes that are not what the encoder made."""
    is_pinned: bool = False
    pin_note: str = ""
    ended: str | None = None
    """How the process ended, as the supervisor saw it."""


# Supervisor to its children.
class Order(enum.Enum):
    OPEN = enum.auto()
    START = enum.auto()
    CLOSE = enum.auto()


# Scheduler to the workers; the answer is the job itself.
class JobKind(enum.Enum):
    ENCODE = enum.auto()
    SAVE = enum.auto()
    LOAD = enum.auto()


@dataclass(frozen=True, slots=True)
class Job:
    kind: JobKind
    photograph: int
    block_ids: tuple[int, ...] = ()
    """Row i of the photograph lies in block ``block_ids[i]``."""


# Children to the supervisor.
@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class Opened:
    record: ProcessRecord


@dataclass(frozen=True, slots=True)
class Progress:
    record: ProcessRecord


@dataclass(frozen=True, slots=True)
class Verified:
    """Every loader has loaded and compared the photograph of one more request."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Finished:
    cache_hits: int
    evicted_photographs: int
    reused_blocks: int


@dataclass(frozen=True, slots=True)
class Closed:
    record: ProcessRecord


@dataclass(frozen=True, slots=True)
class Failed:
    text: str
    hint: str | None
    traceback: str | None
    """Only of an exception that nobody foresaw."""


class Stopped(Exception):
    """The supervisor wants the process to end, or is gone itself."""


def expect(supervisor: Connection, order: Order, timeout_seconds: float) -> None:
    """Waits for the supervisor's ``order``; anything else, its death included, ends the process."""
    if not wait([supervisor], timeout_seconds):
        raise DemoError(f"the supervisor gave no order within {timeout_seconds:g} s: wanted {order.name}")
    if supervisor.recv() is not order:
        raise Stopped


def run_child(body: Callable[[], None], supervisor: Connection) -> None:
    """Runs a child's ``body`` and tells the supervisor of a failure, after the body has let go of its region."""
    try:
        body()
    except (Stopped, EOFError, ConnectionError):
        # The pipes are sockets between processes of one engine: they break when somebody is gone, and
        # then the supervisor, if it lives, knows more than this process does.
        return
    except Exception as error:
        is_foreseen = isinstance(error, (DemoError, ec_shared_region.RegionError, MemoryError))
        text = error.text if isinstance(error, DemoError) else f"{type(error).__name__}: {error}"
        hint = getattr(error, "hint", None)
        message = Failed(
            text.removesuffix(f"\nhint: {hint}"),
            hint,
            None if is_foreseen else traceback.format_exc(),
        )
        with contextlib.suppress(OSError):
            supervisor.send(message)
        raise SystemExit(1) from None
