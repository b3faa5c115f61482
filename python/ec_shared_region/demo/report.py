"""What the demo prints: tables or JSON on stdout, progress on stderr."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from .engine import EngineRecord
    from .messages import ProcessRecord
    from .supervisor import Outcome, Talk

__all__ = ["as_json", "error_as_json", "left", "print_tables", "progress", "verdict"]

_GIB = 1 << 30
_MIB = 1 << 20
# A table in a file or a pipe is not squeezed into the 80 columns that rich would assume.
_PIPE_COLUMNS = 120


def verdict(outcome: Outcome) -> str:
    """One line: what was shown, or what went wrong."""
    if outcome.problems:
        return f"FAILED: {'; '.join(outcome.problems)}"
    if outcome.error is not None:
        return f"FAILED: {outcome.error.text}"
    if outcome.interrupted_by is not None:
        return f"stopped by {signal.Signals(outcome.interrupted_by).name}"
    engine = outcome.engines[-1]
    loaded = sum(process.loaded_bytes for process in engine.processes)
    loaders = sum(process.loaded_bytes > 0 for process in engine.processes)
    text = (
        f"ok: {_photographs(len(outcome.plan.photographs))}, {_mib(loaded)} MiB loaded by {loaders} "
        f"{'worker' if loaders == 1 else 'workers'}: every byte is as the encoder made it"
    )
    if outcome.engines[0].killed is not None:
        text += "; the engine healed by itself"
    return text


def as_json(outcome: Outcome) -> str:
    """One object; sizes in bytes, times in seconds, rates in GiB (2**30 bytes) a second."""
    plan = asdict(outcome.plan)
    photographs = [
        {**photograph, "rows": known.rows}
        for photograph, known in zip(plan.pop("photographs"), outcome.plan.photographs, strict=True)
    ]
    data = {
        "ok": outcome.exit_code == 0,
        "verdict": verdict(outcome),
        "problems": outcome.problems,
        "error": None if outcome.error is None else {"text": outcome.error.text, "hint": outcome.error.hint},
        **plan,
        "region_bytes": outcome.plan.num_blocks * outcome.plan.block_size_bytes,
        "photographs": photographs,
        "engines": [_engine(engine) for engine in outcome.engines],
        "left": [asdict(file) for file in outcome.left],
        "removed": [asdict(file) for file in outcome.removed],
    }
    return json.dumps(data, indent=2)


def error_as_json(text: str, hint: str | None) -> str:
    """The object of a demo that did not begin: nothing is known but why."""
    error = {"text": text, "hint": hint}
    return json.dumps({"ok": False, "verdict": f"FAILED: {text}", "problems": [], "error": error, "left": []}, indent=2)


def _engine(engine: EngineRecord) -> dict[str, Any]:
    data = asdict(engine)
    for process, known in zip(data["processes"], engine.processes, strict=True):
        process["save_gib_per_second"] = _rate(known.saved_bytes, known.save_seconds)
        process["load_gib_per_second"] = _rate(known.loaded_bytes, known.load_seconds)
    return data


def print_tables(outcome: Outcome) -> None:
    """A table for each life of the engine, then the verdict and what is left."""
    from rich.console import Console

    console = Console(width=None if sys.stdout and sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)
    plan = outcome.plan
    rows = sum(photograph.rows for photograph in plan.photographs)
    console.print(
        f"{_photographs(len(plan.photographs))}, {rows:,} rows of {plan.block_size_bytes:,} bytes; "
        f"region `{plan.engine_id}`: {plan.num_blocks:,} blocks, "
        f"{_mib(plan.num_blocks * plan.block_size_bytes)} MiB",
        markup=False,
        soft_wrap=True,
    )
    for engine in outcome.engines:
        console.print()
        console.print(_table(engine))
        console.print(_summary(engine), markup=False, soft_wrap=True)
        if engine.killed is not None:
            console.print(f"killed by SIGKILL: {engine.killed}; then the others", markup=False, soft_wrap=True)
            for file in engine.left_behind:
                console.print(
                    f"left behind: {file.path}, {file.size_bytes:,} bytes, {file.nonzero_bytes:,} of them not zero",
                    markup=False,
                    soft_wrap=True,
                )
            if not engine.left_behind:
                console.print("left behind: nothing")
    console.print()
    style = "bold green" if outcome.exit_code == 0 else "bold red"
    console.print(verdict(outcome), style=style, markup=False, soft_wrap=True)
    console.print(left(outcome), markup=False, soft_wrap=True)


def left(outcome: Outcome) -> str:
    """One line: what is in /dev/shm at the end."""
    files = ", ".join(f"{file.path} ({file.size_bytes:,} bytes)" for file in outcome.left)
    text = f"left in /dev/shm: {files or 'nothing'}"
    for file in outcome.removed:
        text += f"; removed {file.path} ({file.size_bytes:,} bytes)"
    return text


def _table(engine: EngineRecord) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("pid", "role", "region"):
        table.add_column(heading, justify="right" if heading == "pid" else "left")
    for heading in ("open\nms", "saved\nMiB", "save\nGiB/s", "loaded\nMiB", "load\nGiB/s"):
        table.add_column(heading, justify="right")
    table.add_column("pinned", overflow="fold")
    for process in engine.processes:
        table.add_row(
            str(process.pid),
            process.role,
            "creator" if process.is_creator else "joiner",
            f"{process.open_seconds * 1e3:.1f}",
            *_copied(process.saved_bytes, process.save_seconds),
            *_copied(process.loaded_bytes, process.load_seconds),
            _pinned(process),
        )
    return table


def _copied(size_bytes: int, seconds: float) -> tuple[str, str]:
    rate = _rate(size_bytes, seconds)
    return ("-", "-") if rate is None else (_mib(size_bytes), f"{rate:.1f}")


def _pinned(process: ProcessRecord) -> str:
    return "yes" if process.is_pinned else f"no: {process.pin_note}"


def _summary(engine: EngineRecord) -> str:
    requests = "request" if engine.verified_requests == 1 else "requests"
    text = f"{engine.verified_requests} {requests} of a photograph verified"
    if engine.killed is not None:
        return text  # the scheduler did not live to tell the rest
    return (
        f"{text}, {engine.cache_hits} of them cache hits; {_photographs(engine.evicted_photographs)} evicted, "
        f"{engine.reused_blocks:,} blocks used again"
    )


def _photographs(number: int) -> str:
    return f"{number:,} {'photograph' if number == 1 else 'photographs'}"


def _rate(size_bytes: int, seconds: float) -> float | None:
    return size_bytes / _GIB / seconds if size_bytes and seconds > 0 else None


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.1f}"


class _Silent:
    def stage(self, text: str) -> None: ...

    def advance(self, done: int, total: int) -> None: ...


@contextmanager
def progress() -> Iterator[Talk]:
    """A progress line on stderr where that is a terminal, else nothing."""
    if not (sys.stderr and sys.stderr.isatty()):
        yield _Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )

    class Bar:
        def __init__(self) -> None:
            self._task = bar.add_task("", total=None, count="")

        def stage(self, text: str) -> None:
            bar.remove_task(self._task)
            self._task = bar.add_task(text, total=None, count="")

        def advance(self, done: int, total: int) -> None:
            bar.update(self._task, completed=done, total=total, count=f"{done}/{total}")

    with bar:
        yield Bar()
