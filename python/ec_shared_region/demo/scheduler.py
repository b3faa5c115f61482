"""The scheduler: decides which block holds what. It maps the region too, but copies nothing and pins nothing."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait

import ec_shared_region

from .messages import (
    Closed,
    DemoError,
    Finished,
    Job,
    JobKind,
    Opened,
    Order,
    Plan,
    ProcessRecord,
    Ready,
    Stopped,
    Verified,
    expect,
    run_child,
)

__all__ = ["BlockPool", "main"]


class BlockPool:
    """Free list of block ids, and photographs in the cache, the oldest first to go."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self._free = deque(range(num_blocks))
        self._cached: dict[int, tuple[int, ...]] = {}
        self._random = random.Random(seed)
        self._was_used = bytearray(num_blocks)
        self.reused_blocks = 0
        """How often a block was given out that an earlier photograph had."""
        self.evicted_photographs = 0

    @property
    def cached(self) -> tuple[int, ...]:
        """Photographs whose rows are in blocks now, the oldest first."""
        return tuple(self._cached)

    def lookup(self, photograph: int) -> tuple[int, ...] | None:
        """The blocks of a photograph that is in the cache."""
        return self._cached.get(photograph)

    def allocate(self, photograph: int, rows: int) -> tuple[int, ...]:
        """Blocks for a photograph that is not in the cache, evicting as many others as it takes."""
        while len(self._free) < rows:
            oldest = next(iter(self._cached))
            freed = list(self._cached.pop(oldest))
            # An engine serves many requests at once, which end in no order, so its free list has none.
            # Here photographs come one by one: without this every photograph would lie in one piece.
            self._random.shuffle(freed)
            self._free.extend(freed)
            self.evicted_photographs += 1
        block_ids = tuple(self._free.popleft() for _ in range(rows))
        for block_id in block_ids:
            self.reused_blocks += self._was_used[block_id]
            self._was_used[block_id] = 1
        self._cached[photograph] = block_ids
        return block_ids


class _WorkerGone(Exception):
    """A worker's pipe has ended."""


def main(plan: Plan, supervisor: Connection, workers: Sequence[Connection]) -> None:
    """Entry point of the process."""
    run_child(lambda: _Scheduler(plan, supervisor, workers).run(), supervisor)


class _Scheduler:
    def __init__(self, plan: Plan, supervisor: Connection, workers: Sequence[Connection]) -> None:
        self._plan, self._supervisor = plan, supervisor
        self._workers = {worker: f"worker {number}" for number, worker in enumerate(workers)}
        self._pool = BlockPool(plan.num_blocks, plan.seed)

    def run(self) -> None:
        plan, supervisor = self._plan, self._supervisor
        # Longer than the supervisor's own patience, which is to speak first.
        patience = 2 * plan.timeout_seconds + 10
        record = ProcessRecord("scheduler", os.getpid(), pin_note="it never pins")
        supervisor.send(Ready())
        expect(supervisor, Order.OPEN, patience)
        began = time.perf_counter()
        with ec_shared_region.ECSharedRegion(
            plan.engine_id, plan.num_blocks, plan.block_size_bytes, timeout=plan.timeout_seconds
        ) as region:
            record.open_seconds = time.perf_counter() - began
            record.is_creator = region.is_creator
            assert region._fd is not None
            record.inode = os.fstat(region._fd).st_ino
            supervisor.send(Opened(record))
            expect(supervisor, Order.START, patience)
            with contextlib.suppress(_WorkerGone):  # the supervisor sees it too, and decides
                self._serve()
            expect(supervisor, Order.CLOSE, patience)
        supervisor.send(Closed(record))

    def _serve(self) -> None:
        plan, pool = self._plan, self._pool
        everyone = list(self._workers)
        saver, loaders = everyone[:1], everyone[1:] or everyone
        hits, total = 0, plan.rounds * len(plan.photographs)
        for done, photograph in enumerate(self._requests(), start=1):
            # Each worker makes the outputs by itself, all at the same time, as tensor-parallel workers do.
            self._order(everyone, JobKind.ENCODE, photograph)
            block_ids = pool.lookup(photograph)
            if block_ids is not None:
                hits += 1
                self._order(everyone, JobKind.LOAD, photograph, block_ids)
            else:
                block_ids = pool.allocate(photograph, plan.photographs[photograph].rows)
                self._order(saver, JobKind.SAVE, photograph, block_ids)
                # Nothing is saved again before every loader has answered: that orders the reuse of blocks.
                self._order(loaders, JobKind.LOAD, photograph, block_ids)
            self._supervisor.send(Verified(done, max(done, total)))
        self._supervisor.send(Finished(hits, pool.evicted_photographs, pool.reused_blocks))

    def _requests(self) -> Iterator[int]:
        for _ in range(self._plan.rounds):
            yield from range(len(self._plan.photographs))
        # What is still in the cache lay there while its neighbours were overwritten: it is asked for again.
        yield from self._pool.cached

    def _order(
        self, workers: Sequence[Connection], kind: JobKind, photograph: int, block_ids: tuple[int, ...] = ()
    ) -> None:
        """Gives a job to ``workers`` and waits until each has done it."""
        timeout_seconds = self._plan.timeout_seconds
        pending = list(workers)
        try:
            for worker in workers:
                worker.send(Job(kind, photograph, block_ids))
            while pending:
                ready = wait([self._supervisor, *pending], timeout_seconds)
                if not ready:
                    raise DemoError(
                        f"{', '.join(self._workers[worker] for worker in pending)} did not {kind.name.lower()} "
                        f"`{self._plan.photographs[photograph].path}` within {timeout_seconds:g} s",
                        hint="a stopped process, or a busy machine? --timeout gives more time",
                    )
                if self._supervisor in ready:
                    raise Stopped
                for worker in [worker for worker in pending if worker in ready]:
                    worker.recv()
                    pending.remove(worker)
        except (EOFError, ConnectionError) as error:
            raise _WorkerGone from error
