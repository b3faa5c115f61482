"""Runs the demo: one life of the engine, or with ``kill`` one that is killed and one that heals it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from . import leftovers, photos
from .engine import Engine, EngineRecord
from .leftovers import Leftover
from .messages import DemoError, Plan

__all__ = ["Interrupted", "Outcome", "Request", "Talk", "run"]

_BFLOAT16_BYTES = 2
# The region holds this part of all rows, so that blocks have to be used again.
_CACHED_PART = 3


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for."""

    images: Path | None
    workers: int
    hidden_size: int
    max_patches: int
    rounds: int
    seed: int
    engine_id: str | None
    timeout_seconds: float
    kill: str | None


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    plan: Plan
    engines: list[EngineRecord] = field(default_factory=list)
    error: DemoError | None = None
    left: list[Leftover] = field(default_factory=list)
    """Files that are still in /dev/shm."""
    removed: list[Leftover] = field(default_factory=list)
    """Files that were there after the last process had ended, and that the supervisor removed."""
    interrupted_by: int | None = None
    """Number of the signal that stopped the demo."""

    @property
    def problems(self) -> list[str]:
        """Every check that failed, in words."""
        found = []
        for engine in self.engines:
            creators = [process.role for process in engine.processes if process.is_creator]
            if engine.processes and len(creators) != 1:
                found.append(f"{len(creators)} processes created the region: {', '.join(creators)}")
            if len({process.inode for process in engine.processes}) > 1:
                found.append("the processes have different files open")
            for process in engine.processes:
                if process.nonzero_fresh_bytes:
                    found.append(f"{process.role} found {process.nonzero_fresh_bytes} bytes of a fresh region not zero")
                if process.differing_bytes:
                    found.append(f"{process.role} loaded {process.differing_bytes} bytes that are not what was saved")
        found.extend(f"`{file.path}` is left: {file.size_bytes} bytes" for file in self.left)
        # Processes that failed, or had to be killed, may leave the file to the next who comes.
        if self.error is None and self.interrupted_by is None:
            found.extend(f"`{file.path}` was left: {file.size_bytes} bytes (removed now)" for file in self.removed)
        return found

    @property
    def exit_code(self) -> int:
        if self.interrupted_by is not None:
            return 128 + self.interrupted_by
        if self.problems:
            return 1
        return 0 if self.error is None else self.error.exit_code


class Talk(Protocol):
    """Where the demo says what it is doing."""

    def stage(self, text: str) -> None: ...
    def advance(self, done: int, total: int) -> None: ...


class Interrupted(BaseException):
    """A signal asked the demo to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run(request: Request, talk: Talk) -> Outcome:
    """Runs the demo. Whatever happens, no process and no file of it is left when this returns or raises.

    SIGINT, SIGTERM and SIGHUP stop it in order. What goes wrong once the engine is planned is in the outcome.

    :raises DemoError: the demo could not begin.
    :raises Interrupted: by a signal before it began.
    """
    with _Signals() as signals:
        outcome = Outcome(_plan(request, talk))
        try:
            if request.kill is not None:
                with _life(outcome, signals) as engine:
                    _kill_half_way(engine, outcome.plan, talk)
            with _life(outcome, signals) as engine:
                _run_to_the_end(engine, outcome.plan, talk)
        except DemoError as error:
            outcome.error = error
        except Interrupted:
            pass
        finally:
            signals.hold()
            outcome.removed = leftovers.of_engine(outcome.plan.engine_id)
            if outcome.removed:
                # Two engines of one id that started together: the one that came second leaves the other's alone.
                is_anothers = leftovers.reclaim(outcome.plan.engine_id) and outcome.error is not None
                outcome.left = [] if is_anothers else leftovers.of_engine(outcome.plan.engine_id)
                outcome.removed = [] if outcome.left or is_anothers else outcome.removed
        outcome.interrupted_by = signals.number
        return outcome


def _plan(request: Request, talk: Talk) -> Plan:
    for module in ("torch", "PIL"):
        if find_spec(module) is None:
            raise DemoError(f"`{module}` is not installed", hint="pip install 'ec-shared-region[demo]'")
    engine_id = request.engine_id
    if engine_id is None:
        engine_id = f"demo-{os.getpid()}-{time.monotonic_ns()}"
    leftovers.ensure_free(engine_id)
    talk.stage("reading photographs")
    paths = photos.in_package() if request.images is None else photos.in_folder(request.images)
    photographs = photos.survey(paths, request.max_patches, talk.advance)
    rows = [photograph.rows for photograph in photographs]
    return Plan(
        engine_id=engine_id,
        num_blocks=max(*rows, -(-sum(rows) // _CACHED_PART)),
        block_size_bytes=request.hidden_size * _BFLOAT16_BYTES,
        hidden_size=request.hidden_size,
        seed=request.seed,
        rounds=request.rounds,
        workers=request.workers,
        photographs=photographs,
        timeout_seconds=request.timeout_seconds,
    )


@contextmanager
def _life(outcome: Outcome, signals: _Signals) -> Iterator[Engine]:
    """One life of the engine, noted in the outcome however it ends; a signal does not cut its end short."""
    engine = Engine(outcome.plan)
    outcome.engines.append(engine.record)
    try:
        yield engine
    finally:
        with signals.held():
            engine.stop()


def _run_to_the_end(engine: Engine, plan: Plan, talk: Talk) -> None:
    talk.stage(f"starting a scheduler and {plan.workers} workers")
    engine.start()
    talk.stage("opening the region")
    engine.open()
    talk.stage("saving, loading and comparing photographs")
    engine.run(talk.advance)
    talk.stage("closing the region")
    engine.close()


def _kill_half_way(engine: Engine, plan: Plan, talk: Talk) -> None:
    talk.stage(f"starting a scheduler and {plan.workers} workers, of which the creator will be killed")
    engine.start()
    talk.stage("opening the region")
    engine.open()
    talk.stage("saving, loading and comparing half of the photographs")
    engine.run(talk.advance, until=plan.rounds * len(plan.photographs) // 2)
    talk.stage("killing the creator")
    engine.kill_creator()


class _Signals:
    """Turns the first SIGINT, SIGTERM or SIGHUP into :class:`Interrupted`; later ones change nothing.

    Taking the engine down is bounded in time, so an impatient second Ctrl-C must not cut it short and
    leave something behind.
    """

    def __init__(self) -> None:
        self._is_held = False
        self.number: int | None = None
        """The first signal that came."""
        self._was_raised = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` asks
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.number is not None:
            return  # the process is about to end by it; a second Ctrl-C has nothing to add
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hold(self) -> None:
        """From here on a signal is only noted."""
        self._is_held = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds a signal back until the end of the block."""
        self.hold()
        yield
        self._is_held = False
        if self.number is not None:
            self._raise()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number = number
        if not self._is_held:
            self._raise()

    def _raise(self) -> None:
        if not self._was_raised and self.number is not None:
            self._was_raised = True
            raise Interrupted(self.number)
