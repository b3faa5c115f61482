"""`python -m table`: options, progress on stderr, the table on stdout, the verdict."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from . import draw, text
from .figures import OURS, Contest, Growth, Peers, Row, Run
from .stage import Order, Setting, Stage, Told

ROUNDS, QUICK_ROUNDS = 7, 2
SHM = Path("/dev/shm")
EXAMPLES = """
\b
Examples:
  make bench                                  criterion, all rows, peers, growth: some minutes
  make bench ARGS=--quick                     small regions, two rounds: less than a minute, and less to be trusted
  make bench ARGS="--rows P2,P8"              these rows alone
  make bench ARGS="--check"                   exit status 1 if a median ratio is under its floor
  make bench ARGS="--json t.json --png t.png" where figures and picture go
  make bench ARGS="--from t.json --check"     judge and draw figures of an earlier run
  make bench ARGS="--readme README.md --png docs/performance.png"    what this project's own page shows

\b
How it measures:
  A sample runs in a process that was forked for it, in a /dev/shm of the bench's own (a tmpfs in a mount namespace,
  where that is permitted), which is gone with the bench whatever ends it. A round takes a sample of each side, stock,
  ours and the machine's limit, in turn; a ratio is made of the two times of one round. Memory is touched and given
  back before each sample, in the page size that will be asked for, since a virtual machine pays for the first touch.
  A round in which something else used the machine is repeated, a few times in a row and in the whole run; then it
  counts, and the table says so. A quiet machine gives better figures than more rounds.
"""


class Progresses:
    """What is measured now, on stderr: a bar on a terminal, a line for each row elsewhere."""

    def __init__(self, count: int) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=count)
        self._name = ""

    def __enter__(self) -> Progresses:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, name: str) -> None:
        self._name = name
        if not self._console.is_terminal:
            self._console.print(f"==> bench: {name}", soft_wrap=True)
        self._bar.update(self._task, description=name)

    def round(self, told: Told) -> None:
        busy = f", again: {told.disturbance}" if told.disturbance else ""
        self._bar.update(self._task, description=f"{self._name}: round {told.number}{busy}")

    def end(self) -> None:
        self._bar.advance(self._task)


def machine() -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor,
        "memory_gib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30,
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "shmem_enabled": _setting("shmem_enabled"),
        "shm": "unknown",
    }


def _setting(name: str) -> str:
    """The value in brackets of a setting of transparent huge pages."""
    with contextlib.suppress(OSError):
        words = Path("/sys/kernel/mm/transparent_hugepage", name).read_text().split()
        return next((word.strip("[]") for word in words if word.startswith("[")), "unknown")
    return "unknown"


def sweep(prefix: str) -> None:
    """Removes what is left where /dev/shm is shared with others and a process was killed."""
    for path in SHM.iterdir() if SHM.is_dir() else ():
        if path.name.startswith((prefix, f"vllm_ec_{prefix}")):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


class Stages:
    """One measuring process for each kind of mount, started when it is first needed."""

    def __init__(self, prefix: str, quick: bool, rounds: int) -> None:
        self._prefix, self._quick, self._rounds = prefix, quick, rounds
        self._stages: dict[str, Stage] = {}

    def on(self, mount: str) -> Stage:
        if mount not in self._stages:
            self._stages[mount] = Stage(Setting(mount, self._prefix, self._quick, self._rounds))
        return self._stages[mount]

    def forget(self, mount: str) -> None:
        stage = self._stages.pop(mount, None)
        if stage is not None:
            stage.close()

    def close(self) -> None:
        for mount in list(self._stages):
            self.forget(mount)
        sweep(self._prefix)


@contextlib.contextmanager
def _closing(stages: Stages) -> Iterator[None]:
    try:
        yield
    finally:
        stages.close()


def measure(run: Run, wanted: set[str] | None, quick: bool, rounds: int, with_growth: bool, with_peers: bool) -> bool:
    """Fills `run`; False where Ctrl-C cut it short."""
    # Here: it imports numpy, which `--help` and `--from` need not.
    from . import growth, peers, rows

    scale = rows.Scale.of(quick)
    orders = [
        (Order("row", index), plan.name, plan.mount, plan.needs_torch)
        for index, plan in enumerate(rows.PLANS)
        if wanted is None or plan.key.lower() in wanted
    ]
    if with_growth:
        orders += [
            (Order("growth", index), f"growth: {each.axis}", "", False) for index, each in enumerate(growth.PLANS)
        ]
    if with_peers:
        orders += [(Order("peers", index), f"peers: {each.what}", "", True) for index, each in enumerate(peers.PLANS)]
    # A process that has torch forks more slowly: those that need it come last.
    orders.sort(key=lambda order: order[3])
    places: dict[str, list[tuple[int, Any]]] = {"row": [], "growth": [], "peers": []}
    stages = Stages(f"bench-{os.getpid():x}", quick, rounds)
    is_whole = True
    with _closing(stages), Progresses(len(orders)) as progress:
        try:
            for order, name, mount, _ in orders:
                progress.begin(name)
                result = _carry_out(order, mount, stages, progress, scale)
                places[order.kind].append((order.index, result))
                progress.end()
            shm = stages.on("").shm
        except KeyboardInterrupt:
            is_whole, shm = False, None
    run.machine["shm"] = shm or "unknown"
    # In the order of the plans.
    found = {
        kind: [result for _, result in sorted(results, key=lambda each: each[0])] for kind, results in places.items()
    }
    run.rows, run.growth, run.peers = found["row"], found["growth"], found["peers"]
    return is_whole


def _carry_out(order: Order, mount: str, stages: Stages, progress: Progresses, scale: Any) -> Any:
    from . import growth, peers, rows

    reason, failed = "", False
    try:
        stage = stages.on(mount)
        if stage.refusal is None:
            for answer in stage.do(order):
                if not isinstance(answer, Told):
                    return answer
                progress.round(answer)
        reason = stage.refusal or "no answer"
    except EOFError:
        reason, failed = "failed: the measuring process died", True
    stages.forget(mount)
    if order.kind == "growth":
        plan = growth.PLANS[order.index]
        return Growth(plan.key, plan.what, plan.axis, plan.unit, not_measured=reason)
    if order.kind == "peers":
        return Peers(peers.PLANS[order.index].what, None, Contest(absent={OURS: reason}))
    row: Row = rows.PLANS[order.index].row(scale)
    row.not_measured, row.failed = reason, failed
    return row


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def verdict(run: Run) -> int:
    """Says which rows are under their floors; the exit status."""
    for row in run.under_floor():
        ratio = text.times(row.ratio.median)
        print(f"under its floor: {row.name}: {ratio}, and the floor is {text.bound(row.floor)}", file=sys.stderr)
    for row in run.rows:
        if row.not_measured is not None:
            print(f"met no floor: {row.name}: {row.not_measured.splitlines()[0]}", file=sys.stderr)
    return 1 if run.under_floor() or run.failed() else 0


def _keys(_: click.Context, __: click.Parameter, value: str | None) -> set[str] | None:
    if value is None:
        return None
    from .rows import PLANS

    known = list(dict.fromkeys(plan.key for plan in PLANS))
    wanted = {word.strip().lower() for word in value.split(",") if word.strip()}
    unknown = wanted - {key.lower() for key in known}
    if unknown or not wanted:
        wrong = ", ".join(sorted(unknown)) or "none given"
        raise click.BadParameter(f"no such row: {wrong}; there are {', '.join(known)}")
    return wanted


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}, epilog=EXAMPLES)
@click.option("--quick", is_flag=True, help="Small regions, two rounds, no peers, no growth.")
@click.option("--rows", "wanted", callback=_keys, metavar="P2,P8,...", help="These rows alone, no peers, no growth.")
@click.option("--rounds", type=click.IntRange(1), help=f"Of each row. [default: {ROUNDS}; --quick: {QUICK_ROUNDS}]")
@click.option("--growth/--no-growth", "with_growth", default=None, help="Sizes, joiners and regions that grow.")
@click.option("--peers/--no-peers", "with_peers", default=None, help="Other packages at the same work.")
@click.option("--check", is_flag=True, help="Exit status 1 if a median ratio is under its floor. For a quiet machine.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), default=Path("target/bench/table.json"),
    show_default=True, help="Where the figures go.",
)  # fmt: skip
@click.option(
    "--png", "png_path", type=click.Path(dir_okay=False, path_type=Path), default=Path("target/bench/table.png"),
    show_default=True, help="Where the picture goes.",
)  # fmt: skip
@click.option(
    "--readme", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A document that takes the tables, between its marks.",
)  # fmt: skip
@click.option(
    "--from", "earlier", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Show the figures of an earlier run, and measure nothing.",
)  # fmt: skip
def main(
    quick: bool,
    wanted: set[str] | None,
    rounds: int | None,
    with_growth: bool | None,
    with_peers: bool | None,
    check: bool,
    json_path: Path,
    png_path: Path,
    readme: Path | None,
    earlier: Path | None,
) -> None:
    """How long each step of a region takes, beside the stock way (the pure-Python class), beside other packages, and
    beside what the machine can do at best. Progress goes to stderr, the table to stdout."""
    is_whole = True
    if earlier is not None:
        try:
            run = Run.from_data(json.loads(earlier.read_text()))
        except (ValueError, KeyError, TypeError) as error:
            raise click.ClickException(f"`{earlier}` holds no figures of this bench: {error}") from None
    else:
        rounds = rounds or (QUICK_ROUNDS if quick else ROUNDS)
        is_all = not quick and wanted is None
        run = Run(machine(), {"rounds": rounds, "quick": quick})
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)  # like Ctrl-C: nothing stays behind
        growth, peers = (is_all if each is None else each for each in (with_growth, with_peers))
        is_whole = measure(run, wanted, quick, rounds, growth, peers)
        if is_whole:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps(run.as_data(), indent=1) + "\n")
    if is_whole:
        png_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draw.draw(run, png_path)
        except ImportError as error:
            print(f"no picture: {error}", file=sys.stderr)
    print(text.of_run(run), end="")
    if is_whole and readme is not None:
        try:
            readme.write_text(text.into(readme.read_text(), text.of_run(run)))
        except ValueError as error:
            raise click.ClickException(f"`{readme}` takes no tables: {error}") from None
    if not is_whole:
        print("interrupted: these are the rows that were measured until then", file=sys.stderr)
        sys.exit(130)
    sys.exit(verdict(run) if check else bool(run.failed()))


if __name__ == "__main__":
    main(prog_name="python -m table")
