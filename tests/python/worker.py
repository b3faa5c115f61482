"""A child process that does what the test tells it, one snippet at a time.

Started by `procs.spawn` as a fresh interpreter (spawn, not fork). Commands come in and answers go out
on two pipes of their own, so stdin, stdout and stderr stay what a user's program would have. A snippet's
last expression is its answer. torch is not imported unless a snippet does it: that costs seconds.
"""

from __future__ import annotations

import ast
import ctypes
import json
import os
import signal
import sys
from typing import Any

import kernel


def execute(code: str, scope: dict[str, Any]) -> Any:
    tree = ast.parse(code)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "<snippet>", "exec"), scope)
        return None
    tree.body.pop()
    exec(compile(tree, "<snippet>", "exec"), scope)
    return eval(compile(ast.Expression(last.value), "<snippet>", "eval"), scope)


def plain(value: Any) -> Any:
    """What can cross the pipe as text; anything else (a tensor, an enum) answers None."""
    if type(value) in (list, tuple, set):
        return type(value)(plain(item) for item in value)
    if type(value) is dict:
        return {plain(key): plain(item) for key, item in value.items()}
    return value if type(value) in (int, float, bool, str, bytes) else None


def failure(error: BaseException) -> dict[str, Any]:
    filename = getattr(error, "filename", None)
    return {
        "classes": [kind.__name__ for kind in type(error).__mro__],
        "text": str(error),
        "errno": getattr(error, "errno", None),
        "filename": filename if filename is None else os.fspath(filename),
        "hint": getattr(error, "hint", None),
    }


def prepare(options: dict[str, Any], scope: dict[str, Any]) -> None:
    for pid, with_user in options["enter"]:
        kernel.enter_namespace(pid, with_user)
    if options["shm"] is not None:
        kernel.private_shm(**options["shm"])
    if options["region"] == "original":
        from oracle import ECSharedRegion
    elif options["region"] == "ours":
        from ec_shared_region import ECSharedRegion
    else:
        ECSharedRegion = None
    scope["Region"] = ECSharedRegion
    for name in options["imports"]:
        exec(f"import {name}", scope)  # before the change of uid: the interpreter may be root's alone
    if options["uid"] is not None:
        kernel.become(options["uid"])
    for rule in options["refuse"]:
        kernel.refuse(**rule)


def main() -> None:
    options = json.loads(sys.argv[1])
    # A test run that is killed must not leave children with regions behind.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    answers = os.fdopen(options["answers"], "wb", buffering=0)
    commands = os.fdopen(options["commands"], "rb", buffering=0)
    for descriptor in (options["answers"], options["commands"]):
        os.set_inheritable(descriptor, False)
    # Module state of a script, which may end without cleaning up.
    scope = sys.modules["__main__"].__dict__
    exec("import ctypes, errno, gc, mmap, os, signal, subprocess, sys, threading, time, kernel", scope)

    def answer(**message: Any) -> None:
        answers.write(repr(message).encode() + b"\n")

    try:
        prepare(options, scope)
    except kernel.NotPermitted as error:
        answer(refused=str(error))
        return
    except BaseException as error:
        answer(error=failure(error))
        raise
    answer(value=None)
    for line in commands:
        message = json.loads(line)
        scope.update(ast.literal_eval(message["names"]))
        if message["code"] is None:
            break
        try:
            value = execute(message["code"], scope)
        except Exception as error:
            answer(error=failure(error))
        except KeyboardInterrupt as error:
            answer(error=failure(error))
        else:
            answer(value=plain(value))
            del value


if __name__ == "__main__":
    main()
