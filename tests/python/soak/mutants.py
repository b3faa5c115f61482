"""Actors that do wrong on purpose: what each does must be found, else the referee proves nothing."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from typing import TYPE_CHECKING

from . import plan

if TYPE_CHECKING:
    from .actors import Actor

# What each does, and the kinds of finding that give it away.
KINDS: dict[str, tuple[str, ...]] = {
    "unlink": ("robbed", "twin"),  # takes the name of a live region away
    "scribble": ("wrong byte",),  # writes into a slot of another
    "fall": ("signal death",),  # dies of a signal that nobody ordered
    "leak": ("left in a process", "left at the end"),  # keeps a descriptor after cleanup
    "block": ("wait",),  # holds the directory's lock for longer than a second
    "private": ("lost write", "wrong byte"),  # writes into a copy of its own instead of the shared bytes
}
OFTEN = 0.05


def act(kind: str, actor: Actor) -> None:
    if actor.rng.random() > OFTEN or not actor.holds:
        return
    hold = actor.rng.choice(actor.holds)
    path = f"/dev/shm/vllm_ec_{hold.place.engine_id}.mmap"
    if kind == "unlink":
        if os.path.exists(path):
            os.unlink(path)
    elif kind == "scribble":
        assert hold.words is not None
        other = (actor.orders.number + 1) % plan.MOST_ACTORS
        plan.grid(hold.words)[other + 1, 0] = 0x5A5A5A5A
    elif kind == "fall":
        os.kill(os.getpid(), signal.SIGBUS)
    elif kind == "leak":
        os.open(path, os.O_RDONLY)
    elif kind == "block":
        directory = os.open("/dev/shm", os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(directory, fcntl.LOCK_EX)
        time.sleep(1.5)
        os.close(directory)
    elif kind == "private":
        assert hold.words is not None
        hold.words = hold.words.copy()
        actor.write(hold)
