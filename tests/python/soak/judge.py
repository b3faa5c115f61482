"""From everything that was reported and seen in a round to findings. Pure, so that it can be tested by itself.

A process is *surely* there from the end of its constructor to its last own report, the order of its death, or the
beginning of its cleanup; it is *perhaps* there from the beginning of its constructor until it was reaped. What must
never be is only found among those who are surely there; an answer like "another shape lives here" is only doubted
where nobody was perhaps there. So a report that comes late, or never, makes no finding and hides as little as possible.

What the original class does by its nature is left out, and nothing else (docs/protocol.md, Limits): it adopts a
dead file, and may get hold of it at the moment in which it is reclaimed; it waits for a file that its dead creator
never sized, and keeps it alive by that.
"""

from __future__ import annotations

import math
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from . import plan

Event = dict[str, Any]
LONGEST_WAIT_SECONDS = 1.0
SLOW_EXEC_SECONDS = 0.5
EXIT_STATUSES = (0, 7)  # 7: `os._exit` with regions open


@dataclass(frozen=True)
class Finding:
    kind: str
    text: str
    at: float


@dataclass
class Stay:
    """One constructor call and what came of it, or what a forked child inherited."""

    pid: int
    number: int
    id: str
    shape: tuple[int, int]
    is_original: bool
    mode: str
    called: float
    opened: float = math.inf
    inode: int = -1
    is_creator: bool = False
    is_inherited: bool = False
    closing: float = math.inf
    closed: float = math.inf
    refused: float = math.inf
    has_kept_view: bool = False
    surely_until: float = -math.inf
    perhaps_until: float = math.inf

    @property
    def surely_to(self) -> float:
        return min(self.surely_until, self.closing)

    def is_surely_there(self, since: float, until: float) -> bool:
        return self.opened <= since and until <= self.surely_to

    @property
    def looks_behind(self) -> bool:
        """Does its cleanup remove the file where nobody is left? A view that is kept is somebody."""
        return not (self.is_original or self.is_inherited or self.has_kept_view)

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
        """No later than its death, and no earlier than can be known."""
        if not self.signal:
            return self.reaped
        orders = [at for at, number in self.armed if number == self.signal and at >= self.last_report]
        orders += [at for number, at in self.ordered.items() if number == self.signal]
        return min([at for at in orders if at <= self.reaped], default=self.reaped)


def judge(events: list[Event], may_be_left: dict[str, int]) -> list[Finding]:
    """`may_be_left`: names and inodes that stood when everybody had ended."""
    return list(_Round(events).findings(may_be_left))


class _Round:
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
        self.first_opened = {inode: min(s.opened for s in stays) for inode, stays in self.by_inode.items()}

    def _process(self, pid: int) -> Process:
        return self.processes.setdefault(pid, Process(pid))

    def _read(self) -> None:
        for event in self.events:
            name, at = event["e"], event["t"]
            if name in ("reaped", "order", "forked"):
                process = self._process(event["child"])
                process.is_known = process.is_known or name == "forked"
                if name == "order":
                    process.ordered.setdefault(event["signal"], at)
                elif name == "reaped":
                    process.reaped, process.signal = at, event["signal"]
                    process.is_known = process.is_known or event.get("is_actor", False)
            if "n" not in event:
                continue
            process = self._process(event["p"])
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
                at,
            )
            process.stays[stay.number] = stay
            self.stays.append(stay)
        elif name == "open":
            stay = process.stays[event["h"]]
            stay.opened, stay.inode, stay.is_creator = at, event["ino"], event["creator"]
        elif name in ("closing", "closed", "refused"):
            setattr(process.stays[event["h"]], name, at)
            process.stays[event["h"]].has_kept_view = event.get("how") == "view"
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
        parent = self._process(event["parent"] if is_child else event["p"])
        child = self._process(event["p"] if is_child else event["child"])
        for number in event["holds"]:
            stay, of = child.stays.get(number), parent.stays[number]
            if stay is None:
                stay = Stay(child.pid, number, of.id, of.shape, of.is_original, of.mode, event["since"])
                stay.inode, stay.is_inherited = of.inode, True
                child.stays[number] = stay
                self.stays.append(stay)
            stay.opened = min(stay.opened, at)

    # What must never be.

    def findings(self, may_be_left: dict[str, int]) -> Iterator[Finding]:
        yield from self._reported()
        yield from self._deaths()
        yield from self._twins()
        yield from self._robbed()
        yield from self._seen()
        yield from self._lost_writes()
        yield from self._shapes_and_creators()
        yield from self._refusals()
        yield from self._waits()
        yield from self._left(may_be_left)

    def _reported(self) -> Iterator[Finding]:
        for event in self.events:
            if event["e"] == "wrong":
                yield Finding(event["what"], f"pid {event['p']}: {event['text']}", event["t"])
            elif event["e"] == "fault":
                yield Finding("exception", f"pid {event.get('p')}: {event['text']}", event["t"])
            elif event["e"] == "healed":
                if not event["creator"] or event["dirty"] or event["took"] > LONGEST_WAIT_SECONDS:
                    yield Finding("not healed", f"the constructor after everybody's death: {event}", event["t"])
            elif event["e"] == "closed" and event["standing"] == event["ino"]:
                stay = self._process(event["p"]).stays[event["h"]]
                if stay.is_creator:
                    yield Finding("name left", f"{stay.who} cleaned up and its name stands", event["t"])

    def _deaths(self) -> Iterator[Finding]:
        for process in self.processes.values():
            # A program that wrote to a starter that died; forked children and actors are known by their reports.
            is_orphan_of_a_pipe = process.signal == signal.SIGPIPE and not process.is_known
            if process.signal and not is_orphan_of_a_pipe:
                armed = [number for at, number in process.armed]
                if process.signal not in process.ordered and process.signal not in armed:
                    text = f"pid {process.pid} died of signal {process.signal}, which nobody had ordered"
                    yield Finding("signal death", text, process.reaped)
        for event in self.events:
            is_ours = event["e"] == "reaped" and self._process(event["child"]).is_known
            if is_ours and event["status"] not in EXIT_STATUSES:
                text = f"pid {event['child']} ended with status {event['status']}"
                yield Finding("exit status", text, event["t"])

    def _has_adopted(self, stay: Stay) -> bool:
        """An original that joined while nobody was surely in: the file may have been dead, and under reclamation."""
        return (
            stay.is_original
            and not stay.is_creator
            and not any(
                other.is_surely_there(stay.called, stay.opened)
                for other in self.by_inode[stay.inode]
                if other.pid != stay.pid
            )
        )

    def _twins(self) -> Iterator[Finding]:
        """Two who are surely there under one id, in different files, of which neither's name was given up in time."""
        for stays in self.by_id.values():
            ordered = sorted((s for s in stays if s.inode >= 0), key=lambda s: s.opened)
            reported = set()
            for index, one in enumerate(ordered):
                for other in ordered[index + 1 :]:
                    if other.opened > one.surely_to:
                        break
                    if one.inode == other.inode or other.surely_to < other.opened:
                        continue
                    if self.taken[one.inode] <= self.first_opened[other.inode]:
                        continue
                    if self.taken[other.inode] <= self.first_opened[one.inode]:
                        continue
                    pair = frozenset((one.inode, other.inode))
                    if pair in reported or self._has_adopted(one) or self._has_adopted(other):
                        continue
                    reported.add(pair)
                    yield Finding("twin", f"`{one.id}`: {one.who} and {other.who}", other.opened)

    def _robbed(self) -> Iterator[Finding]:
        """A file without a name under somebody alive, though its creator did not take it away."""
        for event in self.events:
            if event["e"] == "saw" and event["links"] == 0 and self.taken.get(event["ino"], math.inf) > event["t"]:
                stay = self._process(event["p"]).stays[event["h"]]
                if not self._has_adopted(stay):
                    yield Finding("robbed", f"`{stay.id}`: {stay.who} sees that its name is gone", event["t"])

    def _seen(self) -> Iterator[Finding]:
        """The referee's own look at names and mappings."""
        for event in self.events:
            if event["e"] != "look":
                continue
            for pid, mapped in event["maps"].items():
                for name, inode, is_deleted in mapped:
                    there = [
                        stay
                        for stay in self._process(int(pid)).stays.values()
                        if stay.inode == inode and stay.is_surely_there(event["since"], event["t"])
                    ]
                    if not there or self._has_adopted(there[0]) or self.taken[inode] <= event["t"]:
                        continue
                    if is_deleted:
                        yield Finding("robbed", f"{there[0].who} maps a file whose name is gone", event["t"])
                    elif event["names"].get(name) not in (inode, None):
                        text = f"{there[0].who}, and `{name}` stands for inode {event['names'][name]}"
                        yield Finding("twin", text, event["t"])

    def _lost_writes(self) -> Iterator[Finding]:
        """Whoever looks sees at least what was written before, by whomever: it is one memory."""
        known: dict[tuple[int, int], int] = {}
        # A look counts from its beginning.
        moments = [(e["since"] if e["e"] == "saw" else e["t"], e) for e in self.events if e["e"] in ("wrote", "saw")]
        for _, event in sorted(moments, key=lambda moment: moment[0]):
            if event["e"] == "wrote":
                known[event["ino"], event["n"]] = event["word"]
                continue
            for slot, value in enumerate(event["words"][1:]):
                written = known.get((event["ino"], slot))
                if written is not None and plan.is_behind(value, written):
                    text = (
                        f"inode {event['ino']}: pid {event['p']} reads 0x{value:08x} in the slot of actor {slot}, "
                        f"which had written 0x{written:08x}"
                    )
                    yield Finding("lost write", text, event["t"])

    def _shapes_and_creators(self) -> Iterator[Finding]:
        for inode, stays in self.by_inode.items():
            creators = [stay for stay in stays if stay.is_creator]
            if len(creators) > 1:
                text = f"inode {inode} has {len(creators)} creators: {'; '.join(stay.who for stay in creators)}"
                yield Finding("two creators", text, creators[1].opened)
            ours = sorted((stay for stay in stays if not stay.is_original), key=lambda stay: stay.opened)
            for index, one in enumerate(ours):
                for other in ours[index + 1 :]:
                    if other.opened > one.surely_to:
                        break
                    if other.surely_to >= other.opened and one.shape != other.shape:
                        text = f"{one.who} as {one.shape} and {other.who} as {other.shape}"
                        yield Finding("mixed shapes", text, other.opened)

    def _perhaps_there(self, id: str, since: float, until: float, except_: Stay) -> Iterator[Stay]:
        for stay in self.by_id[id]:
            if stay is not except_ and stay.called <= until and stay.perhaps_until >= since:
                yield stay

    def _refusals(self) -> Iterator[Finding]:
        """Had a constructor that raised reason to?"""
        for event in self.events:
            if event["e"] != "refused":
                continue
            stay = self._process(event["p"]).stays[event["h"]]
            if stay.is_original:
                continue
            error, at = event["error"], event["t"]
            others = list(self._perhaps_there(stay.id, stay.called, at, stay))
            if error == "GeometryMismatchError":
                doubt = all(other.shape == stay.shape for other in others)
            elif error == "RegionExistsError":
                doubt = stay.mode != "create" or not others
            else:
                doubt = stay.mode != "join" or self._was_joinable(stay, at)
            if doubt:
                yield Finding("refused", f"`{stay.id}`, {stay.mode}, pid {stay.pid}: {error}: {event['text']}", at)

    def _was_joinable(self, stay: Stay, until: float) -> bool:
        """Was one region surely there, with its name, all the time that a joiner waited in vain?"""
        return any(
            other.is_surely_there(stay.called, until)
            and other.shape == stay.shape
            and self.taken[other.inode] > until
            and not self._has_adopted(other)
            for other in self.by_id[stay.id]
            if other.inode >= 0 and not other.is_inherited
        )

    def _waits(self) -> Iterator[Finding]:
        for wait in waits_after_deaths(self):
            if wait.judged_seconds > LONGEST_WAIT_SECONDS:
                text = (
                    f"`{wait.stay.id}`: pid {wait.stay.pid} waited {wait.seconds:.3f} s after the death of pid "
                    f"{wait.dead_pid}, {wait.seconds - wait.judged_seconds:.3f} s of it stopped or without a processor"
                )
                yield Finding("wait", text, wait.stay.called)

    def _left(self, may_be_left: dict[str, int]) -> Iterator[Finding]:
        """A file is only left by the dead: not if a joiner of ours went out after the last death."""
        for name, inode in may_be_left.items():
            id = name.removeprefix("vllm_ec_").removesuffix(".mmap")
            stays = self.by_id.get(id, [])
            # Only a joiner of ours that goes out, with its mapping, looks whether it was the last.
            leavers = {id_of(s) for s in stays if s.closed < math.inf and not s.is_creator and s.looks_behind}
            deaths = [
                stay.perhaps_until
                for stay in stays
                if id_of(stay) not in leavers
                and stay.refused == math.inf
                and not (stay.is_creator and stay.closed < math.inf)
            ]
            last = max((stay.closing for stay in stays if id_of(stay) in leavers), default=-math.inf)
            if not deaths or last > max(deaths):
                yield Finding("name left", f"`{name}`, inode {inode}: nobody died after the last joiner left", last)


def id_of(stay: Stay) -> tuple[int, int]:
    return stay.pid, stay.number


@dataclass(frozen=True)
class Wait:
    stay: Stay
    dead_pid: int
    seconds: float
    judged_seconds: float


def waits_after_deaths(round_: _Round) -> Iterator[Wait]:
    """For every constructor of ours that had an answer: how long after the first death on its id it came."""
    stopped = list(_stops(round_.events))
    answers = {
        (event["p"], event["h"]): event for event in round_.events if event["e"] in ("open", "refused") and "h" in event
    }
    dead = [(process.died, process) for process in round_.processes.values() if process.reaped < math.inf]
    dead.sort(key=lambda one: one[0])
    for stay in round_.stays:
        if stay.is_original or stay.is_inherited or stay.mode == "join":
            continue
        answer = answers.get((stay.pid, stay.number))
        if answer is None:
            continue
        for died, process in dead:
            if died >= answer["t"]:
                break
            if died >= stay.called and any(
                one.id == stay.id and one.called <= died and one.perhaps_until >= died for one in process.stays.values()
            ):
                seconds = answer["t"] - died
                excuse = answer["delayed"] + _overlap(stopped, died, answer["t"])
                excuse += _behind_originals(round_.by_id[stay.id], died, answer["t"])
                yield Wait(stay, process.pid, seconds, seconds - excuse)
                break


def _stops(events: Iterable[Event]) -> Iterator[tuple[float, float]]:
    """Times in which some actor was stopped: it may have been the one that the others waited for."""
    began: dict[int, float] = {}
    for event in events:
        if event["e"] == "stop":
            began[event["child"]] = event["t"]
        elif event["e"] == "cont" and event["child"] in began:
            yield began.pop(event["child"]), event["t"]


def _behind_originals(stays: list[Stay], since: float, until: float) -> float:
    """Time in which an original was in its constructor, which may wait for a file that nobody will size."""
    spans = [(s.called, min(s.opened, s.refused, s.perhaps_until)) for s in stays if s.is_original]
    return _overlap([span for span in spans if span[1] - span[0] > 0.1], since, until)


def _overlap(spans: Iterable[tuple[float, float]], since: float, until: float) -> float:
    """Length of the union of spans within [since, until]."""
    total, reached = 0.0, since
    for begin, end in sorted(spans):
        begin, end = max(begin, reached), min(end, until)
        if end > begin:
            total, reached = total + end - begin, end
    return total


@dataclass
class Longest:
    """The longest times of a round, for the summary."""

    wait_after_death: float = 0.0
    judged_wait_after_death: float = 0.0
    constructor: float = 0.0
    waits_after_death: int = 0


def longest(events: list[Event]) -> Longest:
    round_ = _Round(events)
    result = Longest()
    for wait in waits_after_deaths(round_):
        result.waits_after_death += 1
        result.wait_after_death = max(result.wait_after_death, wait.seconds)
        result.judged_wait_after_death = max(result.judged_wait_after_death, wait.judged_seconds)
    for event in events:
        if event["e"] == "open":
            result.constructor = max(result.constructor, event["took"])
    return result
