"""What an actor starts: forked children, which own nothing, and programs, which must inherit nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import traceback
from typing import TYPE_CHECKING

from . import plan

if TYPE_CHECKING:
    from .actors import Actor

FORKED = ("cleanup", "_exit", "exit", "linger", "again", "killed", "exec")
NO_CHILD_LIVES_LONGER = 0.12


class Children:
    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._forked: set[int] = set()
        self._programs: list[subprocess.Popen[bytes]] = []

    def reap(self) -> None:
        for pid in list(self._forked):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                # Told before the pid is free to be used again.
                status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                assert status is not None
                killed_by = status.si_status if status.si_code != os.CLD_EXITED else 0
                self._actor.tell("reaped", child=pid, signal=killed_by, status=0 if killed_by else status.si_status)
                os.waitpid(pid, 0)
                self._forked.discard(pid)
        self._programs = [program for program in self._programs if program.poll() is None]

    def wait(self) -> None:
        while self._forked or self._programs:
            self.reap()
            time.sleep(0.001)

    # Programs.

    def start(self) -> None:
        """`close_fds=False`: only close-on-exec keeps our descriptors out of it."""
        actor = self._actor
        actor.tell("starting")
        if actor.rng.random() < 0.5:
            # Outlives its starter, perhaps: a region must not live on in it.
            self._programs.append(subprocess.Popen(["sleep", "0.1"], close_fds=False))
            actor.tell("exec", how="lives on")
            return
        shows = subprocess.Popen(
            ["sh", "-c", "readlink /proc/self/fd/*; cat /proc/self/maps"], close_fds=False, stdout=subprocess.PIPE
        )
        text = shows.communicate()[0].decode()
        actor.tell("exec", how="looked at")
        if "/dev/shm" in text:
            lines = [line for line in text.splitlines() if "/dev/shm" in line]
            actor.tell("wrong", what="left in a process", text=f"a program inherited {lines}")

    # Forked children.

    def fork(self) -> None:
        actor = self._actor
        what = actor.rng.choice(FORKED if not actor.orders.is_original else ("_exit", "linger", "killed", "exec"))
        seed = actor.rng.random()
        parent, since = os.getpid(), time.monotonic()
        holds = [hold.number for hold in actor.holds]
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                actor.rng.seed(seed)
                actor.written.clear()  # the parent goes on writing
                actor.tell("child", parent=parent, since=since, what=what, holds=holds)
                self._be(what)
                status = 0
            except BaseException:
                with contextlib.suppress(BaseException):
                    actor.tell("fault", text=traceback.format_exc())
            finally:
                os._exit(status)
        actor.tell("forked", child=pid, since=since, what=what, holds=holds)
        self._forked.add(pid)
        if what == "killed":
            actor.pause(1e-4, 5e-3)
            actor.tell("order", child=pid, signal=int(signal.SIGKILL), by="parent")
            os.kill(pid, signal.SIGKILL)

    def _be(self, what: str) -> None:
        """The child's life. It inherits the mappings and owns none of them."""
        actor = self._actor
        runtime = actor.orders.runtime
        calls = runtime.fake_call_count() if runtime is not None else 0
        if what == "_exit":
            os._exit(0)
        if what in ("linger", "killed"):
            self._linger()
        if what == "exec":
            actor.tell("gone", why="exec")
            os.execvp("sleep", ["sleep", "0.05"])
        if what == "cleanup" or what == "again":
            place = actor.rng.choice(actor.holds).place
            for hold in actor.holds:
                hold.words = None
                actor.tell("closing", h=hold.number, ino=hold.inode)
                hold.region.cleanup()
                actor.tell("closed", h=hold.number, ino=hold.inode, standing=None, how="child")
            actor.holds.clear()
            if what == "again":
                # On its own account: an owner like any other.
                if runtime is not None:
                    runtime.fake_forget()
                actor.hold_count += 1000
                actor.open(place, place.right, {"mode": "create_or_join", "timeout": 15.0, "populate": "create"})
                for hold in list(actor.holds):
                    actor.look(hold)
                    actor.leave(hold)
        if what == "exit":
            from .actors import leave_interpreter

            for hold in actor.holds:
                hold.words = None
            actor.tell("gone", why="exit")
            leave_interpreter()
        if what in ("cleanup", "exit") and runtime is not None and runtime.fake_call_count() != calls:
            actor.tell("wrong", what="pinning", text="a forked child called the runtime")

    def _linger(self) -> None:
        actor = self._actor
        until = time.monotonic() + actor.rng.uniform(0, NO_CHILD_LIVES_LONGER)
        while time.monotonic() < until and not actor.is_told_to_stop:
            actor.pause(1e-3, 1e-2)
            for hold in actor.holds:
                assert hold.words is not None
                fault = plan.fault_in(hold.words, hold.inode)
                if fault is not None:
                    actor.tell("wrong", what="wrong byte", text=f"in a forked child: {fault}")
