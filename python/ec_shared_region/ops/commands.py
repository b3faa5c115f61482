"""The operator's subcommands. Imports click only: the rest comes when one runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click

__all__ = ["list_", "reap", "show"]

LIST_EPILOG = """\b
Examples:
  ec-shared-region list
  ec-shared-region list --json | jq '.regions[] | select(.state == "orphan") | .path'

\b
States:
  live        processes hold it
  being_made  its creator is at work
  original    only processes of the original class hold it
  orphan      proven dead: the next constructor of its user removes it, and `reap` does
  foreign     no region of this user; nobody of theirs touches it
  damaged     it was shortened under those who hold it
  unclear     it cannot be judged, and is left alone

\b
Exit codes:
  0    listed, also where there is nothing
  2    the command line is wrong
  3    /dev/shm cannot be read, or somebody holds its lock; stderr says why
  130  stopped by Ctrl-C (128 + N for another signal N)
"""

SHOW_EPILOG = """\b
Examples:
  ec-shared-region show engine0_dp0
  ec-shared-region show engine0_dp0 --json | jq '.holders[].pid'

\b
Exit codes:
  0    it is there
  1    there is no such region, or it is damaged
  2    the command line is wrong
  3    /dev/shm cannot be read, or somebody holds its lock; stderr says why
  130  stopped by Ctrl-C (128 + N for another signal N)
"""

REAP_EPILOG = """\b
Examples:
  ec-shared-region reap --all --dry-run
  ec-shared-region reap --all
  ec-shared-region reap engine0_dp0 engine1_dp0

\b
Exit codes:
  0    every dead region that was meant is gone (in a dry run: would be), or was not there
  1    a region that was named is kept, or a dead one could not be removed; the reason is printed
  2    the command line is wrong
  3    /dev/shm cannot be read, or somebody holds its lock; stderr says why
  130  stopped by Ctrl-C (128 + N for another signal N)
"""

as_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of tables; `error` in it says what failed."
)


@click.command("list", epilog=LIST_EPILOG)
@as_json_option
@click.pass_context
def list_(context: click.Context, /, as_json: bool) -> None:
    """List every region in /dev/shm, dead or alive.

    For each: its geometry where a living process announces it, its size and what of it is resident (takes memory),
    its age, its owner, its state, and who holds it. Nothing is changed and no byte is read.
    """
    from . import regions, report

    with _failures(context, as_json):
        found = regions.list_regions()
    if as_json:
        click.echo(report.list_as_json(found))
    else:
        report.print_list(found)


@click.command(epilog=SHOW_EPILOG)
@click.argument("engine_id", metavar="ID")
@as_json_option
@click.pass_context
def show(context: click.Context, /, engine_id: str, as_json: bool) -> None:
    """Show one region: its file, its state and why, and every process that has it.

    ID is the engine id, the part of the file's name between `vllm_ec_` and `.mmap`.
    """
    from . import regions, report

    with _failures(context, as_json):
        found = regions.inspect(engine_id)
    if found is None:
        text = f"there is no region `{report.printable(engine_id)}` in /dev/shm"
        _fail(context, as_json, text, "`ec-shared-region list` shows those that are there", 1)
    if as_json:
        click.echo(report.region_as_json(found))
    else:
        report.print_region(found)
    context.exit(1 if found.state == "damaged" else 0)


@click.command(epilog=REAP_EPILOG)
@click.argument("engine_ids", metavar="[ID]...", nargs=-1)
@click.option("--all", "is_all", is_flag=True, help="Look at every region in /dev/shm.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and remove nothing.")
@as_json_option
@click.pass_context
def reap(context: click.Context, /, engine_ids: tuple[str, ...], is_all: bool, dry_run: bool, as_json: bool) -> None:
    """Remove regions that are proven dead, and say why each one goes or stays.

    What the next constructor does by itself, on demand: for a machine on which no engine starts again. It never
    removes what any process holds, whichever class it uses and whichever container it lives in, nothing of
    another user, and nothing that cannot be judged.
    """
    if is_all == bool(engine_ids):
        raise click.UsageError("name the regions by their ids, or give --all to look at every one", context)
    from . import regions, report

    with _failures(context, as_json):
        result = regions.reap(None if is_all else engine_ids, dry_run=dry_run)
    if as_json:
        click.echo(report.reap_as_json(result))
    else:
        report.print_reap(result)
    # Under --all it is no failure that somebody lives.
    kept = [decision for decision in result.decisions if not decision.is_removed and decision.state is not None]
    context.exit(1 if any(decision.state == "orphan" or not is_all for decision in kept) else 0)


@contextmanager
def _failures(context: click.Context, as_json: bool) -> Iterator[None]:
    """Turns the package's exceptions into a message and an exit code."""
    from ..errors import InvalidArgumentError, RegionError

    try:
        yield
    except RegionError as error:
        text = str(error).removesuffix(f"\nhint: {error.hint}")
        _fail(context, as_json, text, error.hint, 2 if isinstance(error, InvalidArgumentError) else 3)


def _fail(context: click.Context, as_json: bool, text: str, hint: str | None, exit_code: int) -> NoReturn:
    """The talk goes to stderr; who asked for an object gets one."""
    if as_json:
        import json

        click.echo(json.dumps({"error": {"text": text, "hint": hint}}, indent=2))
    click.echo(f"error: {text}", err=True)
    if hint is not None:
        click.echo(f"hint: {hint}", err=True)
    context.exit(exit_code)
