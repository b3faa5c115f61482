"""The supervisor's side of one engine: starts its processes, waits for them, takes them down."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from . import leftovers
from .leftovers import Leftover
from .messages import (
    Closed,
    DemoError,
    Failed,
    Finished,
    Opened,
    Order,
    Plan,
    ProcessRecord,
    Progress,
    Ready,
    Verified,
)

__all__ = ["Engine", "EngineRecord"]

# How long children may take to leave by themselves once they are told to; then they are made to.
_GRACE_SECONDS = 10.0
# How long a process that was killed may take to be gone.
_DEATH_SECONDS = 5.0
# Signals that a terminal or a service manager sends to every process of a group.
_GROUP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

Advance = Callable[[int, int], None]


@dataclass(slots=True)
class EngineRecord:
    """What one life of the engine came to."""

    processes: list[ProcessRecord] = field(default_factory=list)
    verified_requests: int = 0
    """Requests of a photograph that every loader has loaded and compared."""
    cache_hits: int = 0
    """How many of them were loaded from blocks that had been saved for an earlier request."""
    evicted_photographs: int = 0
    reused_blocks: int = 0
    """How often a block was given out that an earlier photograph had."""
    killed: str | None = None
    left_behind: list[Leftover] = field(default_factory=list)
    """Files in /dev/shm after this life, before anybody cleaned up after it."""


@dataclass(slots=True)
class _Member:
    process: SpawnProcess
    connection: Connection
    record: ProcessRecord

    def __str__(self) -> str:
        return f"{self.record.role} (pid {self.record.pid})"


class Engine:
    """One scheduler and its workers. Whoever makes one calls :meth:`stop`, whatever happens.

    Children leave when their pipe to the supervisor ends, so they also go when the supervisor is killed.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._context = multiprocessing.get_context("spawn")
        self._members: list[_Member] = []
        self._may_hold_region = False
        self.record = EngineRecord()

    def start(self) -> None:
        """Starts every process and waits until all have their imports and weights."""
        # Its first start would unblock the signals that `_spawn` blocks.
        resource_tracker.ensure_running()
        pipes = [self._context.Pipe() for _ in range(self._plan.workers)]
        try:
            for number, (_, end) in enumerate(pipes):
                self._spawn(f"worker {number}", "worker", (number,), (end,))
            self._spawn("scheduler", "scheduler", (), ([end for end, _ in pipes],))
        finally:
            # The children have their own: a pipe must end when the process at its other end does.
            for end in (end for pipe in pipes for end in pipe):
                end.close()
        self._gather(Ready, self._members)

    def open(self) -> None:
        """Lets the workers race for the region, then the scheduler join it, and checks that it is one region."""
        self._may_hold_region = True
        *workers, scheduler = self._members
        for members in (workers, [scheduler]):
            self._tell(members, Order.OPEN)
            self._gather(Opened, members)
            if members is workers and not any(member.record.is_creator for member in workers):
                # Nobody has written a byte yet, and nobody will.
                raise DemoError(
                    f"the region of `{self._plan.engine_id}` belongs to another engine: no worker created it",
                    hint="choose another --engine-id",
                )
        self.record.processes = [scheduler.record, *(member.record for member in workers)]

    def run(self, advance: Advance, *, until: int | None = None) -> None:
        """Lets the scheduler begin, and waits until it is through, or until ``until`` requests are verified."""
        scheduler = self._members[-1]
        self._tell([scheduler], Order.START)
        if until == 0:
            return

        def verified(message: Verified) -> bool:
            self.record.verified_requests = message.done
            advance(message.done, message.total)
            return until is not None and message.done >= until

        self._gather(Finished, [scheduler], verified)

    def close(self) -> None:
        """Has every process clean up and end by itself."""
        self._tell(self._members, Order.CLOSE)
        self._gather(Closed, self._members)
        deadline = time.monotonic() + self._plan.timeout_seconds
        for member in self._members:
            member.process.join(max(0.0, deadline - time.monotonic()))
            if member.process.exitcode != 0:
                raise DemoError(f"{member} closed its region, then {_ending(member.process)}")
            member.record.ended = "by itself"

    def kill_creator(self) -> None:
        """SIGKILL for the creator, then for the others, as an engine that lost a worker goes down: nobody cleans up."""
        creator = self._creator()
        self.record.killed = str(creator)
        os.kill(creator.record.pid, signal.SIGKILL)
        creator.process.join(_DEATH_SECONDS)
        self._put_down()
        for member in self._members:
            self._read_to_the_end(member)
            member.record.ended = _ending(member.process)
        self.record.left_behind = leftovers.of_engine(self._plan.engine_id)

    def stop(self) -> None:
        """Ends what still runs, in bounded time: first by a word, then by SIGKILL."""
        # The end of its pipe tells a child to clean up and go.
        for member in self._members:
            member.connection.close()
        # Without a region there is nothing to clean up, and an import of torch takes seconds to look at the pipe.
        deadline = time.monotonic() + (_GRACE_SECONDS if self._may_hold_region else 0.0)
        for member in self._members:
            member.process.join(max(0.0, deadline - time.monotonic()))
        self._put_down()
        for member in self._members:
            if member.process.exitcode is not None:  # else it cannot die yet: it is in an uninterruptible sleep
                member.process.close()
        self._members = []

    def _creator(self) -> _Member:
        return next(member for member in self._members if member.record.is_creator)

    def _spawn(self, role: str, module: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_child, args=(module, self._plan, *before, theirs, *after), name=role, daemon=True
        )
        # A child inherits the mask: these are for the supervisor alone, which then takes everybody down in order.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
        try:
            process.start()
            assert process.pid is not None
            self._members.append(_Member(process, ours, ProcessRecord(role, process.pid)))
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _put_down(self) -> None:
        deadline = time.monotonic() + _DEATH_SECONDS
        running = [member.process for member in self._members if member.process.exitcode is None]
        for process in running:
            process.kill()
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))

    def _tell(self, members: Iterable[_Member], order: Order) -> None:
        for member in members:
            try:
                member.connection.send(order)
            except OSError:
                raise self._death(member) from None

    def _gather(
        self, kind: type, members: Iterable[_Member], is_enough: Callable[[Verified], bool] = lambda _: False
    ) -> None:
        """Listens to everybody until each of ``members`` has sent a message of ``kind``."""
        pending = list(members)
        listening = {member.connection: member for member in self._members}
        # The scheduler waits for the workers as long, and knows better who does not answer.
        patience = self._plan.timeout_seconds + (5.0 if kind is Finished else 0.0)
        while pending:
            ready = wait(list(listening), patience)
            if not ready:
                raise DemoError(
                    f"no answer within {patience:g} s from {', '.join(map(str, pending))}: wanted {kind.__name__}",
                    hint="a stopped process, or a busy machine? --timeout gives more time",
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                member = listening[connection]
                try:
                    message = connection.recv()
                except (EOFError, ConnectionError):
                    if kind is Closed and member not in pending:
                        del listening[connection]  # it has closed its region and gone, as it was told
                        continue
                    raise self._death(member) from None
                if isinstance(message, Failed):
                    raise _failure(member, message)
                if isinstance(message, (Opened, Progress, Closed)):
                    self._note(member, message.record)
                elif isinstance(message, Finished):
                    self.record.cache_hits = message.cache_hits
                    self.record.evicted_photographs = message.evicted_photographs
                    self.record.reused_blocks = message.reused_blocks
                elif isinstance(message, Verified) and is_enough(message):
                    return
                if isinstance(message, kind):
                    pending.remove(member)

    def _note(self, member: _Member, record: ProcessRecord) -> None:
        """Brings a member's record up to date in place: the list of records that people see holds the same one."""
        for name in ProcessRecord.__slots__:
            setattr(member.record, name, getattr(record, name))

    def _read_to_the_end(self, member: _Member) -> Failed | None:
        """Reads what a process that is gone said before; its failure, if it told one."""
        try:
            while member.connection.poll():
                message = member.connection.recv()
                if isinstance(message, Failed):
                    return message
                if isinstance(message, (Opened, Progress, Closed)):
                    self._note(member, message.record)
        except (EOFError, OSError):
            pass
        return None

    def _death(self, member: _Member) -> DemoError:
        """The error for a process whose pipe has ended before its work was done."""
        failed = self._read_to_the_end(member)
        if failed is not None:
            return _failure(member, failed)
        member.process.join(_DEATH_SECONDS)
        hint = None
        if member.process.exitcode == -signal.SIGKILL:
            hint = "a person, or the kernel for lack of memory: `dmesg` tells"
        return DemoError(f"{member} {_ending(member.process)} before its work was done", hint=hint)


def _child(module: str, *arguments: Any) -> None:
    """First function of every child; only here does a worker import torch."""
    if module == "worker":
        from .worker import main as worker_main

        worker_main(*arguments)
    else:
        from .scheduler import main as scheduler_main

        scheduler_main(*arguments)


def _failure(member: _Member, message: Failed) -> DemoError:
    text = f"{member} failed: {message.text}"
    if message.traceback is not None:
        text = f"{text}\n{message.traceback.rstrip()}"
    return DemoError(text, hint=message.hint)


def _ending(process: SpawnProcess) -> str:
    code = process.exitcode
    if code is None:
        return "closed its pipe and does not end"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
