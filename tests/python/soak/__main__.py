"""`python -m soak`: options, a /dev/shm of its own where that is permitted, rounds until it is enough, the end."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Before numpy: a library's threads would not survive the forks.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import click

import fake_cudart
import kernel

from . import mutants, plan
from .referee import Options, Referee
from .report import Report


class _Call(ctypes.Structure):
    """`struct call` of fake_cudart.c."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("address", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
        ("flags", ctypes.c_uint),
        ("device", ctypes.c_int),
        ("answer", ctypes.c_int),
    )


def load_runtime() -> Any:
    """The programmable CUDA runtime, loaded as a copy that pinning finds. None without a C compiler."""
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.CDLL(str(fake_cudart.build(Path(folder))), mode=ctypes.RTLD_GLOBAL)
    library.fake_call.restype = _Call
    library.fake_limit.argtypes = [ctypes.c_size_t, ctypes.c_int]
    return library


def own_shm(size: str) -> str:
    try:
        kernel.private_shm(f"size={size}")
    except kernel.NotPermitted as error:
        return f"the host's ({error})"
    return f"a tmpfs of its own, size={size}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--kills", type=click.IntRange(1), help="End after so many deaths by SIGKILL.")
@click.option("--seconds", type=click.FloatRange(0.1), help="End after so many seconds. [default: 60, without --kills]")
@click.option("--seed", type=int, help="Every decision follows from it; when it happens does not. [default: random]")
@click.option("--actors", type=click.IntRange(2, plan.MOST_ACTORS), default=10, show_default=True)
@click.option("--originals", is_flag=True, help="Every third actor runs the original class, in both roles.")
@click.option("--shm-size", default="50%", show_default=True, help="Of the private tmpfs; `off`: the host's /dev/shm.")
@click.option("--logs", type=click.Path(path_type=Path), help="Where the events of a round with a finding go.")
@click.option("--keep-going", is_flag=True, help="Go on after a finding.")
@click.option("--mutant", type=click.Choice(sorted(mutants.KINDS)), help="Actors do this wrong now and then.")
@click.option("--json", "as_json", is_flag=True, help="The summary as data.")
def main(
    kills: int | None,
    seconds: float | None,
    seed: int | None,
    actors: int,
    originals: bool,
    shm_size: str,
    logs: Path | None,
    keep_going: bool,
    mutant: str | None,
    as_json: bool,
) -> None:
    """Many processes live and die over few regions, and a referee proves from outside that nobody was harmed.

    The exit status is 1 if there is a finding. A seed replays the decisions of referee and actors (what, in which
    order, how long), not the scheduling between processes: a finding may take several runs to come again.
    """
    if seed is None:
        seed = random.SystemRandom().randrange(1 << 32)
    shm = "the host's" if shm_size == "off" else own_shm(shm_size)
    prefix = f"soak-{os.getpid():x}"
    options = Options(seed, actors, prefix, not shm.startswith("the host's"), originals, mutant, load_runtime())
    report = Report(options, shm)
    logs = logs or Path(tempfile.gettempdir()) / f"{prefix}-findings"
    click.echo(f"==> soak: seed {seed}, {actors} actors, /dev/shm: {shm}", err=True)
    referee = Referee(options)
    limit = time.monotonic() + (seconds or (float("inf") if kills else 60.0))
    try:
        while time.monotonic() < limit and (kills is None or report.kills < kills):
            report.add(referee.play(report.rounds + 1, report.progress), logs)
            if report.findings and not keep_going:
                break
    except KeyboardInterrupt:
        click.echo("\n==> soak: interrupted; what was judged until then:", err=True)
    report.progress(is_last=True)
    click.echo(json.dumps(report.as_data(), indent=2) if as_json else report.as_text())
    sys.exit(1 if report.findings else 0)


if __name__ == "__main__":
    main(prog_name="python -m soak")
