"""The command ``ec-shared-region``.

Each subcommand lives in a module of its own that imports only click at its top; what it needs to do
its work (rich, Pillow, torch) is imported when it runs, so that ``--help`` comes at once.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from . import __version__
from .demo.command import demo
from .ops.commands import list_, reap, show

__all__ = ["cli", "main"]

EXIT_CODES = """\b
Exit codes, the same for every command:
  0    all good
  1    a check failed
  2    the command line is wrong
  3    the command could not do its work; stderr says why
  130  stopped by Ctrl-C (128 + N for another signal N)
"""


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES,
)
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
def cli() -> None:
    """One region of /dev/shm, shared by every process of an inference engine.

    An engine's scheduler and its workers open the same region by its engine id and keep encoder
    outputs in its fixed-size blocks. This command shows that at work on this machine, and says which
    regions are there, who holds them, and which are dead.

    \b
    Examples:
      ec-shared-region demo
      ec-shared-region list
      ec-shared-region show engine0_dp0
      ec-shared-region reap --all --dry-run
    """


for command in (demo, list_, show, reap):
    cli.add_command(command)


def main() -> NoReturn:
    """Runs the command and exits with its code."""
    try:
        # Not click's own way out, which makes 1 of Ctrl-C.
        code = cli.main(prog_name="ec-shared-region", standalone_mode=False)
    except click.Abort:
        code = 130
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    sys.exit(code)
