"""The soak in short, and that its referee has teeth: `make soak` is the long one, docs/soak.md its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from soak import judge, mutants

HERE = Path(__file__).parent
TINY = "soak-tiny"


def run(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "soak", "--json", f"--logs={tmp_path}", *options],
        env={**os.environ, "PYTHONPATH": str(HERE), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("options", [(), ("--originals",)])
def test_nobody_is_harmed(tmp_path: Path, options: tuple[str, ...]) -> None:
    status, summary, stderr = run(tmp_path, "--seconds=5", "--actors=8", *options)
    assert status == 0 and not summary["findings"], summary
    assert f"seed {summary['seed']}" in stderr
    # It did what it is for, however slow the machine.
    assert summary["kills"] >= 10 and summary["rounds"] >= 1
    assert summary["constructions"]["ours, creator"] and summary["constructions"]["ours, joiner"]
    if options:
        assert summary["constructions"]["original, joiner"]


@pytest.mark.parametrize("mutant", sorted(mutants.KINDS))
def test_the_referee_finds(tmp_path: Path, mutant: str) -> None:
    """Actors that do one thing wrong: it is found, by its kind, with the events of the round beside it."""
    status, summary, _ = run(tmp_path, "--seconds=20", "--actors=6", "--seed=4", f"--mutant={mutant}")
    kinds = {finding["kind"] for finding in summary["findings"]}
    assert status == 1 and kinds & set(mutants.KINDS[mutant]), (kinds, mutants.KINDS[mutant])
    events = Path(summary["findings"][0]["log"]).read_text().splitlines()
    assert len(events) > 20 and json.loads(events[0])["t"] > 0


# The judge by itself, on rounds that are written down here.


def told(pid: int, at: float, event: str, **more: Any) -> dict[str, Any]:
    return {"t": at, "e": event, "p": pid, "n": pid, **more}


def stay(pid: int, inode: int, called: float, until: float, *, creator: bool = True) -> list[dict[str, Any]]:
    """A process that constructs, and lives until it is killed."""
    return [
        told(pid, called, "call", h=1, id=TINY, shape=[1, 64], original=False, mode="create_or_join", timeout=15.0),
        told(
            pid,
            called + 0.01,
            "open",
            h=1,
            ino=inode,
            creator=creator,
            nonce=inode,
            took=0.01,
            waited=0.01,
            delayed=0.0,
        ),
        {"t": until, "e": "order", "child": pid, "signal": 9, "by": "referee"},
        {"t": until + 0.01, "e": "reaped", "child": pid, "signal": 9, "status": 0, "is_actor": True},
    ]


def kinds_of(*events: dict[str, Any]) -> list[str]:
    return [finding.kind for finding in judge.judge(list(events), may_be_left={})]


def test_a_region_after_a_death_is_no_twin() -> None:
    assert kinds_of(*stay(1, 10, 0.0, 1.0), *stay(2, 11, 1.1, 2.0)) == []


def test_two_files_at_once_are_a_twin() -> None:
    assert kinds_of(*stay(1, 10, 0.0, 1.0), *stay(2, 11, 0.5, 2.0)) == ["twin"]


def test_two_files_after_the_creators_cleanup_are_the_contract() -> None:
    events = stay(1, 10, 0.0, 1.0) + stay(2, 10, 0.2, 2.0, creator=False) + stay(3, 11, 0.8, 2.0)
    closing = told(1, 0.5, "closing", h=1, ino=10)
    assert kinds_of(*events, closing) == []
    assert "twin" in kinds_of(*events)


def test_a_name_that_is_gone_under_a_holder_is_a_robbery() -> None:
    saw = told(1, 0.5, "saw", h=1, id=TINY, ino=10, links=0, words=[0] * 16, since=0.5)
    assert kinds_of(*stay(1, 10, 0.0, 1.0), saw) == ["robbed"]


def test_a_constructor_that_waits_for_the_dead() -> None:
    waiter = stay(2, 11, 0.5, 5.0)
    waiter[1]["t"], waiter[1]["waited"] = 3.0, 2.5
    assert kinds_of(*stay(1, 10, 0.0, 1.0), *waiter) == ["wait"]
    waiter[1]["delayed"] = 1.9  # it was ready to run, and others ran
    assert kinds_of(*stay(1, 10, 0.0, 1.0), *waiter) == []


def test_a_refusal_without_reason() -> None:
    refused = [
        told(2, 0.5, "call", h=1, id=TINY, shape=[2, 32], original=False, mode="create_or_join", timeout=15.0),
        told(2, 0.6, "refused", h=1, error="GeometryMismatchError", text="", delayed=0.0),
    ]
    assert kinds_of(*refused) == ["refused"]
    assert kinds_of(*stay(1, 10, 0.0, 1.0), *refused) == []


def test_a_death_that_nobody_ordered() -> None:
    dead = stay(1, 10, 0.0, 1.0)
    dead[2]["signal"], dead[3]["signal"] = 9, 7
    assert kinds_of(*dead) == ["signal death"]


def test_only_an_original_that_may_have_adopted_a_dead_file_is_left_out() -> None:
    adopter, ours = stay(1, 10, 0.0, 1.0, creator=False), stay(2, 11, 0.5, 2.0)
    assert kinds_of(*adopter, *ours) == ["twin"]
    adopter[0]["original"] = True
    assert kinds_of(*adopter, *ours) == []
    # It was seen in a file with a name, so it was alive there.
    saw = told(1, 0.1, "saw", h=1, id=TINY, ino=10, links=1, words=[0] * 16, since=0.1)
    assert kinds_of(*adopter, saw, *ours) == ["twin"]
    # Somebody else was surely in when it came.
    assert "twin" in kinds_of(*stay(3, 10, -1.0, 0.3), *adopter, *ours)
