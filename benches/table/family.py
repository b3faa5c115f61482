"""Forks processes for a sample, lets them meet, and collects what they saw.

A process that was made for one sample has no state of an earlier one: no mappings, no warm page tables. Forking from
a process that has imported everything costs milliseconds, starting an interpreter up to seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .figures import NOT_IN_BUILD

PR_SET_PDEATHSIG = 1
# Ends a sample in which somebody died before all had met.
PATIENCE_SECONDS = 120.0


class NotMeasured(Exception):
    """This cannot be measured here; the text says why."""


class NotInBuild(NotMeasured):
    """The package that is installed has no such thing yet."""

    def __init__(self) -> None:
        super().__init__(NOT_IN_BUILD)


class SampleFailed(Exception):
    """A process of a sample raised, or died; the text has its traceback."""


@dataclass
class Sample:
    """What one process saw: a time in seconds, when it was on the clock that all share, and anything else."""

    seconds: float
    began: float = 0.0
    ended: float = 0.0
    cpu_seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


class Stopwatch:
    """`with Stopwatch() as watch: ...`, then `watch.sample()`."""

    def __enter__(self) -> Stopwatch:
        self._cpu = cpu_seconds()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = time.perf_counter()
        self._cpu = cpu_seconds() - self._cpu

    def sample(self, **facts: Any) -> Sample:
        return Sample(self._ended - self._began, self._began, self._ended, self._cpu, facts)


def cpu_seconds() -> float:
    """CPU time of this process and of its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def die_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


Meet = Callable[[], None]
Job = Callable[[Meet], Sample]


def run(job: Job) -> Sample:
    """Runs a job in a process of its own."""
    return run_together([job])[0]


def run_together(jobs: Sequence[Job]) -> list[Sample]:
    """Runs each job in a process of its own; a job gets a function that returns when all have called it."""
    children: list[_Child] = []
    try:
        for job in jobs:
            children.append(_start(job))
        _conduct(children)
    finally:
        for child in children:
            child.end()
    return _samples([child.answer for child in children])


@dataclass
class _Child:
    pid: int
    # From it: MET each time it waits for the others, then its answer. To it: GO, or BROKEN.
    reader: int
    writer: int
    answer: bytes = b""
    is_waiting: bool = False
    is_done: bool = False

    def end(self) -> None:
        if not self.is_done:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.reader)
        os.close(self.writer)


MET, GO, BROKEN = b"m", b"g", b"b"


def _conduct(children: Sequence[_Child]) -> None:
    """Lets the children meet as often as they like, until all have answered."""
    by_reader = {child.reader: child for child in children}
    running = list(children)
    while running:
        ready, _, _ = select.select([child.reader for child in running], [], [], PATIENCE_SECONDS)
        if not ready:
            raise SampleFailed(f"nothing happened for {PATIENCE_SECONDS:.0f} s")
        for reader in ready:
            child = by_reader[reader]
            chunk = os.read(reader, 1 << 16)
            if chunk == MET and not child.answer:
                child.is_waiting = True
            elif chunk:
                child.answer += chunk
            else:
                child.is_done = True
        running = [child for child in children if not child.is_done]
        waiting = [child for child in children if child.is_waiting]
        if waiting and len(waiting) == len(running):
            for child in waiting:
                child.is_waiting = False
                os.write(child.writer, GO if len(waiting) == len(children) else BROKEN)


def _start(job: Job) -> _Child:
    reader, answers = os.pipe()
    orders, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(answers)
        os.close(orders)
        return _Child(pid, reader, writer)

    def meet() -> None:
        os.write(answers, MET)
        if os.read(orders, 1) != GO:
            raise SampleFailed(NOBODY_CAME)

    try:
        die_with_the_parent()
        answer = _answer_of(job, meet)
        with open(answers, "wb") as file:
            file.write(pickle.dumps(answer))
    finally:
        # Without the parent's exit handlers: they are the parent's.
        os._exit(0)


NOBODY_CAME = "another process of the sample ended before all had met"


def _answer_of(job: Job, meet: Meet) -> tuple[str, Any]:
    try:
        return "sample", job(meet)
    except NotInBuild:
        return "not in build", None
    except NotMeasured as reason:
        return "not measured", str(reason)
    except BaseException:
        return "failed", traceback.format_exc()


def _samples(answers: Sequence[bytes]) -> list[Sample]:
    found: list[tuple[str, Any]] = [
        pickle.loads(answer) if answer else ("failed", "a process of the sample died") for answer in answers
    ]
    kinds = {kind for kind, _ in found}
    if "not in build" in kinds:
        raise NotInBuild
    for kind, value in found:
        if kind == "not measured":
            raise NotMeasured(value)
    failures = [value for kind, value in found if kind == "failed"]
    if failures:
        # That nobody came is only what the others saw of it.
        raise SampleFailed(min(failures, key=lambda text: NOBODY_CAME in text))
    return [value for _, value in found]
