"""How long constructors waited after a death. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .record import Event, Record, Stay

LONGEST_SECONDS = 1.0


@dataclass(frozen=True)
class Wait:
    stay: Stay
    dead_pid: int
    seconds: float
    judged_seconds: float


def after_deaths(record: Record) -> Iterator[Wait]:
    """For every constructor of ours that had an answer: how long after the first death on its id it came."""
    stopped = list(_stops(record.events))
    answers = {
        (event["p"], event["h"]): event for event in record.events if event["e"] in ("open", "refused") and "h" in event
    }
    dead = [(process.died, process) for process in record.processes.values() if process.reaped < math.inf]
    dead.sort(key=lambda one: one[0])
    for stay in record.stays:
        if stay.is_original or stay.is_inherited or stay.mode == "join":
            continue
        answer = answers.get((stay.pid, stay.number))
        if answer is None:
            continue
        for died, process in dead:
            if died >= answer["t"]:
                break
            if stay.called <= died < stay.prepares_from and any(
                one.id == stay.id and one.called <= died and one.perhaps_until >= died for one in process.stays.values()
            ):
                # A creator waits until it has made the file; what follows is the work of one who lives.
                until = stay.prepares_from if stay.is_creator else answer["t"]
                seconds = until - died
                excuse = answer["delayed"] + _overlap(stopped, died, until)
                excuse += _behind_the_living(record.by_id[stay.id], died, until)
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


def _behind_the_living(stays: list[Stay], since: float, until: float) -> float:
    """Time in which a creator that lived prepared its file, or in which an original waited for a size."""
    spans = [(s.prepares_from, s.opened) for s in stays if s.is_creator]
    originals = [(s.called, min(s.opened, s.refused, s.perhaps_until)) for s in stays if s.is_original]
    spans += [span for span in originals if span[1] - span[0] > 0.1]
    return _overlap(spans, since, until)


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
    record = Record(events)
    result = Longest()
    for wait in after_deaths(record):
        result.waits_after_death += 1
        result.wait_after_death = max(result.wait_after_death, wait.seconds)
        result.judged_wait_after_death = max(result.judged_wait_after_death, wait.judged_seconds)
    for event in events:
        if event["e"] == "open":
            result.constructor = max(result.constructor, event["took"])
    return result
