"""The command line of the demo. Imports click only: the rest comes when the demo runs."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import click

__all__ = ["demo"]

EPILOG = """\b
Examples:
  ec-shared-region demo
  ec-shared-region demo --images ~/Pictures --workers 8
  ec-shared-region demo --kill creator
  ec-shared-region demo --json | jq '.engines[].processes[] | {role, open_seconds}'

\b
Exit codes:
  0    every byte is right and nothing is left
  1    a byte differs, a fresh region was not zeroed, or a file is left in /dev/shm
  2    the command line is wrong, or a photograph cannot be read
  3    a process failed, was killed or did not answer, or a package is missing
  130  stopped by Ctrl-C (128 + N for another signal N); nothing is left then either
"""


@click.command(epilog=EPILOG)
@click.option(
    "--images",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder of photographs. Without it, those that scikit-image ships.",
)
@click.option("--workers", type=click.IntRange(1, 64), default=4, show_default=True, help="Worker processes.")
@click.option(
    "--kill",
    type=click.Choice(["creator"]),
    help="Kill this process by SIGKILL half-way, then restart the engine under the same id.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of tables, also of what went wrong."
)
@click.option(
    "--hidden-size",
    type=click.IntRange(1, 1 << 16),
    default=3584,
    show_default=True,
    help="Length of an encoder output; a block is one of them in bfloat16.",
)
@click.option(
    "--max-patches",
    type=click.IntRange(1, 1 << 20),
    default=4096,
    show_default=True,
    help="Larger photographs are made smaller.",
)
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Passes over all photographs.")
@click.option(
    "--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, show_default=True, help="Of the encoder's weights."
)
@click.option("--engine-id", metavar="ID", help="Id of the region.  [default: a fresh one]")
@click.option(
    "--timeout",
    "timeout_seconds",
    type=click.FloatRange(0.1, 86400),
    default=120.0,
    show_default=True,
    help="Seconds that one answer of a process may take.",
)
@click.pass_context
def demo(context: click.Context, /, as_json: bool, **options: Any) -> None:
    """Run an engine in miniature on photographs and check every byte.

    One scheduler and --workers worker processes open the same region by its id, as the processes of an
    inference engine do. A patch embedding turns each photograph into encoder outputs, one row for each
    14 x 14 patch; the scheduler says which block holds which row, worker 0 saves the rows, and every other
    worker loads them and compares them, bit for bit, with the outputs that it computed itself. The region
    holds a third of all rows, so blocks are evicted and used again.

    Printed are, for each process: its role, how long it took to open the region, what it saved and loaded
    and how fast, and whether its memory is pinned for the GPU; then the verdict, and what is left in
    /dev/shm, which must be nothing.
    """
    from . import report
    from .messages import DemoError
    from .supervisor import Interrupted, Request, run

    try:
        with report.progress() as talk:
            outcome = run(Request(**options), talk)
    except DemoError as error:
        if as_json:
            click.echo(report.error_as_json(error.text, error.hint))
        click.echo(f"error: {error}", err=True)
        context.exit(error.exit_code)
    except Interrupted as interrupted:
        if as_json:
            click.echo(report.error_as_json(f"stopped by {interrupted}", None))
        click.echo(f"stopped by {interrupted}", err=True)
        context.exit(128 + interrupted.number)
    if outcome.interrupted_by is not None:
        if as_json:
            click.echo(report.as_json(outcome))
        signal_name = signal.Signals(outcome.interrupted_by).name
        click.echo(f"stopped by {signal_name}; {report.left(outcome)}", err=True)
        context.exit(outcome.exit_code)
    if as_json:
        click.echo(report.as_json(outcome))
    elif outcome.error is None:
        report.print_tables(outcome)
    if outcome.error is not None:
        click.echo(f"error: {outcome.error}", err=True)
        for problem in outcome.problems:
            click.echo(f"error: {problem}", err=True)
        click.echo(report.left(outcome), err=True)
    context.exit(outcome.exit_code)
