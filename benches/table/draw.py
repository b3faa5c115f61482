"""The figures as a picture: ratios with their floors, and three plots of growth."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .figures import OURS, STOCK, Growth, Row, Run
from .text import times

INK, QUIET, ACCENT, MISSED = "#222222", "#8a8f98", "#2f6fb3", "#c2452d"


def draw(run: Run, path: Path) -> None:
    """Writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "font.size": 9,
            "text.color": INK,
            "axes.edgecolor": QUIET,
            "axes.labelcolor": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )
    measured = [row for row in run.rows if row.not_measured is None]
    grown = [growth for growth in run.growth if len(growth.points) > 1]
    if not measured and not grown:
        return
    heights = [0.9 + 0.27 * len(measured)] * bool(measured) + [2.6] * bool(grown)
    figure = pyplot.figure(figsize=(10, sum(heights)), layout="constrained")
    # Parts of their own: the long names of the rows must not push the plots below them aside.
    parts = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).flat)
    if measured:
        _ratios(parts[0].subplots(), measured)
    if grown:
        for axes, growth in zip(parts[-1].subplots(1, len(grown), squeeze=False).flat, grown, strict=True):
            _growth(axes, growth)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _ratios(axes: Any, rows: list[Row]) -> None:
    from matplotlib.ticker import FuncFormatter

    for place, row in enumerate(rows):
        ratio = row.ratio
        color = MISSED if row.is_under_floor else ACCENT
        axes.plot([ratio.min, ratio.max], [place, place], color=color, alpha=0.35, linewidth=5, solid_capstyle="round")
        axes.plot([ratio.median], [place], "o", color=color, markersize=6)
        if row.floor:
            axes.plot([row.floor] * 2, [place - 0.35, place + 0.35], color=INK, linewidth=1.4)
        share = row.share_of_limit
        beside = "" if math.isnan(share) else f"   {share:.0%} of {row.limit_name}"
        end = (max(ratio.max, row.floor or 0), place)
        axes.annotate(f"{times(ratio.median)}{beside}", end, (8, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [f"{row.what}   {row.key}" for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}x"))
    axes.axvline(1, color=QUIET, linewidth=0.8)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.8), high * 6)  # room for the figures beside the points
    axes.set_title("times as fast as the stock way: median, least to greatest; a stroke is the floor", loc="left")


def _growth(axes: Any, growth: Growth) -> None:
    for side, color in ((STOCK, QUIET), (OURS, ACCENT)):
        points = [point for point in growth.points if point.contest.seconds.get(side)]
        if points:
            axes.plot(
                [point.at for point in points],
                [point.contest.median(side) * 1e3 for point in points],
                "o-",
                color=color,
                label=side,
                markersize=4,
            )
    axes.set_xscale("log")
    axes.set_xticks([point.at for point in growth.points], [f"{point.at:,}" for point in growth.points])
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(growth.axis)
    axes.set_ylabel("ms per GiB" if growth.unit == "s/GiB" else "ms")
    axes.set_title(growth.what, loc="left", fontsize=9)
    axes.legend(frameon=False)
