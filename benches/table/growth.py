"""What happens to times when regions grow, when more processes join, when more regions are there."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from . import jobs
from .family import NotMeasured, Sample, run, run_together
from .figures import Contest, Growth, Point
from .jobs import MIB
from .measure import WARM_FACTOR, each_way
from .rows import Bench

SIZES_MIB = (64, 256, 1024, 4096, 8192)
JOINERS = (1, 2, 4, 8, 16, 32, 64)
REGIONS = (1, 10, 100, 1000)
ROUNDS = 3
JOINED_BYTES = 64 * MIB
CALLS = 30


def available_bytes(name: str) -> int:
    """A line of /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise NotMeasured(f"/proc/meminfo has no {name}")


def _size(bench: Bench, mib: int) -> Contest:
    size = mib * MIB

    def side(way: str) -> Sample:
        sample = run(jobs.create(way, bench.new_id(), size))
        return Sample(sample.seconds / (size / 2**30), facts=sample.facts)

    return bench.rounds.play(each_way(side), ROUNDS if mib < 4096 else ROUNDS - 1)


def _joiners(bench: Bench, count: int) -> Contest:
    def side(way: str) -> Sample:
        engine_id = bench.new_id()
        joiner = jobs.attach(way, engine_id, JOINED_BYTES, 1, blocks=False)
        # The function that lets them meet counts all: holder and joiners.
        _, *samples = run_together([jobs.hold(way, engine_id, JOINED_BYTES), *[joiner] * count])
        return Sample(statistics.median(sample.seconds for sample in samples))

    return bench.rounds.play(each_way(side), ROUNDS)


def _regions(bench: Bench, count: int) -> Contest:
    sides = each_way(lambda way: run(jobs.create_small(way, bench.new_id(), count, CALLS, bench.new_id)))
    return bench.rounds.play(sides, ROUNDS)


@dataclass(frozen=True)
class Plan:
    key: str
    what: str
    axis: str
    unit: str
    points: tuple[int, ...]
    measure: Callable[[Bench, int], Contest]


PLANS = (
    Plan("size", "create + populate", "region, MiB", "s/GiB", SIZES_MIB, _size),
    Plan("joiners", "join and let go, median of the joiners", "joiners at once", "s", JOINERS, _joiners),
    Plan("regions", "create and let go, 4 KiB", "regions present", "s", REGIONS, _regions),
)


def fitting(plan: Plan) -> Iterable[int]:
    """The points of a plan that this machine has room for: regions of at most half of the memory, and warm."""
    if plan.key != "size":
        return plan.points
    room = min(available_bytes("MemTotal") / 2, available_bytes("MemAvailable") * 0.9 / WARM_FACTOR)
    return [mib for mib in plan.points if mib * MIB <= room]


def measure(plan: Plan, bench: Bench) -> Growth:
    growth = Growth(plan.key, plan.what, plan.axis, plan.unit)
    bench.limits.drop()
    try:
        for at in fitting(plan):
            growth.points.append(Point(at, plan.measure(bench, at)))
    except Exception as error:  # as for a row
        growth.not_measured = str(error)
    return growth
