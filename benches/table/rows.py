"""The rows P1 to P12: what is measured, the floor that it must reach, what prototypes of it reached."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import jobs
from .family import Job, NotInBuild, NotMeasured, Sample, Stopwatch, run, run_together
from .figures import LIMIT, OURS, STOCK, Contest, Row, quantile
from .jobs import MIB
from .limits import Limits
from .measure import Rounds, Side, each_way

# Our populate and our copies use no more threads than that.
MOST_THREADS = 4
ZEROING, COPYING = "zeroing", "contiguous copy"
JOINERS = 8


@dataclass(frozen=True)
class Scale:
    """Sizes and counts of a run."""

    size_bytes: int
    races: int
    calls: int
    is_quick: bool

    @classmethod
    def of(cls, quick: bool) -> Scale:
        return cls(128 * MIB, 4, 10, True) if quick else cls(512 * MIB, 13, 30, False)


@dataclass
class Bench:
    """What a measurement has at hand, in the process that measures."""

    scale: Scale
    rounds: Rounds
    limits: Limits
    ids: Iterator[str]
    mount: str

    def new_id(self) -> str:
        return next(self.ids)

    @property
    def threads(self) -> int:
        return min(len(os.sched_getaffinity(0)), MOST_THREADS)

    def alone(
        self,
        make: Callable[[str, str], Job],
        limit: Side | None = None,
        rounds: int | None = None,
        rehearse: bool = False,
    ) -> Contest:
        """Plays rounds of a job that needs one process; `make(way, engine_id)` gives it."""
        sides = each_way(lambda way: run(make(way, self.new_id())))
        if limit is not None:
            sides[LIMIT] = limit
        return self.rounds.play(sides, rounds, rehearse=rehearse)

    def beside_a_holder(self, hold: Callable[[str, str], Job], job: Callable[[str, str], Job]) -> Contest:
        """Plays rounds of a job that needs a process that has the region already."""

        def side(way: str) -> Sample:
            engine_id = self.new_id()
            holder, sample = run_together([hold(way, engine_id), job(way, engine_id)])
            return Sample(sample.seconds, facts={**holder.facts, **sample.facts})

        return self.rounds.play(each_way(side))


Measure = Callable[[Bench], Contest]


@dataclass(frozen=True)
class Plan:
    """A row before it is measured."""

    key: str
    variant: str
    what: str
    floor: float
    expect: str
    measure: Measure
    # Bytes that a sample goes through, where speed says more than time.
    moved_bytes: Callable[[Scale], int] | None = None
    limit_name: str | None = None
    # Options of a tmpfs; "" is an ordinary /dev/shm.
    mount: str = ""
    least_cores: int = 1
    needs_torch: bool = False

    @property
    def name(self) -> str:
        return f"{self.key} {self.variant}".strip()

    def row(self, scale: Scale) -> Row:
        moved = self.moved_bytes(scale) if self.moved_bytes else None
        what = self.what.format(size=f"{scale.size_bytes // MIB} MiB")
        return Row(self.key, self.variant, what, moved, self.floor, self.expect, self.limit_name)


def measure(plan: Plan, bench: Bench) -> Row:
    row = plan.row(bench.scale)
    try:
        if len(os.sched_getaffinity(0)) < plan.least_cores:
            raise NotMeasured("this machine has one core")
        row.contest = plan.measure(bench)
    except NotMeasured as reason:
        row.not_measured = str(reason)
    except Exception as error:  # one row that fails must not cost the others
        row.not_measured, row.failed = f"failed: {error}", True
    row.notes = notes(row.contest)
    return row


def notes(contest: Contest) -> list[str]:
    """What our side said of its last sample, in words."""
    facts = contest.facts.get(OURS, {})
    said = []
    if contest.huge_share is not None:
        said.append(
            f"{contest.huge_share:.0%} in huge pages (tier {facts.get('tier')}, threads {facts.get('threads')})"
        )
    if facts.get("fallback"):
        said.append(facts["fallback"])
    if facts.get("faults_after", 0) > facts.get("pages", float("inf")) // 100:
        said.append(f"{facts['faults_after']} pages were not mapped yet")
    if "cpu_seconds" in facts:
        said.append(f"CPU time {contest.facts[STOCK]['cpu_seconds'] / facts['cpu_seconds']:.1f}x less")
    if contest.disturbed:
        said.append(f"a neighbour was busy in {contest.disturbed} of the rounds")
    return said


def _create(single: bool, **options: str) -> Measure:
    def measure(bench: Bench) -> Contest:
        size = bench.scale.size_bytes
        threads = 1 if single else bench.threads

        def make(way: str, engine_id: str) -> Job:
            return jobs.create(way, engine_id, size, single=single, **(options if way == OURS else {}))

        return bench.alone(make, lambda: Sample(bench.limits.zero(size, threads)))

    return measure


def _stall(bench: Bench) -> Contest:
    return bench.alone(lambda way, engine_id: jobs.stall(way, engine_id, bench.scale.size_bytes))


def _join(huge: bool) -> Measure:
    def measure(bench: Bench) -> Contest:
        size = bench.scale.size_bytes
        base = {} if huge else {"huge_pages": "off"}

        def hold(way: str, engine_id: str) -> Job:
            return jobs.hold(way, engine_id, size, **(base if way == OURS else {}))

        def join(way: str, engine_id: str) -> Job:
            options = {"populate": "join", **base} if way == OURS else {}
            return jobs.join_and_write(way, engine_id, size, **options)

        contest = bench.beside_a_holder(hold, join)
        if huge:
            facts = contest.facts.get(OURS, {})
            if "huge_bytes" not in facts:
                raise NotInBuild
            if facts["huge_bytes"] * 2 < size:
                raise NotMeasured("the kernel gave no huge pages")
        return contest

    return measure


def _race(size_bytes: int) -> Measure:
    def measure(bench: Bench) -> Contest:
        def side(way: str) -> Sample:
            waits = []
            for _ in range(bench.scale.races):
                engine_id = bench.new_id()
                samples = run_together([jobs.race(way, engine_id, size_bytes)] * (JOINERS + 1))
                waits += [sample.seconds for sample in samples if not sample.facts["is_creator"]]
            return Sample(quantile(waits, 0.99), facts={"joiners": len(waits)})

        rounds = None if size_bytes <= MIB else 3
        return bench.rounds.play(each_way(side), rounds)

    return measure


def _start_together(bench: Bench) -> Contest:
    size = bench.scale.size_bytes

    def side(way: str) -> Sample:
        options = {"populate": "join"} if way == OURS else {}
        engine_id = bench.new_id()
        run(lambda _: _warmed(size, way))
        samples = run_together([jobs.race(way, engine_id, size, write=True, **options)] * JOINERS)
        seconds = max(sample.ended for sample in samples) - min(sample.began for sample in samples)
        return Sample(
            seconds,
            facts={
                "cpu_seconds": sum(sample.cpu_seconds for sample in samples),
                "faults_after": max(sample.facts["faults_after"] for sample in samples),
                "pages": size // os.sysconf("SC_PAGESIZE"),
            },
        )

    return bench.rounds.play(each_way(side))


def _warmed(size_bytes: int, way: str) -> Sample:
    with Stopwatch() as watch:
        jobs.warm_for(way, size_bytes)
    return watch.sample()


def _after_a_death(bench: Bench) -> Contest:
    if bench.scale.is_quick:
        raise NotMeasured("the stock way waits for 30 s, which a quick run leaves out")
    sides = each_way(lambda way: run(jobs.after_a_death(way, bench.new_id(), MIB)))
    return bench.rounds.play(sides, once=(STOCK,))


def _copy(block_bytes: int, batch: int, scatter: bool) -> Measure:
    def measure(bench: Bench) -> Contest:
        moved = block_bytes * batch
        calls = bench.scale.calls if moved < 16 * MIB else max(3, bench.scale.calls // 5)
        # The rate of a copy that is large enough for any number of threads.
        large = 256 * MIB
        threads = 1 if moved < 16 * MIB else bench.threads

        def limit() -> Sample:
            return Sample(bench.limits.copy(large, threads) * moved / large)

        def make(way: str, engine_id: str) -> Job:
            return jobs.copy_blocks(way, engine_id, 256 * MIB, block_bytes, batch, calls, scatter=scatter)

        return bench.alone(make, limit)

    return measure


def _cleanup(bench: Bench) -> Contest:
    return bench.alone(lambda way, engine_id: jobs.cleanup(way, engine_id, bench.scale.size_bytes))


def _attach(bench: Bench) -> Contest:
    return bench.beside_a_holder(
        lambda way, engine_id: jobs.hold(way, engine_id, MIB),
        lambda way, engine_id: jobs.attach(way, engine_id, MIB, 10 * bench.scale.calls),
    )


IMPORTS = {STOCK: "import torch, oracle", OURS: "import ec_shared_region"}


def _import(bench: Bench) -> Contest:
    return bench.alone(lambda way, _: jobs.import_time(IMPORTS[way]), rounds=5, rehearse=not bench.scale.is_quick)


def _size(scale: Scale) -> int:
    return scale.size_bytes


def _fixed(moved_bytes: int, _: Scale) -> int:
    return moved_bytes


def _copies() -> Iterator[Plan]:
    for key, block_bytes, batch, floor, scatter_expect, gather_expect in (
        ("P8", jobs.BLOCK_BYTES, 1000, 5.0, "9-15x", "7-9x"),
        ("P9", 64 << 10, 1000, 2.0, "3.5-3.9x", "3.5-3.9x"),
        ("P9", MIB, 64, 1.7, "2.3-2.5x", "2.3-2.5x"),
    ):
        size = f"{block_bytes // MIB} MiB" if block_bytes >= MIB else f"{block_bytes // 1024} KiB"
        for scatter, verb, expect in ((True, "scatter", scatter_expect), (False, "gather", gather_expect)):
            yield Plan(
                key,
                f"{verb} {size}",
                f"{verb} {batch:,} blocks of {size}",
                floor,
                expect,
                _copy(block_bytes, batch, scatter),
                functools.partial(_fixed, block_bytes * batch),
                COPYING,
                needs_torch=True,
            )


HUGE_MOUNT = "huge=advise"
PLANS = (
    Plan("P1", "", "longest stall of another thread, {size} made", 50, "450x", _stall),
    Plan("P2", "1 core", "create + populate {size}, 1 core", 2.5, "4.0-4.4x", _create(True), _size, ZEROING),
    Plan("P2", "all cores", "create + populate {size}", 3.5, "5.3-6.6x", _create(False), _size, ZEROING,
         least_cores=2),
    Plan("P3", "1 core", f"create + populate {{size}}, {HUGE_MOUNT}, 1 core", 4, "5.4x", _create(True), _size, ZEROING,
         mount=HUGE_MOUNT),
    Plan("P3", "all cores", f"create + populate {{size}}, {HUGE_MOUNT}", 5, "8.4x", _create(False), _size, ZEROING,
         mount=HUGE_MOUNT, least_cores=2),
    Plan("P4", "", "create + populate {size}, no huge pages", 1.3, "1.7-1.9x",
         _create(False, huge_pages="off"), _size, ZEROING),
    Plan("P5", "4 KiB pages", "joiner ready to write {size}, base pages", 3, "5x", _join(huge=False), _size),
    Plan("P5", "2 MiB pages", "joiner ready to write {size}, huge pages", 20, "330x", _join(huge=True), _size),
    Plan("P6", "1 MiB", "joiner's wait, p99, 8 race a creator, 1 MiB", 5, "17-26x", _race(MIB)),
    Plan("P6", "256 MiB", "joiner's wait, p99, 8 race a creator, 256 MiB", 5, "17-26x", _race(256 * MIB)),
    Plan("P6b", "", "8 start at once, until all have all of {size}", 4, "8-9x", _start_together),
    Plan("P7", "", "open where the dead left a short file", 1000, "6,000x", _after_a_death),
    *_copies(),
    Plan("P10", "", "unmap and last close of {size}", 15, "70x", _cleanup),
    Plan("P11", "", "attach, take `blocks`, clean up", 1.5, "2.8x", _attach, needs_torch=True),
    Plan("P12", "", "import", 10, "> 32x", _import),
)  # fmt: skip
