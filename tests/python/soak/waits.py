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
    # What is no fault of the dead: the waiter was ready, and others ran; an actor was stopped by order; a creator
    # that lived prepared its file, or an original waited for a size.
    delayed: float
    stopped: float
    behind_the_living: float

    @property
    def judged_seconds(self) -> float:
        return max(0.0, self.seconds - self.delayed - self.stopped - self.behind_the_living)

    def __str__(self) -> str:
        parts = {
            "without a processor": self.delayed,
            "with an actor stopped": self.stopped,
            "behind a living creator": self.behind_the_living,
        }
        return f"{self.seconds * 1e3:.0f} ms: " + ", ".join(f"{part * 1e3:.0f} {name}" for name, part in parts.items())


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
                yield Wait(
                    stay,
                    process.pid,
                    seconds,
                    min(answer["delayed"], seconds),
                    _overlap(stopped, died, until),
                    _behind_the_living(record.by_id[stay.id], died, until),
                )
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
    wait_in_words: str = "none"
    judged_wait_after_death: float = 0.0
    constructor: float = 0.0
    waits_after_death: int = 0

    def add(self, other: Longest) -> None:
        if other.wait_after_death > self.wait_after_death:
            self.wait_after_death, self.wait_in_words = other.wait_after_death, other.wait_in_words
        self.judged_wait_after_death = max(self.judged_wait_after_death, other.judged_wait_after_death)
        self.constructor = max(self.constructor, other.constructor)
        self.waits_after_death += other.waits_after_death


def longest(events: list[Event]) -> Longest:
    record = Record(events)
    result = Longest()
    for wait in after_deaths(record):
        result.add(Longest(wait.seconds, str(wait), wait.judged_seconds, 0.0, 1))
    for event in events:
        if event["e"] == "open":
            result.constructor = max(result.constructor, event["took"])
    return result
