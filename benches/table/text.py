"""The figures as text: Markdown tables whose columns line up, so that they read as well in a terminal. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .figures import LIMIT, OURS, STOCK, Contest, Growth, Peers, Row, Run

GIB = 1 << 30
NONE = "-"


def duration(seconds: float) -> str:
    """Three digits with a unit: 3.21 s, 45.6 ms, 789 us."""
    if math.isnan(seconds):
        return NONE
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def _digits(value: float) -> str:
    """As many decimals as say something."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def times(value: float) -> str:
    return NONE if math.isnan(value) else f"{_digits(value)}x"


def bound(value: float | None) -> str:
    return NONE if value is None else f"{value:,g}x"


def pace(seconds: float, moved_bytes: int | None) -> str:
    """Time, and bytes by time where there are any."""
    if math.isnan(seconds) or moved_bytes is None:
        return duration(seconds)
    return f"{duration(seconds)}, {_digits(moved_bytes / seconds / GIB)} GiB/s"


def table(lines: Sequence[Sequence[str]], left: int) -> str:
    """The first line is the head; the first `left` columns are flush left."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]

    def shown(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (width + 1) + ("-" if column < left else ":") for column, width in enumerate(widths)]
    return "\n".join([shown(lines[0]), f"|{'|'.join(rule)}|", *[shown(line) for line in lines[1:]]])


def of_rows(rows: Sequence[Row]) -> str:
    lines = [["", "what", "stock", "ours", "ratio", "min - max", "floor", "expect", "of the limit"]]
    for row in rows:
        if row.not_measured is not None:
            cells = [row.what, NONE, "not measured", NONE, NONE]
            lines.append([row.key, *cells, bound(row.floor), row.expect, NONE])
            continue
        ratio, share = row.ratio, row.share_of_limit
        lines.append(
            [
                row.key,
                row.what,
                pace(row.contest.median(STOCK), row.moved_bytes),
                pace(row.contest.median(OURS), row.moved_bytes),
                times(ratio.median),
                f"{times(ratio.min)} - {times(ratio.max)}",
                bound(row.floor) + (", missed" if row.is_under_floor else ""),
                row.expect,
                NONE if math.isnan(share) else f"{share:.0%} of {row.limit_name}",
            ]
        )
    return table(lines, left=2)


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    # Of a traceback the last line says what it was.
    return lines[-1] if lines and lines[0].startswith("failed: Traceback") else (lines or [""])[0]


def of_notes(rows: Sequence[Row]) -> str:
    said = []
    for row in rows:
        absent = [] if row.not_measured is None else [f"not measured: {_first_line(row.not_measured)}"]
        if row.notes or absent:
            said.append(f"- {row.name}: {'; '.join(absent + row.notes)}")
    return "\n".join(said)


def of_peers(peers: Sequence[Peers]) -> str:
    names: list[str] = []
    for line in peers:
        names += [name for name in (*line.contest.seconds, *line.contest.absent) if name not in names]
    names = sorted(names, key=lambda name: [STOCK, OURS].index(name) if name in (STOCK, OURS) else 2)
    lines = [["what", *names]]
    for line in peers:
        lines.append([line.what, *[pace(line.contest.median(name), line.moved_bytes) for name in names]])
    reasons = {f"{name}: {reason}" for line in peers for name, reason in line.contest.absent.items()}
    return "\n".join([table(lines, left=1), *[f"- not measured: {reason}" for reason in sorted(reasons)]])


def of_growth(growth: Growth) -> str:
    lines = [[growth.axis, *[f"{point.at:,}" for point in growth.points], "last : first"]]
    for side in (STOCK, OURS):
        cells = [duration(point.contest.median(side)) for point in growth.points]
        lines.append([side, *cells, times(growth.growth(side))])
    shares = [point.contest.huge_share for point in growth.points]
    if any(share is not None for share in shares):
        lines.append(["in huge pages", *[NONE if share is None else f"{share:.0%}" for share in shares], NONE])
    title = f"{growth.what}{', time per GiB' if growth.unit == 's/GiB' else ''}"
    if growth.not_measured is not None:
        title += f"; not measured further: {_first_line(growth.not_measured)}"
    return f"{title}\n\n{table(lines, left=1)}"


def of_limits(rows: Sequence[Row]) -> str:
    """The limits as rates, one line for each kind."""
    best: dict[str, float] = {}
    for row in rows:
        limits = row.contest.seconds.get(LIMIT, [])
        if row.limit_name and row.moved_bytes and limits:
            best[row.limit_name] = max(best.get(row.limit_name, 0.0), row.moved_bytes / min(limits) / GIB)
    return ", ".join(f"{name} {_digits(rate)} GiB/s" for name, rate in best.items())


def disturbance(contests: Sequence[Contest]) -> str:
    repeated = sum(contest.repeated for contest in contests)
    disturbed = sum(contest.disturbed for contest in contests)
    whole = sum(max(map(len, contest.seconds.values()), default=0) for contest in contests)
    return (
        f"A busy neighbour: {repeated} rounds were repeated, and {disturbed} of the {whole} that count were disturbed"
    )


MARKS = ("<!-- from here: make bench -->", "<!-- to here -->")


def into(document: str, tables: str) -> str:
    """The document with the tables between its two marks."""
    before, begin, rest = document.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise ValueError(f"it has no `{MARKS[0]}` and `{MARKS[1]}`")
    return f"{before}{begin}\n\n{tables.strip()}\n\n{end}{after}"


def of_run(run: Run) -> str:
    machine, settings = run.machine, run.settings
    parts = []
    if run.rows:
        parts.append(
            f"Times are medians; ratio: how many times as fast as stock, from the two times of each of up to "
            f"{settings['rounds']} interleaved rounds. {machine['cores']} cores of {machine['processor']}, "
            f"{machine['memory_gib']:.0f} GiB, Linux {machine['kernel']}; /dev/shm: {machine['shm']}."
        )
        parts.append(of_rows(run.rows))
        if noted := of_notes(run.rows):
            parts.append(noted)
        if limits := of_limits(run.rows):
            parts.append(f"Best of the machine in this run: {limits}.")
    if run.peers:
        parts.append(f"Peers, in rounds of the same run\n\n{of_peers(run.peers)}")
    parts += [of_growth(growth) for growth in run.growth]
    contests = [row.contest for row in run.rows] + [line.contest for line in run.peers]
    contests += [point.contest for growth in run.growth for point in growth.points]
    parts.append(disturbance(contests) + ".")
    return "\n\n".join(parts) + "\n"
