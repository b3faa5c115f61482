"""Counts over all rounds, progress, the summary, and what a finding needs to be looked into."""

from __future__ import annotations

import datetime
import json
import os
import platform
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import judge, waits
from .referee import Options, Round

PROGRESS_EVERY_SECONDS = {True: 0.5, False: 30.0}  # on a terminal, and elsewhere


@dataclass
class Report:
    options: Options
    shm: str
    began: float = field(default_factory=time.monotonic)
    rounds: int = 0
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    longest: waits.Longest = field(default_factory=waits.Longest)
    findings: list[dict[str, Any]] = field(default_factory=list)
    _next_line: float = field(default_factory=lambda: time.monotonic() + 1.0)

    def count(self, group: str, name: str, by: int = 1) -> None:
        self.counts.setdefault(group, Counter())[name] += by

    @property
    def kills(self) -> int:
        """Deaths by SIGKILL: of actors, by the referee and by timers of their own, and of forked children."""
        return sum(number for name, number in self.counts.get("deaths", {}).items() if name.startswith("SIGKILL"))

    def add(self, played: Round, logs: Path) -> None:
        self.rounds += 1
        self.count("rounds", f"{played.kind}, {played.ending}")
        events = sorted(played.events, key=lambda event: event["t"])
        last_order: dict[int, str] = {}
        last_report: dict[int, str] = {}
        for event in events:
            self._count_event(event, last_order)
            if event["e"] == "reaped" and event["signal"]:
                where = {"call": "in a constructor", "closing": "in a cleanup", "starting": "starting a program"}
                self.count("where they died", where.get(last_report.get(event["child"], ""), "elsewhere"))
            elif "n" in event:
                last_report[event["p"]] = event["e"]
        for kind, number in played.excused.items():
            self.count("left out as the original's doing", kind, number)
        self.longest.add(waits.longest(played.events))
        if played.findings:
            log = logs / f"round-{played.number}.jsonl"
            logs.mkdir(parents=True, exist_ok=True)
            log.write_text("".join(json.dumps(event) + "\n" for event in events))
            for finding in played.findings:
                self.findings.append(
                    {
                        "round": played.number,
                        "kind": finding.kind,
                        "text": finding.text,
                        "at": finding.at,
                        "log": str(log),
                    }
                )

    def _count_event(self, event: dict[str, Any], last_order: dict[int, str]) -> None:
        name = event["e"]
        if name == "open":
            kind = "original" if event["original"] else "ours"
            self.count("constructions", f"{kind}, {'creator' if event['creator'] else 'joiner'}")
        elif name == "refused":
            self.count("refusals", f"{'original' if event['original'] else 'ours'}, {event['error']}")
            if judge.DIRECTORY_LOCKED in event["text"]:
                self.count("refusals", "of these, for the lock of the directory")
        elif name in ("wrote", "saw", "pinned", "exec", "look", "checked"):
            self.count("acts", name)
        elif name == "forked":
            self.count("forks", event["what"])
        elif name == "armed":
            last_order.setdefault(event["p"], "by a timer in the middle of a step")
        elif name == "order":
            last_order[event["child"]] = f"by the {event['by']}"
        elif name == "stop":
            self.count("acts", "stopped and continued")
        elif name == "closed":
            self.count("acts", "cleaned up")
        elif name == "reaped":
            if event["signal"]:
                by = last_order.get(event["child"], "by nobody")
                self.count("deaths", f"{signal.Signals(event['signal']).name} {by}")
            elif event["status"] == 7:
                self.count("deaths", "os._exit with regions open")

    # Talk.

    def progress(self, is_last: bool = False) -> None:
        is_terminal = sys.stderr.isatty()
        now = time.monotonic()
        if not is_last and now < self._next_line:
            return
        self._next_line = now + PROGRESS_EVERY_SECONDS[is_terminal]
        constructions = sum(self.counts.get("constructions", {}).values())
        text = (
            f"{now - self.began:.0f} s, round {self.rounds}: {self.kills:,} kills, {constructions:,} constructions, "
            f"{len(self.findings)} findings, longest wait after a death {self.longest.wait_after_death * 1e3:.0f} ms"
        )
        end = "\n" if is_last or not is_terminal else ""
        print(f"\r{text:<110}" if is_terminal else f"==> soak: {text}", end=end, file=sys.stderr, flush=True)

    def as_data(self) -> dict[str, Any]:
        return {
            "seed": self.options.seed,
            "actors": self.options.actors,
            "originals": self.options.originals,
            "mutant": self.options.mutant,
            "runtime_double": self.options.runtime is not None,
            "shm": self.shm,
            "kernel": platform.release(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": round(time.monotonic() - self.began, 1),
            "rounds": self.rounds,
            "kills": self.kills,
            **{
                group: dict(sorted(counts.items()))
                for group, counts in sorted(self.counts.items())
                if group != "rounds"
            },
            "kinds_of_round": dict(sorted(self.counts.get("rounds", {}).items())),
            "waits_after_a_death": self.longest.waits_after_death,
            "longest_wait_after_a_death": self.longest.wait_in_words,
            "longest_without_these_ms": round(self.longest.judged_wait_after_death * 1e3, 1),
            "longest_constructor_ms": round(self.longest.constructor * 1e3, 1),
            "findings": self.findings,
        }

    def as_text(self) -> str:
        lines = []
        for name, value in self.as_data().items():
            if isinstance(value, dict):
                lines.append(f"{name.replace('_', ' ')}:")
                lines += [f"  {key:<44} {number:>9,}" for key, number in value.items()]
            elif name != "findings":
                shown = f"{value:,}" if type(value) is int and name != "seed" else str(value)
                lines.append(f"{name.replace('_', ' ') + ':':<46} {shown}")
        lines.append(f"findings: {len(self.findings) or 'none'}")
        for finding in self.findings[:20]:
            lines.append(f"  round {finding['round']}: {finding['kind']}: {finding['text']}")
            lines.append(f"    every event of the round: `{finding['log']}`, time of the finding {finding['at']:.6f}")
        return "\n".join(lines)
