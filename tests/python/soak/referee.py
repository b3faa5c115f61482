"""Starts, kills, stops and reaps the processes of a soak, and looks at /dev/shm and /proc by itself.

The run goes in rounds of a second or two. In a round every actor goes its own way, or all begin with one constructor
at the same instant. It ends with everybody killed at once, everybody told to leave, or some of both. Then one
process constructs every id anew, which must be creator of zeros at once, and nothing may be left. So every round
can be judged as a whole (`judge.py`), from what the actors reported and from what was seen here.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import mmap
import os
import random
import select
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import actors, judge, plan, procfs

PR_SET_CHILD_SUBREAPER = 36
SNAPSHOT_EVERY_SECONDS = 0.05
# Actors that are told to leave do so within milliseconds; a forked child lives 0.12 s longer at most.
END_OF_ROUND_PATIENCE = 20.0
PIPE_BYTES = 1 << 20


@dataclass(frozen=True)
class Options:
    seed: int
    actors: int
    prefix: str
    is_private: bool
    originals: bool
    mutant: str | None
    runtime: Any


@dataclass
class Running:
    number: int
    is_original: bool
    # What the referee will do to it, and when: (monotonic time, signal).
    fate: list[tuple[float, int]] = field(default_factory=list)


@dataclass
class Round:
    number: int
    kind: str
    seconds: float
    ending: str
    events: list[dict[str, Any]] = field(default_factory=list)
    findings: list[judge.Finding] = field(default_factory=list)
    excused: Counter[str] = field(default_factory=Counter)


class Referee:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.places = plan.places(options.prefix, procfs.room_bytes())
        self._flags = mmap.mmap(-1, mmap.PAGESIZE)
        self._device = procfs.device()
        self._pipe = -1
        self._write_end = -1
        self._pending = b""
        self._running: dict[int, Running] = {}
        self._births: dict[int, int] = {}
        self._round = Round(0, "", 0.0, "")
        self._left: dict[str, int] = {}
        # Orphans of killed actors come to us, so that their end is seen too.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    # One round.

    def play(self, number: int, on_tick: Callable[[], None]) -> Round:
        rng = random.Random(f"{self.options.seed}/referee/{number}")
        kind = rng.choices(["free", "stampede"], [3, 2])[0]
        seconds = rng.uniform(0.8, 2.4) if kind == "free" else rng.uniform(0.02, 0.4)
        ending = rng.choices(["massacre", "leave", "mixed"], [4, 3, 3])[0]
        self._round = Round(number, kind, seconds, ending)
        self._births = {}
        self._flags[actors.STOP_AT] = 0
        self._pipe, self._write_end = os.pipe()
        os.set_blocking(self._pipe, False)
        fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        try:
            self._open_field(rng, kind)
            self._run(rng, seconds, on_tick)
            self._close_field(rng, ending)
            self._heal()
            self._wait_for_programs()
        except BaseException:
            for pid in self._running:
                os.kill(pid, signal.SIGKILL)
            self._wait_for_programs()
            raise
        finally:
            self._drain()
            os.close(self._pipe)
            os.close(self._write_end)
        self._round.findings += judge.judge(self._round.events, self._left, self._round.excused)
        return self._round

    def _open_field(self, rng: random.Random, kind: str) -> None:
        if kind == "free":
            starts_at, first = 0.0, None
        else:
            # All are born by then; they spin until the instant has come.
            starts_at = time.monotonic() + 0.004 * self.options.actors
            first = rng.choices(range(len(self.places)), [place.stampede_weight for place in self.places])[0]
        for number in range(self.options.actors):
            self._spawn(rng, number, starts_at, first)

    def _run(self, rng: random.Random, seconds: float, on_tick: Callable[[], None]) -> None:
        end = time.monotonic() + seconds
        next_look = 0.0
        while (now := time.monotonic()) < end:
            self._execute(now)
            for number in self._reap():
                self._spawn(rng, number, 0.0, None)
            if now >= next_look:
                self._look()
                next_look = now + SNAPSHOT_EVERY_SECONDS
                on_tick()
            due = [fate[0] for running in self._running.values() for fate in running.fate]
            pause = max(0.0, min([end, now + 0.005, *due]) - time.monotonic())
            select.select([self._pipe], [], [], pause)
            self._drain()

    def _close_field(self, rng: random.Random, ending: str) -> None:
        doomed = list(self._running)
        if ending == "mixed":
            rng.shuffle(doomed)
            doomed = doomed[: len(doomed) // 2]
        if ending != "massacre":
            self._flags[actors.STOP_AT] = 1
        for pid in list(self._running):
            self._running[pid].fate = []
            self._signal(pid, signal.SIGCONT)
        if ending != "leave":
            for pid in doomed:
                self._signal(pid, signal.SIGKILL)
                if ending == "mixed":
                    time.sleep(rng.uniform(0, 0.002))
        # Forked children whose parent was killed end by themselves.
        self._flags[actors.STOP_AT] = 1
        limit = time.monotonic() + END_OF_ROUND_PATIENCE
        while self._running or self._forks_alive():
            self._reap()
            self._drain()
            if time.monotonic() > limit:
                for pid in [*self._running, *self._forks_alive()]:
                    self._find("hang", f"process {pid} did not end: {procfs.where(pid)}")
                    self._signal(pid, signal.SIGKILL)
                limit = math.inf
            time.sleep(0.001)

    def _heal(self) -> None:
        """After everybody's end: the next constructor is creator at once, of zeros, and leaves nothing."""
        self._left = procfs.names(f"vllm_ec_{self.options.prefix}")
        self._flags[actors.STOP_AT] = 0
        used = {event["id"] for event in self._round.events if event["e"] == "call"}
        places = [place for place in self.places if place.engine_id in used]
        pid = self._fork(lambda: self._construct_anew(places))
        self._event("heal", p=pid)
        _, status = os.waitpid(pid, 0)
        self._drain()
        if status != 0:
            self._find("not healed", f"the constructor after everybody's death ended with wait status {status}")
        names = procfs.names("" if self.options.is_private else f"vllm_ec_{self.options.prefix}")
        if names:
            self._find("left at the end", f"names in /dev/shm: {names}")
        inodes = {event["ino"] for event in self._round.events if "ino" in event}
        # On a file system of our own nobody else has any lock, not on the directory either.
        held = procfs.locks(self._device, None if self.options.is_private else inodes)
        if held:
            self._find("left at the end", f"locks: {held}")
        for child in procfs.children(os.getpid()):
            mapped = procfs.mapped_regions(child, "vllm_ec_") + procfs.region_descriptors(child)
            if mapped:
                self._find("left at the end", f"process {child} holds {mapped}")

    def _construct_anew(self, places: list[plan.Place]) -> None:
        tell = actors.Reporter(self._write_end, plan.HEADER - 1)
        random.Random(f"{self.options.seed}/healer/{self._round.number}").shuffle(places)
        for place in places:
            shape, delayed = place.right, procfs.run_delay_seconds()
            with actors.Region(place.engine_id, shape.num_blocks, shape.block_size_bytes, timeout=5) as region:
                waited = region.waited_seconds - (procfs.run_delay_seconds() - delayed)
                dirty = int(np.count_nonzero(np.frombuffer(memoryview(region), dtype=np.uint8)))
                tell("healed", id=place.engine_id, creator=region.is_creator, dirty=dirty, waited=waited)

    def _wait_for_programs(self) -> None:
        while procfs.children(os.getpid()):
            self._reap()
            time.sleep(0.002)

    # Processes.

    def _fork(self, body: Callable[[], None]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            body()
        except BaseException as error:
            actors.Reporter(self._write_end, 0)("fault", text=f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)

    def _spawn(self, rng: random.Random, number: int, starts_at: float, first: int | None) -> None:
        options = self.options
        birth = self._births[number] = self._births.get(number, 0) + 1
        orders = actors.Orders(
            seed=f"{options.seed}/{self._round.number}/{number}/{birth}",
            number=number,
            places=self.places,
            is_original=options.originals and number % 3 == 2,
            starts_at=starts_at,
            first_place=first,
            may_differ=not options.originals,
            runtime=options.runtime,
            mutant=options.mutant,
        )
        write_end, flags, pipe = self._write_end, self._flags, self._pipe

        def body() -> None:
            os.close(pipe)
            actors.run(orders, write_end, flags)

        pid = self._fork(body)
        running = self._running[pid] = Running(number, orders.is_original)
        born = time.monotonic()
        if rng.random() < 0.6:
            after = math.exp(rng.uniform(math.log(0.002), math.log(0.8)))
            number_of_signal = signal.SIGTERM if rng.random() < 0.15 else signal.SIGKILL
            running.fate.append((max(born, starts_at) + after, number_of_signal))
        if rng.random() < 0.3:
            at = max(born, starts_at) + rng.uniform(0, 0.4)
            running.fate += [(at, signal.SIGSTOP), (at + rng.uniform(0.001, 0.02), signal.SIGCONT)]
            running.fate.sort()
        self._event("spawn", p=pid, n=number, birth=birth)

    def _execute(self, now: float) -> None:
        for pid, running in self._running.items():
            while running.fate and running.fate[0][0] <= now:
                self._signal(pid, running.fate.pop(0)[1])

    def _signal(self, pid: int, number: int) -> None:
        """Only to children that were not reaped, so the pid is theirs."""
        name = {signal.SIGSTOP: "stop", signal.SIGCONT: "cont"}.get(signal.Signals(number), "order")
        self._event(name, child=pid, signal=int(number), by="referee")
        os.kill(pid, number)

    def _reap(self) -> list[int]:
        """The numbers of the actors that ended; their reports are all in the pipe by then."""
        ended = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            running = self._running.pop(pid, None)
            killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            exit_status = 0 if killed_by else os.waitstatus_to_exitcode(status)
            self._event("reaped", child=pid, signal=killed_by, status=exit_status, is_actor=running is not None)
            if running is not None:
                ended.append(running.number)
        return ended

    def _forks_alive(self) -> list[int]:
        """Forked children of actors that are gone. What they and actors have started as programs is none of them."""
        mine = procfs.children(os.getpid())
        own_name = procfs.own_name()
        return [pid for pid, (name, _) in mine.items() if name == own_name and pid not in self._running]

    # What is seen.

    def _look(self) -> None:
        """The names, and what every actor maps, with a time before and after."""
        since = time.monotonic()
        prefix = f"vllm_ec_{self.options.prefix}"
        names = procfs.names(prefix)
        named_by = time.monotonic()
        maps = {pid: found for pid in list(self._running) if (found := procfs.mapped_regions(pid, prefix))}
        self._event("look", since=since, named_by=named_by, names=names, maps=maps)

    def _drain(self) -> None:
        while True:
            try:
                chunk = os.read(self._pipe, PIPE_BYTES)
            except BlockingIOError:
                return
            *lines, self._pending = (self._pending + chunk).split(b"\n")
            self._round.events += [json.loads(line) for line in lines]

    def _event(self, name: str, **more: Any) -> None:
        self._round.events.append({"t": time.monotonic(), "e": name, **more})

    def _find(self, kind: str, text: str) -> None:
        self._round.findings.append(judge.Finding(kind, text, time.monotonic()))
