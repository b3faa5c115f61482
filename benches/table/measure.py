"""Interleaved rounds, warm memory, and a busy neighbour noticed."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .family import NotMeasured, Sample
from .figures import OURS, STOCK, Contest
from .limits import anonymous

# A virtual machine hands free memory back to its host, and the first touch after that costs a fault of the host's.
WARM_FACTOR = 1.25
# A round is disturbed where others took more than this part of all cores, or the host more than that, ...
FOREIGN_SHARE = 0.08
STOLEN_SHARE = 0.02
# ... or where a fixed piece of work took so many times as long as it did at best.
SLOWER = 1.25
# Ticks of /proc/stat are 10 ms: shares of less time than this say nothing.
SHORTEST_SHARE_SECONDS = 0.3
CALIBRATED_CORES = 4
QUIET_PAUSE_SECONDS = 0.5

Side = Callable[[], Sample]


def each_way(side: Callable[[str], Sample]) -> dict[str, Side]:
    """The stock way and ours as sides of a contest."""
    return {way: functools.partial(side, way) for way in (STOCK, OURS)}


def warm(size_bytes: int, huge: bool) -> None:
    """Touches and frees a quarter more than `size_bytes`, in the page size that will be asked for."""
    anonymous(int(size_bytes * WARM_FACTOR), huge).close()


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """This process and the threads that it starts run on one core meanwhile."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@dataclass
class _Ticks:
    """/proc/stat's first line, in seconds."""

    busy: float
    stolen: float

    @classmethod
    def now(cls) -> _Ticks:
        first = Path("/proc/stat").read_text().split("\n", 1)[0]
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in first.split()[1:9])
        second = os.sysconf("SC_CLK_TCK")
        return cls((user + nice + system + irq + softirq) / second, steal / second)


class Watch:
    """Tells whether something else used the machine since `begin`.

    Two witnesses: /proc/stat (what others ran and what the host took away) and a fixed piece of work, which is slower
    when a core is shared in a way that this machine cannot see.
    """

    def __init__(self, more_own_cpu: Callable[[], float] = lambda: 0.0) -> None:
        self._more_own_cpu = more_own_cpu
        self._cores = sorted(os.sched_getaffinity(0))
        self._best: dict[int, float] = {}
        for _ in range(5):
            self._slowest()

    def begin(self) -> None:
        self._slow_before = self._slowest()
        self._began, self._ticks, self._own = time.perf_counter(), _Ticks.now(), self._own_cpu()

    def disturbance(self) -> str | None:
        """What disturbed, in words; None where nothing did."""
        elapsed = time.perf_counter() - self._began
        ticks, own = _Ticks.now(), self._own_cpu() - self._own
        slow = max(self._slow_before, self._slowest())
        if elapsed >= SHORTEST_SHARE_SECONDS:
            whole = elapsed * (os.cpu_count() or 1)
            stolen = (ticks.stolen - self._ticks.stolen) / whole
            foreign = (ticks.busy - self._ticks.busy - own) / whole
            if stolen > STOLEN_SHARE:
                return f"the host took {stolen:.0%} of the cores"
            if foreign > FOREIGN_SHARE:
                return f"others used {foreign:.0%} of the cores"
        if slow > SLOWER:
            return f"a fixed piece of work took {slow:.1f} times as long as at best"
        return None

    def _own_cpu(self) -> float:
        # Every process of a sample has been waited for by now, and so has all that it started.
        kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        usages = [resource.getrusage(kind) for kind in kinds]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages) + self._more_own_cpu()

    def _slowest(self) -> float:
        """How many times its best time the fixed piece of work takes, on the core where it takes most."""
        mine = os.sched_getaffinity(0)
        factors = []
        for core in self._cores[:CALIBRATED_CORES]:
            os.sched_setaffinity(0, {core})
            began = time.perf_counter()
            sum(range(150_000))
            elapsed = time.perf_counter() - began
            best = self._best[core] = min(elapsed, self._best.get(core, elapsed))
            factors.append(elapsed / best)
        os.sched_setaffinity(0, mine)
        return max(factors)


@dataclass
class Rounds:
    """How many rounds, and how many more where a neighbour was busy."""

    count: int
    # In the whole run, and of that in one contest: where a neighbour is always busy, repeating helps nobody.
    repeats_left: int
    most_repeats: int
    watch: Watch
    # Called before each round with its number, counted from 1, and what disturbed the one before.
    tell: Callable[[int, str | None], None]

    def play(
        self, sides: Mapping[str, Side], rounds: int | None = None, once: tuple[str, ...] = (), rehearse: bool = False
    ) -> Contest:
        """Takes samples of all sides in turn, round by round, so that what else the machine does falls on all.

        A side that cannot be measured is left out with its reason; where it is ours or the stock way, NotMeasured goes
        on. Sides in `once` are sampled once, before the rounds. `rehearse` plays a round first that does not count.
        """
        contest = Contest(seconds={name: [] for name in sides})
        order = [name for name in sides if name not in once]
        for name in once:
            contest.seconds[name] = [sides[name]().seconds]
        if rehearse:
            for name in order:
                self._sample(name, sides, contest)
        wanted = min(self.count, rounds or self.count)
        disturbance = None
        played = 0
        while played < wanted:
            self.tell(played + 1, disturbance)
            if disturbance:
                time.sleep(QUIET_PAUSE_SECONDS)
            self.watch.begin()
            taken: dict[str, Sample] = {}
            for name in order:
                sample = None if name in contest.absent else self._sample(name, sides, contest)
                if sample is not None:
                    taken[name] = sample
            disturbance = self.watch.disturbance()
            if disturbance and self.repeats_left and contest.repeated < self.most_repeats:
                self.repeats_left -= 1
                contest.repeated += 1
            else:
                contest.disturbed += disturbance is not None
                played += 1
                for name, sample in taken.items():
                    contest.seconds[name].append(sample.seconds)
                    if sample.facts:
                        contest.facts[name] = sample.facts
            # Caches are warmer for whoever comes second: take turns.
            order = order[1:] + order[:1]
        for name in contest.absent:
            contest.seconds.pop(name, None)
        return contest

    def _sample(self, name: str, sides: Mapping[str, Side], contest: Contest) -> Sample | None:
        try:
            return sides[name]()
        except NotMeasured as reason:
            if name in (STOCK, OURS):
                raise
            contest.absent[name] = str(reason)
            return None
