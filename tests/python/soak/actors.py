"""One process of the soak: it constructs, writes, reads, pins, leaves and dies, and reports all of it.

Every decision comes from a generator that is seeded with the run's seed, the round, the actor's number and how often it
was born in the round, so a seed gives the same decisions again; when they happen is up to the scheduler.
A report is written before what it announces and after what it tells, in one write of less than PIPE_BUF, so that
whatever kills the process, the referee has read either all of it or nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import mmap
import os
import random
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import ec_shared_region as ec
import oracle

from . import mutants, offspring, plan, procfs
from .deaths import Timer, die_with_the_referee

STOP_AT = 0  # in the flags that all processes share
# What a constructor may answer; whether it had reason to is for the referee. The original's own faults come on top.
OURS_MAY_RAISE = (ec.GeometryMismatchError, ec.RegionExistsError, ec.RegionTimeoutError)
ORIGINAL_MAY_RAISE = (FileNotFoundError, TimeoutError)
# Longer than any wait that is no finding.
PATIENCE_SECONDS = 15.0
# The original waits 30 s for a file that its dead creator never sized, and keeps it alive by waiting.
ORIGINAL_PATIENCE_SECONDS = 0.3
EXIT_STATUS = 7
FAULT_STATUS = 70


@dataclass(frozen=True)
class Orders:
    """What an actor is told at birth."""

    seed: str
    number: int
    places: list[plan.Place]
    is_original: bool
    starts_at: float
    first_place: int | None
    may_differ: bool  # regions of another total may be created; originals could not tell them from theirs
    runtime: Any
    mutant: str | None


@dataclass
class Hold:
    """A region that this process has open."""

    number: int
    place: plan.Place
    region: Any
    inode: int
    is_creator: bool
    words: plan.Words | None
    is_pinned: bool = False


class Region(ec.ECSharedRegion):
    """Keeps what the core says of the opening: a wait for others is one thing, slow memory another."""

    waited_seconds: float

    def _open(self, *arguments: Any) -> Any:
        report = super()._open(*arguments)
        self.waited_seconds = report.waited_seconds
        return report


class Reporter:
    """Writes what happens to the referee's pipe."""

    def __init__(self, pipe: int, number: int) -> None:
        self._pipe, self._number = pipe, number

    def __call__(self, event: str, **more: Any) -> None:
        if "text" in more:
            more["text"] = more["text"][-2000:]
        record = {"t": time.monotonic(), "e": event, "p": os.getpid(), "n": self._number, **more}
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        assert len(line) <= select.PIPE_BUF, line
        os.write(self._pipe, line)


class _Warnings(logging.Handler):
    """Keeps what the package warns of: nothing does, unless the runtime was told to refuse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@dataclass
class Actor:
    orders: Orders
    tell: Reporter
    flags: mmap.mmap
    rng: random.Random = field(init=False)
    holds: list[Hold] = field(default_factory=list)
    # What was last written into the own slot, by inode: nobody else may change it.
    written: dict[int, int] = field(default_factory=dict)
    hold_count: int = 0
    warnings: _Warnings = field(default_factory=_Warnings)
    children: offspring.Children = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.orders.seed)
        self.children = offspring.Children(self)
        logging.getLogger("ec_shared_region").addHandler(self.warnings)

    # The life of an actor.

    def live(self) -> None:
        while time.monotonic() < self.orders.starts_at:
            pass  # a sleep would spread a stampede over the scheduler's ticks
        if self.orders.first_place is not None and not self.is_told_to_stop:
            self.visit(self.orders.places[self.orders.first_place], death=(0.5, 2e-5, 6e-2))
        while not self.is_told_to_stop:
            self.children.reap()
            if not self.holds or (len(self.holds) < 2 and self.rng.random() < 0.12):
                places = self.orders.places
                self.visit(self.rng.choices(places, [place.weight for place in places])[0])
            else:
                self.act(self.rng.choice(self.holds))
            if self.orders.mutant is not None:
                mutants.act(self.orders.mutant, self)
        while self.holds:
            self.leave(self.holds[0])
        self.check_nothing_is_left()
        self.children.wait()

    @property
    def is_told_to_stop(self) -> bool:
        return self.flags[STOP_AT] != 0

    def act(self, hold: Hold) -> None:
        acts = {
            self.write: 30,
            self.look: 30,
            self.nap: 10,
            self.pin: 8,
            self.leave: 20,
            self.fork: 6,
            self.start: 3,
            self.check: 3,
        }
        act = self.rng.choices([*acts, self.quit], [*acts.values(), 1.5])[0]
        act(hold)
        if not hold.is_pinned and self.warnings.texts:
            self.tell("wrong", what="warning", text=self.warnings.texts.pop()[:1000])

    def pause(self, shortest: float, longest: float) -> None:
        """Spread over all magnitudes between both."""
        time.sleep(math.exp(self.rng.uniform(math.log(shortest), math.log(longest))))

    def nap(self, hold: Hold) -> None:
        self.pause(1e-4, 3e-2)

    # Regions.

    def visit(self, place: plan.Place, death: tuple[float, float, float] = (0.3, 3e-6, 2e-2)) -> None:
        """One constructor call; `death`: how likely, how soon, how late."""
        rng = self.rng
        mode, timeout, shape = "create_or_join", PATIENCE_SECONDS, place.right
        if not self.orders.is_original:
            mode = rng.choices(["create_or_join", "create", "join"], [80, 8, 12])[0]
            if mode == "join":
                timeout = rng.choice([0.0, 0.005, 0.05, 0.3])
            if rng.random() < 0.04:
                shape = rng.choice([place.same_total, place.other_total])
                if shape is place.other_total and not self.orders.may_differ:
                    mode, timeout = "join", 0.02
        options = {"mode": mode, "timeout": timeout, "populate": rng.choice(["create", "create", "join", "never"])}
        # Decided here, so that what follows does not depend on how this ends.
        deadly = self.arming(*death)
        self.open(place, shape, options, deadly)

    def open(self, place: plan.Place, shape: plan.Shape, options: dict[str, Any], deadly: Timer | None = None) -> None:
        self.hold_count += 1
        number = self.hold_count
        self.tell(
            "call",
            h=number,
            id=place.engine_id,
            shape=(shape.num_blocks, shape.block_size_bytes),
            original=self.orders.is_original,
            **options,
        )
        may_raise = ORIGINAL_MAY_RAISE if self.orders.is_original else OURS_MAY_RAISE
        delayed = procfs.run_delay_seconds()
        before = time.monotonic()
        try:
            region = self._construct(place, shape, options)
        except may_raise as error:
            took = time.monotonic() - before
            delayed = procfs.run_delay_seconds() - delayed
            self.tell(
                "refused",
                h=number,
                error=type(error).__name__,
                text=str(error)[:300],
                original=self.orders.is_original,
                took=took,
                delayed=delayed,
            )
            if self.orders.is_original and isinstance(error, TimeoutError):
                # It leaves its descriptor open, by which the unsized file would live on: an engine ends here.
                self.tell("quit", how="_exit", status=EXIT_STATUS)
                os._exit(EXIT_STATUS)
            self.disarm(deadly)
            return
        took = time.monotonic() - before
        delayed = procfs.run_delay_seconds() - delayed
        inode = os.fstat(region._fd).st_ino
        self.tell(
            "open",
            h=number,
            ino=inode,
            creator=region._is_creator,
            original=self.orders.is_original,
            took=took,
            nonce=None if self.orders.is_original else region.identity().nonce,
            waited=took if self.orders.is_original else region.waited_seconds,
            delayed=delayed,
        )
        self.disarm(deadly)
        source = region._mmap_obj if self.orders.is_original else memoryview(region).cast("B")
        words = np.frombuffer(source, dtype=np.uint32)
        hold = Hold(number, place, region, inode, region._is_creator, words)
        self.holds.append(hold)
        if hold.is_creator:
            # Joiners may be in already and have written their slots; nobody writes the creator's but the creator.
            row = plan.grid(words)[0]
            if row.any():
                self.tell(
                    "wrong", what="not zero", text=f"a creator sees 0x{int(row[row != 0][0]):08x} in its own slot"
                )
            row[: 1 << 16] = plan.word(plan.HEADER, inode, 0)
        self.look(hold)

    def _construct(self, place: plan.Place, shape: plan.Shape, options: dict[str, Any]) -> Any:
        if self.orders.is_original:
            return oracle.ECSharedRegion(place.engine_id, shape.num_blocks, shape.block_size_bytes)
        region = Region(place.engine_id, shape.num_blocks, shape.block_size_bytes, **options)
        # Part of the opening: a joiner comes in while the creator prepares, and may be the one who must finish it.
        before = time.monotonic()
        try:
            region.wait_until_ready()
        except BaseException:
            region.cleanup()
            raise
        region.waited_seconds += time.monotonic() - before
        return region

    def own_slot(self, hold: Hold) -> plan.Words:
        assert hold.words is not None
        slot: plan.Words = plan.grid(hold.words)[self.orders.number + 1]
        return slot

    def write(self, hold: Hold) -> None:
        slot = self.own_slot(hold)
        value = plan.word(self.orders.number, hold.inode, plan.sequence_of(int(slot[0])) + 1)
        slot[:] = value
        self.written[hold.inode] = value
        self.tell("wrote", ino=hold.inode, word=value)

    def look(self, hold: Hold) -> None:
        """Every byte of the own slot is as it was written, every other one can be explained."""
        assert hold.words is not None
        before = time.monotonic()
        seen = [int(value) for value in plan.grid(hold.words)[:, 0]]
        links = os.fstat(hold.region._fd).st_nlink
        self.tell("saw", h=hold.number, id=hold.place.engine_id, ino=hold.inode, links=links, words=seen, since=before)
        fault = plan.fault_in(hold.words, hold.inode)
        if fault is not None:
            self.tell("wrong", what="wrong byte", text=fault)
        own = self.written.get(hold.inode)
        if own is not None and not (self.own_slot(hold) == own).all():
            slot = self.own_slot(hold)
            self.tell("wrong", what="wrong byte", text=f"wrote 0x{own:08x}, reads 0x{int(slot[slot != own][0]):08x}")

    def check(self, hold: Hold) -> None:
        if self.orders.is_original:
            return
        result = hold.region.check()
        self.tell("checked", h=hold.number, ino=hold.inode, name=result.name)
        problems = [text for text in result.problems if result.name == "ours" or "`/dev/shm/" not in text]
        if problems or os.getpid() not in result.holders or bool(result) != (not result.problems):
            self.tell("wrong", what="check", text=repr(result)[:1500])

    def pin(self, hold: Hold) -> None:
        if self.orders.is_original or self.orders.runtime is None:
            return
        if hold.is_pinned:
            hold.region.unpin_memory()
            hold.is_pinned = False
        else:
            piece = self.rng.choice([None, 4096, 1 << 20])
            refuses = self.rng.random() < 0.2
            if refuses:
                self.orders.runtime.fake_fail_register(self.rng.choice([1, 2]), 801, 1)
            result = hold.region.pin_memory(max_piece_bytes=piece)
            self.orders.runtime.fake_fail_register(0, 0, 0)
            hold.is_pinned = bool(result)
            if (not result and not refuses) or (result and result.bytes != hold.region.nbytes):
                self.tell("wrong", what="pinning", text=repr(result)[:1000])
            if refuses:
                self.warnings.texts.clear()
        self.tell("pinned" if hold.is_pinned else "unpinned", h=hold.number)
        self.check_registrations()

    def check_registrations(self) -> None:
        """The runtime has exactly the ranges of the regions that are pinned now."""
        wanted = sum(hold.region.nbytes for hold in self.holds if hold.is_pinned)
        held = registered_bytes(self.orders.runtime)
        page = mmap.PAGESIZE
        if not wanted <= held <= wanted + page * sum(hold.is_pinned for hold in self.holds):
            self.tell("wrong", what="pinning", text=f"{held} bytes are registered, {wanted} are pinned")

    def leave(self, hold: Hold) -> None:
        rng = self.rng
        how = rng.choices(["cleanup", "context", "drop", "view"], [60, 15, 15, 10])[0]
        deadly = self.arming(0.2, 1e-6, 5e-4)
        self.holds.remove(hold)
        view = hold.words if how == "view" and not self.orders.is_original else None
        hold.words = None
        region, hold.region = hold.region, None
        self.tell("closing", h=hold.number, ino=hold.inode)
        if how == "drop" and not self.orders.is_original and not hold.is_pinned:
            del region
        elif how == "context" and not self.orders.is_original:
            with region:
                pass
        else:
            region.cleanup()
        self.disarm(deadly)
        name = f"vllm_ec_{hold.place.engine_id}.mmap"
        standing = procfs.names(name).get(name)
        hold.is_pinned = False
        if view is not None:
            # Views outlive the region.
            own = self.written.get(hold.inode)
            fault = plan.fault_in(view, hold.inode)
            if fault is not None or (own is not None and int(plan.grid(view)[self.orders.number + 1][0]) != own):
                self.tell("wrong", what="wrong byte", text=f"in a view after cleanup: {fault}")
            del view
        self.tell("closed", h=hold.number, ino=hold.inode, standing=standing, how=how)
        if self.orders.runtime is not None and not self.orders.is_original:
            self.check_registrations()
        if not self.holds and rng.random() < 0.3:
            self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        mapped, open_here = procfs.mapped_regions("self", "vllm_ec_"), procfs.region_descriptors("self")
        if mapped or open_here:
            self.tell("wrong", what="left in a process", text=f"mapped: {mapped}, open: {open_here}")

    # Others, and the end.

    def fork(self, hold: Hold) -> None:
        self.children.fork()

    def start(self, hold: Hold) -> None:
        self.children.start()

    def quit(self, hold: Hold) -> None:
        """Ends with regions open: at once, or as an interpreter that exits."""
        if self.rng.random() < 0.6:
            self.tell("quit", how="_exit", status=EXIT_STATUS)
            os._exit(EXIT_STATUS)
        for held in self.holds:
            held.words = None
            self.tell("closing", h=held.number, ino=held.inode)
        if self.orders.is_original:
            for held in self.holds:
                held.region.cleanup()
        leave_interpreter()
        self.tell("quit", how="exit", status=0)
        os._exit(0)

    def arming(self, likely: float, soonest: float, latest: float) -> Timer | None:
        """Perhaps orders the own death, within a time that fits the step that follows."""
        is_armed = self.rng.random() < likely
        seconds = math.exp(self.rng.uniform(math.log(soonest), math.log(latest)))
        number = signal.SIGTERM if self.rng.random() < 0.15 else signal.SIGKILL
        if not is_armed:
            return None
        timer = Timer(number)
        self.tell("armed", signal=int(number), seconds=seconds)
        timer.set(seconds)
        return timer

    def disarm(self, timer: Timer | None) -> None:
        # Some go on with death behind them: it comes in the middle of whatever is next.
        if timer is not None and self.rng.random() < 0.5:
            timer.set(0)


def leave_interpreter() -> None:
    """What the interpreter runs when a script ends, without giving this process back to the referee's code."""
    import atexit

    atexit._run_exitfuncs()


def registered_bytes(runtime: Any) -> int:
    """What the runtime double has registered in this process."""
    sizes: dict[int, int] = {}
    for index in range(runtime.fake_call_count()):
        call = runtime.fake_call(index)
        if call.kind == 1 and call.answer == 0:
            sizes[call.address] = call.size
        elif call.kind == 2 and call.answer == 0:
            sizes.pop(call.address, None)
    return sum(sizes.values())


def run(orders: Orders, pipe: int, flags: mmap.mmap) -> None:
    """The whole life of an actor, in a process that was forked for it. Does not return."""
    status = FAULT_STATUS
    tell = Reporter(pipe, orders.number)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the referee's
        die_with_the_referee()
        sys.modules["torch"] = None  # type: ignore[assignment]  # without torch: importing it takes seconds
        oracle._wait_for_file_size.__defaults__ = (ORIGINAL_PATIENCE_SECONDS,)
        tell("born", original=orders.is_original)
        Actor(orders, tell, flags).live()
        status = 0
    except BaseException:
        with contextlib.suppress(BaseException):
            tell("fault", text=traceback.format_exc())
    finally:
        os._exit(status)
