"""Ctrl-C while the command is still being imported, which takes a tenth of a second: it ends and says nothing.

Of use to the command alone. In any other program nothing is changed.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["is_command", "take_ctrl_c"]

_is_left = False


def is_command(arguments: list[str]) -> bool:
    """Do the interpreter's own arguments start ``ec-shared-region``, as a script or by ``-m``?"""
    words = iter(arguments[1:])
    for word in words:
        if word == "-m":
            return next(words, "") == "ec_shared_region"
        if not word.startswith("-"):
            return os.path.basename(word) == "ec-shared-region"
        if word in {"-X", "-W"}:
            next(words, None)
    return False


def _leave_ctrl_c_to_the_system() -> None:
    global _is_left
    if is_command(sys.orig_argv) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _is_left = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def take_ctrl_c() -> None:
    """From here on Ctrl-C is a ``KeyboardInterrupt`` again."""
    global _is_left
    if _is_left:
        _is_left = False
        signal.signal(signal.SIGINT, signal.default_int_handler)


_leave_ctrl_c_to_the_system()
