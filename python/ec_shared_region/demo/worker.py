"""A worker: opens the region, saves or loads the rows that the scheduler names, compares bit for bit."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection, wait

import torch

import ec_shared_region

from .encoder import PatchEmbedding
from .messages import (
    Closed,
    DemoError,
    Job,
    JobKind,
    Opened,
    Order,
    Plan,
    ProcessRecord,
    Progress,
    Ready,
    expect,
    run_child,
)

__all__ = ["main"]


def main(plan: Plan, number: int, supervisor: Connection, scheduler: Connection) -> None:
    """Entry point of the process."""
    run_child(lambda: _Worker(plan, number, supervisor, scheduler).run(), supervisor)


class _Worker:
    def __init__(self, plan: Plan, number: int, supervisor: Connection, scheduler: Connection) -> None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // plan.workers))
        self._plan, self._supervisor, self._scheduler = plan, supervisor, scheduler
        self._record = ProcessRecord(f"worker {number}", os.getpid())
        self._encoder = PatchEmbedding(
            plan.hidden_size, plan.seed, max(max(p.grid_rows, p.grid_columns) for p in plan.photographs)
        )
        # Stands for the GPU's memory: what a load fills. Zeroed, so that its pages are there before a copy is timed.
        self._loaded = torch.zeros(plan.max_rows, plan.block_size_bytes, dtype=torch.int8)
        self._encoded_photograph: int | None = None
        self._encoded = torch.empty(0)

    def run(self) -> None:
        # Longer than the supervisor's own patience, which is to speak first.
        patience = 2 * self._plan.timeout_seconds + 10
        self._supervisor.send(Ready())
        expect(self._supervisor, Order.OPEN, patience)
        plan, record = self._plan, self._record
        began = time.perf_counter()
        with ec_shared_region.ECSharedRegion(
            plan.engine_id, plan.num_blocks, plan.block_size_bytes, timeout=plan.timeout_seconds
        ) as region:
            record.open_seconds = time.perf_counter() - began
            record.is_creator = region.is_creator
            assert region._fd is not None
            record.inode = os.fstat(region._fd).st_ino
            pinning = region.pin_memory()
            record.is_pinned, record.pin_note = pinning.ok, pinning.reason
            record.nonzero_fresh_bytes = int(torch.count_nonzero(region.blocks))
            self._supervisor.send(Opened(record))
            self._serve(region, patience)
        self._supervisor.send(Closed(record))

    def _serve(self, region: ec_shared_region.ECSharedRegion, patience: float) -> None:
        listening = [self._supervisor, self._scheduler]
        while True:
            ready = wait(listening, patience)
            if not ready:
                raise DemoError(f"nobody gave this worker an order or a job within {patience:g} s")
            if self._supervisor in ready:
                expect(self._supervisor, Order.CLOSE, 0)
                return
            try:
                job = self._scheduler.recv()
                self._do(job, region.blocks)
                self._scheduler.send(job)
            except (EOFError, ConnectionError):
                # The scheduler is gone. What follows is for the supervisor to say.
                listening = [self._supervisor]
            self._supervisor.send(Progress(self._record))

    def _do(self, job: Job, blocks: torch.Tensor) -> None:
        if self._encoded_photograph != job.photograph:
            self._encoded = self._encoder.encode(self._plan.photographs[job.photograph])
            self._encoded_photograph = job.photograph
        if job.kind is JobKind.ENCODE:
            return
        rows = self._encoded.view(torch.int8)
        block_ids = torch.tensor(job.block_ids)
        record = self._record
        if job.kind is JobKind.SAVE:
            began = time.perf_counter()
            _widened(blocks)[block_ids] = _widened(rows)
            record.save_seconds += time.perf_counter() - began
            record.saved_bytes += rows.numel()
            return
        loaded = self._loaded[: len(block_ids)]
        loaded.zero_()  # what an earlier load left must not pass for this one
        began = time.perf_counter()
        torch.index_select(blocks, 0, block_ids, out=loaded)
        record.load_seconds += time.perf_counter() - began
        record.loaded_bytes += loaded.numel()
        if not torch.equal(_widened(loaded), _widened(rows)):
            record.differing_bytes += int(torch.count_nonzero(loaded != rows))


def _widened(rows: torch.Tensor) -> torch.Tensor:
    """The same int8 bytes in elements of 8 bytes where a row divides into them: torch scatters by element."""
    dtype = torch.int64 if rows.shape[1] % 8 == 0 else torch.int16
    return rows.view(dtype)
