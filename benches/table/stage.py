"""The process that measures: a /dev/shm of its own where that is permitted, all imports, one order at a time."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from .family import die_with_the_parent

SHM_SIZE = "75%"
REPEATS_PER_ROUND = 4

_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Setting:
    """What the process is told at its start."""

    # Options of the tmpfs; "" for an ordinary one.
    mount: str
    # Names in /dev/shm begin with it, where the directory is shared with others.
    prefix: str
    is_quick: bool
    rounds: int


@dataclass(frozen=True)
class Order:
    """A measurement: a kind ("row", "growth", "peers") and the place in that kind's plans."""

    kind: str
    index: int


@dataclass(frozen=True)
class Told:
    """A round begins."""

    number: int
    disturbance: str | None


@dataclass(frozen=True)
class Refused:
    """There is no such mount here."""

    reason: str


class Stage:
    """The other side of the process that measures."""

    def __init__(self, setting: Setting) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=main, args=(theirs, setting), daemon=False)
        self._process.start()
        theirs.close()
        answer = self._pipe.recv()
        self.refusal = answer.reason if isinstance(answer, Refused) else None
        # What /dev/shm is, in words.
        self.shm = answer if isinstance(answer, str) else None

    def do(self, order: Order) -> Iterator[Any]:
        """Gives `Told` for each round, and the result at last."""
        self._pipe.send(order)
        while True:
            answer = self._pipe.recv()
            yield answer
            if not isinstance(answer, Told):
                return

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def main(pipe: Connection, setting: Setting) -> None:
    # Ctrl-C is for the process that talks to people: it ends this one, and the kernel ends those that this one made.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_the_parent()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import kernel

    try:
        options = f"size={SHM_SIZE}{',' if setting.mount else ''}{setting.mount}"
        kernel.private_shm(options)
        shm = f"a tmpfs of its own, {options}"
    except kernel.NotPermitted as error:
        if setting.mount:
            pipe.send(Refused(str(error)))
            return
        shm = f"the host's ({error})"
    _serve(pipe, setting, shm)


def _serve(pipe: Connection, setting: Setting, shm: str) -> None:
    # Here, so that nothing that is imported knows another /dev/shm.
    from multiprocessing import resource_tracker

    from . import growth, limits, measure, peers, rows

    resource_tracker.ensure_running()  # else each process that uses shared_memory would start one
    bounds = limits.Limits()
    watch = measure.Watch(bounds.cpu_seconds)

    def tell(number: int, disturbance: str | None) -> None:
        pipe.send(Told(number, disturbance))

    # A quick run says what was disturbed, and repeats nothing.
    repeats = 0 if setting.is_quick else REPEATS_PER_ROUND * setting.rounds
    bench = rows.Bench(
        rows.Scale.of(setting.is_quick),
        measure.Rounds(setting.rounds, repeats, max(1, setting.rounds // 2), watch, tell),
        bounds,
        (f"{setting.prefix}-{number}" for number in itertools.count()),
        setting.mount,
    )
    kinds: dict[str, tuple[Sequence[Any], Callable[[Any, Any], Any]]] = {
        "row": (rows.PLANS, rows.measure),
        "growth": (growth.PLANS, growth.measure),
        "peers": (peers.PLANS, peers.measure),
    }
    pipe.send(shm)
    with contextlib.suppress(EOFError):
        while True:
            order = pipe.recv()
            plans, do = kinds[order.kind]
            plan = plans[order.index]
            if getattr(plan, "needs_torch", order.kind == "peers"):
                importlib.import_module("torch")  # once, and each sample's process has it
            pipe.send(do(plan, bench))
