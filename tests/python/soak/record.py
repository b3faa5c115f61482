"""A round as it was reported: who was where, when. Pure.

A process is *surely* there from the end of its constructor to its last own report, the order of its death, or the
beginning of its cleanup; it is *perhaps* there from the beginning of its constructor until it was reaped.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]
SLOW_EXEC_SECONDS = 0.5


@dataclass
class Stay:
    """One constructor call and what came of it, or what a forked child inherited."""

    pid: int
    number: int
    id: str
    shape: tuple[int, int]
    is_original: bool
    mode: str
    timeout: float
    called: float
    opened: float = math.inf
    prepares_from: float = math.inf
    inode: int = -1
    nonce: int | None = None
    is_creator: bool = False
    is_inherited: bool = False
    closing: float = math.inf
    closed: float = math.inf
    refused: float = math.inf
    surely_until: float = -math.inf
    perhaps_until: float = math.inf

    @property
    def surely_to(self) -> float:
        return min(self.surely_until, self.closing)

    def is_surely_there(self, since: float, until: float) -> bool:
        return self.opened <= since and until <= self.surely_to

    @property
    def looks_behind(self) -> bool:
        """Does it remove the file, when its mapping is gone, where nobody is left?"""
        return not (self.is_original or self.is_inherited)

    @property
    def who(self) -> str:
        role = "inherited" if self.is_inherited else "creator" if self.is_creator else "joiner"
        kind = "original" if self.is_original else "ours"
        return f"pid {self.pid} ({kind}, {role}, inode {self.inode}, {self.opened:.6f} to {self.surely_to:.6f})"


@dataclass
class Process:
    pid: int
    last_report: float = -math.inf
    ordered: dict[int, float] = field(default_factory=dict)
    armed: list[tuple[float, int]] = field(default_factory=list)
    stays: dict[int, Stay] = field(default_factory=dict)
    gone: float = math.inf
    reaped: float = math.inf
    signal: int = 0
    is_known: bool = False
    is_starting: bool = False

    @property
    def died(self) -> float:
        """The earliest moment at which it can have died."""
        if not self.signal:
            return self.reaped
        orders = [at for at, number in self.armed if number == self.signal and at >= self.last_report]
        orders += [at for number, at in self.ordered.items() if number == self.signal]
        return min([at for at in orders if at <= self.reaped], default=self.reaped)


class Record:
    """The processes of a round and their stays."""

    def __init__(self, events: list[Event]) -> None:
        self.events = sorted(events, key=lambda event: event["t"])
        self.processes: dict[int, Process] = {}
        self.stays: list[Stay] = []
        self._read()
        self.by_id: dict[str, list[Stay]] = defaultdict(list)
        self.by_inode: dict[int, list[Stay]] = defaultdict(list)
        for stay in self.stays:
            self.by_id[stay.id].append(stay)
            if stay.inode >= 0:
                self.by_inode[stay.inode].append(stay)
        # From when a creator of its own will took the name of a file away.
        self.taken = {
            inode: min((s.closing for s in stays if s.is_creator), default=math.inf)
            for inode, stays in self.by_inode.items()
        }
        # When somebody began to look and then saw that the file had a name.
        self.last_named: dict[int, float] = {}
        for event in self.events:
            if event["e"] == "saw" and event["links"] > 0:
                self.last_named[event["ino"]] = max(event["since"], self.last_named.get(event["ino"], -math.inf))
        self.first_opened = {inode: min(s.opened for s in stays) for inode, stays in self.by_inode.items()}

    def process(self, pid: int) -> Process:
        return self.processes.setdefault(pid, Process(pid))

    def _read(self) -> None:
        for event in self.events:
            name, at = event["e"], event["t"]
            if name in ("reaped", "order", "forked"):
                process = self.process(event["child"])
                process.is_known = process.is_known or name == "forked"
                if name == "order":
                    process.ordered.setdefault(event["signal"], at)
                elif name == "reaped":
                    process.reaped, process.signal = at, event["signal"]
                    process.is_known = process.is_known or event.get("is_actor", False)
            if "n" not in event:
                continue
            process = self.process(event["p"])
            process.is_known = True
            if name == "spawn":
                continue
            process.last_report = max(process.last_report, at)
            self._read_report(process, name, at, event)
        for process in self.processes.values():
            orders = [at for number, at in process.ordered.items() if number == process.signal]
            # It lived until its death was ordered, unless a timer of its own came first.
            surely = max([process.last_report, *(orders if not process.armed else [])])
            for stay in process.stays.values():
                stay.surely_until = min(surely, process.gone)
                # Killed while it started a program: what was forked for that may hold on until it has called exec.
                ended = process.reaped + (SLOW_EXEC_SECONDS if process.is_starting else 0.0)
                stay.perhaps_until = min(ended, stay.closed, stay.refused)

    def _read_report(self, process: Process, name: str, at: float, event: Event) -> None:
        if name == "call":
            stay = Stay(
                process.pid,
                event["h"],
                event["id"],
                tuple(event["shape"]),
                event["original"],
                event["mode"],
                event["timeout"],
                at,
            )
            process.stays[stay.number] = stay
            self.stays.append(stay)
        elif name == "open":
            stay = process.stays[event["h"]]
            stay.opened, stay.inode, stay.is_creator = at, event["ino"], event["creator"]
            stay.nonce = event["nonce"]
            stay.prepares_from = stay.called + event["waited"]
        elif name in ("closing", "closed", "refused"):
            setattr(process.stays[event["h"]], name, at)
        elif name == "armed":
            process.armed.append((at + event["seconds"], event["signal"]))
        elif name == "gone":
            process.gone = at
        elif name in ("starting", "exec"):
            process.is_starting = name == "starting"
        elif name in ("child", "forked"):
            self._read_fork(event, at)

    def _read_fork(self, event: Event, at: float) -> None:
        """Parent and child both report it, in any order, and either may be killed before."""
        is_child = event["e"] == "child"
        parent = self.process(event["parent"] if is_child else event["p"])
        child = self.process(event["p"] if is_child else event["child"])
        for number in event["holds"]:
            stay, of = child.stays.get(number), parent.stays[number]
            if stay is None:
                stay = Stay(child.pid, number, of.id, of.shape, of.is_original, of.mode, of.timeout, event["since"])
                stay.inode, stay.is_inherited = of.inode, True
                child.stays[number] = stay
                self.stays.append(stay)
            stay.opened = min(stay.opened, at)

    def has_adopted(self, stay: Stay) -> bool:
        """An original that joined while nobody was surely in: the file may have been dead, and under reclamation.

        Not where anybody saw the name after that: then the original was alive in a file with a name.
        """
        return (
            stay.is_original
            and not stay.is_creator
            and self.last_named.get(stay.inode, -math.inf) < stay.opened
            and not any(
                other.is_surely_there(stay.called, stay.opened)
                for other in self.by_inode[stay.inode]
                if other.pid != stay.pid
            )
        )

    def perhaps_there(self, id: str, since: float, until: float, except_: Stay) -> Iterator[Stay]:
        for stay in self.by_id[id]:
            if stay is not except_ and stay.called <= until and stay.perhaps_until >= since:
                yield stay
