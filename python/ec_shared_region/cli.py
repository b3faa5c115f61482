"""The command ``ec-shared-region``.

Each subcommand lives in a module of its own that imports only click at its top; what it needs to do
its work (rich, Pillow, torch) is imported when it runs, so that ``--help`` comes at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import NoReturn

import click

from . import __version__
from ._early import take_ctrl_c
from .demo.command import demo
from .ops.commands import list_, reap, show

__all__ = ["cli", "main"]

EXIT_CODES = """\b
Exit codes, the same for every command:
  0    all good
  1    a check failed
  2    the command line is wrong
  3    the command could not do its work; stderr says why
  130  stopped by Ctrl-C (128 + N for another signal N; 141: whoever read the output closed it)
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
        take_ctrl_c()
        code = _run()
        if sys.stdout is not None:
            sys.stdout.flush()  # what fails here must not fail behind the back of the exit code
    except BrokenPipeError:
        _drop_output()
        code = 128 + signal.SIGPIPE  # whoever read the output has enough of it
    except OSError as error:
        _drop_output()
        with contextlib.suppress(OSError):
            click.echo(f"error: cannot write the output: {error.strerror or error}", err=True)
        code = 3
    sys.exit(code)


def _run() -> int:
    stdout, stderr = sys.stdout, sys.stderr
    try:
        # Not click's own way out, which makes 1 of Ctrl-C.
        code: int = cli.main(prog_name="ec-shared-region", standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except SystemExit:
        # click's own way out of a broken pipe: it has put something else in the place of both streams.
        if sys.stdout is stdout:
            raise
        sys.stdout, sys.stderr = stdout, stderr
        raise BrokenPipeError from None
    except click.ClickException as error:
        if "--json" in sys.argv[1:]:
            # Also who gave a wrong command line asked for one object.
            from .demo.report import error_as_json

            click.echo(error_as_json(error.format_message(), None))
        error.show()
        return error.exit_code
    return code


def _drop_output() -> None:
    """What is still buffered for stdout goes nowhere: the interpreter would try once more at its end, and complain."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
