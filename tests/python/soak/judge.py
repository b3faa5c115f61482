"""From everything that was reported and seen in a round to findings. Pure, so that it can be tested by itself.

What must never be is only found among those who are surely there (`record.py`); an answer like "another shape lives
here" is only doubted where nobody was perhaps there. So a report that comes late, or never, makes no finding, and hides
as little as possible.

What the original class does by its nature is left out, and nothing else (docs/protocol.md, Limits): it adopts a
dead file, and may get hold of it at the moment in which it is reclaimed; it waits for a file that its dead creator
never sized, and keeps it alive by that.
"""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from . import plan, waits
from .record import Event, Record, Stay

DIRECTORY_LOCKED = "another process holds the lock of the directory"
BEING_PREPARED = "being prepared"
EXIT_STATUSES = (0, 7)  # 7: `os._exit` with regions open


@dataclass(frozen=True)
class Finding:
    kind: str
    text: str
    at: float


def judge(events: list[Event], may_be_left: dict[str, int], excused: Counter[str] | None = None) -> list[Finding]:
    """`may_be_left`: names and inodes that stood when everybody had ended. `excused`: counts what was left out."""
    return list(_Judge(Record(events), Counter() if excused is None else excused).findings(may_be_left))


@dataclass
class _Judge:
    record: Record
    excused: Counter[str]

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
        for event in self.record.events:
            if event["e"] == "wrong":
                yield Finding(event["what"], f"pid {event['p']}: {event['text']}", event["t"])
            elif event["e"] == "fault":
                yield Finding("exception", f"pid {event.get('p')}: {event['text']}", event["t"])
            elif event["e"] == "healed":
                if not event["creator"] or event["dirty"] or event["waited"] > waits.LONGEST_SECONDS:
                    yield Finding("not healed", f"the constructor after everybody's death: {event}", event["t"])
            elif event["e"] == "closed" and event["standing"] == event["ino"]:
                stay = self.record.process(event["p"]).stays[event["h"]]
                if stay.is_creator:
                    yield Finding("name left", f"{stay.who} cleaned up and its name stands", event["t"])

    def _deaths(self) -> Iterator[Finding]:
        for process in self.record.processes.values():
            # A program that wrote to a starter that died; forked children and actors are known by their reports.
            is_orphan_of_a_pipe = process.signal == signal.SIGPIPE and not process.is_known
            if process.signal and not is_orphan_of_a_pipe:
                armed = [number for at, number in process.armed]
                if process.signal not in process.ordered and process.signal not in armed:
                    text = f"pid {process.pid} died of signal {process.signal}, which nobody had ordered"
                    yield Finding("signal death", text, process.reaped)
        for event in self.record.events:
            is_ours = event["e"] == "reaped" and self.record.process(event["child"]).is_known
            if is_ours and event["status"] not in EXIT_STATUSES:
                text = f"pid {event['child']} ended with status {event['status']}"
                yield Finding("exit status", text, event["t"])

    def _is_excused(self, kind: str, *stays: Stay) -> bool:
        is_excused = any(self.record.has_adopted(stay) for stay in stays)
        self.excused[kind] += is_excused
        return is_excused

    def _twins(self) -> Iterator[Finding]:
        """Two who are surely there under one id, in different files, of which neither's name was given up in time."""
        for stays in self.record.by_id.values():
            ordered = sorted((s for s in stays if s.inode >= 0), key=lambda s: s.opened)
            reported = set()
            for index, one in enumerate(ordered):
                for other in ordered[index + 1 :]:
                    if other.opened > one.surely_to:
                        break
                    if one.inode == other.inode or other.surely_to < other.opened:
                        continue
                    if self.record.taken[one.inode] <= self.record.first_opened[other.inode]:
                        continue
                    if self.record.taken[other.inode] <= self.record.first_opened[one.inode]:
                        continue
                    pair = frozenset((one.inode, other.inode))
                    if pair in reported:
                        continue
                    reported.add(pair)
                    if self._is_excused("twin", one, other):
                        continue
                    yield Finding("twin", f"`{one.id}`: {one.who} and {other.who}", other.opened)

    def _robbed(self) -> Iterator[Finding]:
        """A file without a name under somebody alive, though its creator did not take it away."""
        for event in self.record.events:
            is_gone = event.get("links") == 0 or event.get("name") in ("lost", "replaced")
            is_told = event["e"] in ("saw", "checked") and is_gone
            if is_told and self.record.taken.get(event["ino"], math.inf) > event["t"]:
                stay = self.record.process(event["p"]).stays[event["h"]]
                if not self._is_excused("robbed", stay):
                    yield Finding("robbed", f"`{stay.id}`: {stay.who} sees that its name is gone", event["t"])

    def _seen(self) -> Iterator[Finding]:
        """The referee's own look at names and mappings."""
        for event in self.record.events:
            if event["e"] != "look":
                continue
            for pid, mapped in event["maps"].items():
                for name, inode, is_deleted in mapped:
                    there = [
                        stay
                        for stay in self.record.process(int(pid)).stays.values()
                        if stay.inode == inode and stay.is_surely_there(event["since"], event["t"])
                    ]
                    stands = event["names"].get(name)
                    if not there or self.record.taken[inode] <= event["t"] or not (is_deleted or stands != inode):
                        continue
                    if self._is_excused("robbed", there[0]):
                        continue
                    if is_deleted:
                        yield Finding("robbed", f"{there[0].who} maps a file whose name is gone", event["t"])
                    elif stands is not None:
                        text = f"{there[0].who}, and `{name}` stands for inode {stands}"
                        yield Finding("twin", text, event["t"])

    def _lost_writes(self) -> Iterator[Finding]:
        """Whoever looks sees at least what was written before, by whomever: it is one memory."""
        known: dict[tuple[int, int], int] = {}
        # A look counts from its beginning.
        moments = [
            (e["since"] if e["e"] == "saw" else e["t"], e) for e in self.record.events if e["e"] in ("wrote", "saw")
        ]
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
        for inode, stays in self.record.by_inode.items():
            creators = [stay for stay in stays if stay.is_creator]
            if len(creators) > 1:
                text = f"inode {inode} has {len(creators)} creators: {'; '.join(stay.who for stay in creators)}"
                yield Finding("two creators", text, creators[1].opened)
            ours = sorted((stay for stay in stays if not stay.is_original), key=lambda stay: stay.opened)
            for index, one in enumerate(ours):
                for other in ours[index + 1 :]:
                    if other.opened > one.surely_to:
                        break
                    if other.surely_to < other.opened:
                        continue
                    if one.shape != other.shape:
                        text = f"{one.who} as {one.shape} and {other.who} as {other.shape}"
                        yield Finding("mixed shapes", text, other.opened)
                    if None not in (one.nonce, other.nonce) and one.nonce != other.nonce:
                        text = f"{one.who} has nonce {one.nonce}, {other.who} has {other.nonce}"
                        yield Finding("two nonces", text, other.opened)

    def _refusals(self) -> Iterator[Finding]:
        """Had a constructor that raised reason to?"""
        for event in self.record.events:
            if event["e"] != "refused":
                continue
            stay = self.record.process(event["p"]).stays[event["h"]]
            if stay.is_original:
                continue
            error, at = event["error"], event["t"]
            others = list(self.record.perhaps_there(stay.id, stay.called, at, stay))
            if error == "GeometryMismatchError":
                doubt = all(other.shape == stay.shape for other in others)
            elif error == "RegionExistsError":
                doubt = stay.mode != "create" or not others
            else:
                # Whoever holds the directory's lock may lose the processor in that moment, or die and be slow about it:
                # on a machine with far more to do than processors a timeout of milliseconds can end on it.
                is_locked_out = DIRECTORY_LOCKED in event["text"] and stay.timeout < waits.LONGEST_SECONDS
                # An original joins a region that its creator still prepares; one of ours waits for the pages.
                has_reason = is_locked_out or (BEING_PREPARED in event["text"] and self._was_prepared(stay, at))
                doubt = stay.mode != "join" or (self._was_joinable(stay, at) and not has_reason)
            if doubt:
                yield Finding("refused", f"`{stay.id}`, {stay.mode}, pid {stay.pid}: {error}: {event['text']}", at)

    def _was_prepared(self, stay: Stay, until: float) -> bool:
        """Was another one of ours, that was alive, in its constructor meanwhile?"""
        return any(
            other.called < until and min(other.opened, other.refused, other.perhaps_until) > stay.called
            for other in self.record.by_id[stay.id]
            if other is not stay and not (other.is_original or other.is_inherited)
        )

    def _was_joinable(self, stay: Stay, until: float) -> bool:
        """Was one region surely there, with its name, all the time that a joiner waited in vain?"""
        return any(
            other.is_surely_there(stay.called, until)
            and other.shape == stay.shape
            and self.record.taken[other.inode] > until
            and not self.record.has_adopted(other)
            for other in self.record.by_id[stay.id]
            if other.inode >= 0 and not other.is_inherited
        )

    def _waits(self) -> Iterator[Finding]:
        for wait in waits.after_deaths(self.record):
            if wait.judged_seconds > waits.LONGEST_SECONDS:
                text = f"`{wait.stay.id}`: pid {wait.stay.pid} waited after the death of pid {wait.dead_pid}: {wait}"
                yield Finding("wait", text, wait.stay.called)

    def _left(self, may_be_left: dict[str, int]) -> Iterator[Finding]:
        """A file is only left by the dead: not if a joiner of ours went out after the last death."""
        for name, inode in may_be_left.items():
            id = name.removeprefix("vllm_ec_").removesuffix(".mmap")
            stays = self.record.by_id.get(id, [])
            # A joiner of ours that goes out looks whether it was the last, when its last view is gone.
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
