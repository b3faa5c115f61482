"""What was measured, and the arithmetic on it; to JSON and back. Pure."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA = 1
STOCK, OURS, LIMIT = "stock", "ours", "limit"
NOT_IN_BUILD = "not in this build"


@dataclass(frozen=True)
class Spread:
    """Least, middle and greatest of some values; NaN where there are none."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        if not ordered:
            return cls(math.nan, math.nan, math.nan)
        return cls(ordered[0], statistics.median(ordered), ordered[-1])


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass
class Contest:
    """Seconds of each side, one entry a round. Entries of one index belong to one round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    # Why a side has no entries.
    absent: dict[str, str] = field(default_factory=dict)
    # What a side said of its last sample: tier, threads, faults.
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Rounds that were thrown away because a neighbour was busy, and rounds that count although one was.
    repeated: int = 0
    disturbed: int = 0

    @property
    def huge_share(self) -> float | None:
        """Part of our last region that was in huge pages; None where that is not known."""
        facts = self.facts.get(OURS, {})
        whole = facts.get("huge_bytes", 0) + facts.get("base_bytes", 0)
        return facts["huge_bytes"] / whole if whole else None

    def median(self, side: str) -> float:
        return Spread.of(self.seconds.get(side, [])).median

    def ratio(self, side: str = OURS, to: str = STOCK) -> Spread:
        """How many times as fast as `to` the side is, from the two times of each round.

        A side that was measured once only (`to` of P7) is compared with every round of the other.
        """
        mine, theirs = self.seconds.get(side, []), self.seconds.get(to, [])
        if len(theirs) == 1:
            theirs = theirs * len(mine)
        return Spread.of(their / my for my, their in zip(mine, theirs, strict=False) if my > 0)


@dataclass
class Row:
    """One line of the table."""

    key: str
    variant: str
    what: str
    # Bytes that a sample goes through, where speed says more than time.
    moved_bytes: int | None
    floor: float | None
    expect: str
    limit_name: str | None = None
    contest: Contest = field(default_factory=Contest)
    notes: list[str] = field(default_factory=list)
    not_measured: str | None = None
    failed: bool = False

    @property
    def name(self) -> str:
        return f"{self.key} {self.variant}".strip()

    @property
    def ratio(self) -> Spread:
        return self.contest.ratio()

    @property
    def share_of_limit(self) -> float:
        """Part of the machine's limit that ours reached, from the two times of each round; NaN without a limit."""
        return Spread.of(1 / value if value else math.nan for value in self._slower_than_limit()).median

    def _slower_than_limit(self) -> list[float]:
        mine, limits = self.contest.seconds.get(OURS, []), self.contest.seconds.get(LIMIT, [])
        return [my / limit for my, limit in zip(mine, limits, strict=False) if limit > 0]

    @property
    def is_under_floor(self) -> bool:
        """A row that was not measured is under no floor, and met none."""
        return self.floor is not None and self.not_measured is None and not self.ratio.median >= self.floor


@dataclass
class Peers:
    """The same work by several packages."""

    what: str
    moved_bytes: int | None
    contest: Contest = field(default_factory=Contest)


@dataclass
class Point:
    at: int
    contest: Contest


@dataclass
class Growth:
    """Time against something that grows, in the unit that is named."""

    key: str
    what: str
    axis: str
    unit: str
    points: list[Point] = field(default_factory=list)
    not_measured: str | None = None

    def growth(self, side: str = OURS) -> float:
        """Median at the largest point divided by that at the smallest: 1 is flat, below 1 is falling."""
        known = [point for point in self.points if point.contest.seconds.get(side)]
        if len(known) < 2:
            return math.nan
        return known[-1].contest.median(side) / known[0].contest.median(side)


@dataclass
class Run:
    """All of one run."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    peers: list[Peers] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)

    def under_floor(self) -> list[Row]:
        return [row for row in self.rows if row.is_under_floor]

    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.failed]

    def as_data(self) -> dict[str, Any]:
        """For JSON: the samples, and what the table says of them."""
        data: dict[str, Any] = {"schema": SCHEMA, **dataclasses.asdict(self)}
        for row, entry in zip(self.rows, data["rows"], strict=True):
            entry["ratio"] = _without_nan(dataclasses.asdict(row.ratio))
            entry["share_of_limit"] = _plain(row.share_of_limit)
            entry["is_under_floor"] = row.is_under_floor
        for line, entry in zip(self.growth, data["growth"], strict=True):
            entry["last_over_first"] = {side: _plain(line.growth(side)) for side in (STOCK, OURS)}
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Run:
        """The inverse of `as_data`; what follows from the samples is computed anew."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')!r}, and this program reads {SCHEMA}")
        return cls(
            machine=dict(data["machine"]),
            settings=dict(data["settings"]),
            rows=[_made(Row, entry) for entry in data["rows"]],
            peers=[_made(Peers, entry) for entry in data["peers"]],
            growth=[_made(Growth, entry) for entry in data["growth"]],
        )


def _made(kind: type[Any], entry: Mapping[str, Any]) -> Any:
    names = {each.name for each in dataclasses.fields(kind)}
    values = {name: value for name, value in entry.items() if name in names}
    if "contest" in values:
        values["contest"] = Contest(**values["contest"])
    if "points" in values:
        values["points"] = [Point(point["at"], Contest(**point["contest"])) for point in values["points"]]
    return kind(**values)


def _plain(value: float) -> float | None:
    """JSON knows no NaN."""
    return None if math.isnan(value) else value


def _without_nan(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _plain(value) for name, value in values.items()}
