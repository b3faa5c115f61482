"""The work that is measured, in a process that was forked for it; the stock way and ours run the same code here.

Every function gives a job for `family.run`. A way is "stock" or "ours"; `options` are keyword arguments of our
constructor, and what the installed package does not know of them makes the row "not in this build".
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import random
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import oracle
from ec_shared_region import ECSharedRegion

from .family import Job, Meet, NotInBuild, NotMeasured, Sample, SampleFailed, Stopwatch
from .figures import STOCK
from .measure import one_core, warm

MIB = 1 << 20
SHM = Path("/dev/shm")
# 3,584 numbers of 2 bytes: one row of encoder output, and no multiple of a page.
BLOCK_BYTES = 7168
TICK_SECONDS = 0.0001
PR_SET_TIMERSLACK = 29
KNOWN_OPTIONS = inspect.signature(ECSharedRegion.__init__).parameters.keys()
# Processes that start together do so at a multiple of this, and at least the margin later.
GRID_SECONDS, MARGIN_SECONDS = 0.020, 0.004


def path_of(engine_id: str) -> Path:
    return SHM / f"vllm_ec_{engine_id}.mmap"


def open_region(way: str, engine_id: str, size_bytes: int, block_bytes: int = BLOCK_BYTES, **options: Any) -> Any:
    """A region of as many whole blocks as fit into `size_bytes`."""
    num_blocks = max(1, size_bytes // block_bytes)
    if way == STOCK:
        return oracle.ECSharedRegion(engine_id, num_blocks, block_bytes)
    if options.keys() - KNOWN_OPTIONS:
        raise NotInBuild
    return ECSharedRegion(engine_id, num_blocks, block_bytes, **options)


def facts_of(region: Any) -> dict[str, Any]:
    """What our region says of how it was made."""
    report = getattr(region, "prefault_report", None)
    names = ("tier", "method", "huge_bytes", "base_bytes", "threads", "fallback")
    return {name: getattr(report, name) for name in names if hasattr(report, name)}


def touch(region: Any) -> int:
    """Writes a zero to every page; gives the faults that it took."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    touch_memory(region._blocks_ptr, region._blocks_nbytes)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def touch_memory(address: int, size_bytes: int) -> None:
    view = (ctypes.c_uint8 * size_bytes).from_address(address)
    pages = np.ctypeslib.as_array(view)[:: os.sysconf("SC_PAGESIZE")]
    # Stores alone: after a load, the kernel would have mapped the pages around it too.
    pages[:] = 0


def _backed(region: Any) -> None:
    """A page that is not there would be paid for later: that is no preparation."""
    status = os.stat(region._fd)
    if status.st_blocks * 512 < status.st_size:
        raise SampleFailed(f"{status.st_blocks * 512} of {status.st_size} bytes are backed")


def warm_for(way: str, size_bytes: int, **options: Any) -> None:
    """Warms memory in the page size that `open_region` will ask for."""
    warm(size_bytes, huge=way != STOCK and options.get("huge_pages") != "off")


def create(way: str, engine_id: str, size_bytes: int, *, single: bool = False, **options: Any) -> Job:
    """Create a region with every page there; on one core where `single`."""

    def job(_: Meet) -> Sample:
        with one_core() if single else contextlib.nullcontext():
            warm_for(way, size_bytes, **options)
            with Stopwatch() as watch:
                region = open_region(way, engine_id, size_bytes, **options)
        _backed(region)
        sample = watch.sample(**facts_of(region), faults_after=touch(region))
        region.cleanup()
        return sample

    return job


def stall(way: str, engine_id: str, size_bytes: int) -> Job:
    """The longest time in which another Python thread could not run while a region was made."""

    def job(_: Meet) -> Sample:
        warm_for(way, size_bytes)
        longest, done = 0.0, False
        started = threading.Event()

        def tick() -> None:
            nonlocal longest
            last = time.perf_counter()
            while not done:
                started.set()
                time.sleep(TICK_SECONDS)
                now = time.perf_counter()
                longest, last = max(longest, now - last), now

        ticker = threading.Thread(target=tick)
        ticker.start()
        started.wait()
        try:
            with Stopwatch() as watch:
                region = open_region(way, engine_id, size_bytes)
        finally:
            done = True
            ticker.join()
        region.cleanup()
        return Sample(longest, facts={"whole_seconds": watch.sample().seconds})

    return job


def hold(way: str, engine_id: str, size_bytes: int, **options: Any) -> Job:
    """Holds a region as its creator while others join it: they meet once it is there and once they are done."""

    def job(meet: Meet) -> Sample:
        warm_for(way, size_bytes, **options)
        region = open_region(way, engine_id, size_bytes, **options)
        facts = facts_of(region)
        meet()
        meet()
        region.cleanup()
        return Sample(0.0, facts=facts)

    return job


def join_and_write(way: str, engine_id: str, size_bytes: int, **options: Any) -> Job:
    """Join a region and be ready to write: the stock way by a first write to every page, ours by mapping ahead."""

    def job(meet: Meet) -> Sample:
        meet()
        with Stopwatch() as watch:
            region = open_region(way, engine_id, size_bytes, **options)
            if way == STOCK:
                touch(region)
        # A joiner that is ready takes no faults any more.
        sample = watch.sample(faults_after=touch(region), pages=size_bytes // os.sysconf("SC_PAGESIZE"))
        meet()
        region.cleanup()
        return sample

    return job


def start_together() -> None:
    """Sleeps until the next moment of a grid that all processes know.

    Processes that a barrier wakes come one after the other, and never race for the microseconds in which a file is
    there and has no size yet.
    """
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    time.sleep(GRID_SECONDS - (time.perf_counter() + MARGIN_SECONDS) % GRID_SECONDS + MARGIN_SECONDS)


def race(way: str, engine_id: str, size_bytes: int, *, write: bool = False, **options: Any) -> Job:
    """Start together with others of one id; whoever comes first creates. With `write`: until all pages are mapped."""

    def job(meet: Meet) -> Sample:
        meet()
        if not write:
            start_together()
        with Stopwatch() as watch:
            region = open_region(way, engine_id, size_bytes, **options)
            if write and way == STOCK:
                touch(region)
        sample = watch.sample(is_creator=region._is_creator)
        meet()
        if write:
            sample.facts["faults_after"] = touch(region)
        meet()
        region.cleanup()
        return sample

    return job


def after_a_death(way: str, engine_id: str, size_bytes: int) -> Job:
    """Open where a process that died left a file that is too short."""

    def job(_: Meet) -> Sample:
        path = path_of(engine_id)
        path.write_bytes(bytes(4096))
        path.chmod(0o600)
        region = None
        try:
            with Stopwatch() as watch, contextlib.suppress(TimeoutError):
                region = open_region(way, engine_id, size_bytes)
            opened = region is not None
            if region is not None:
                region.cleanup()
        finally:
            path.unlink(missing_ok=True)
        return watch.sample(opened=opened)

    return job


def cleanup(way: str, engine_id: str, size_bytes: int) -> Job:
    """Let go of a region as its only holder, every page mapped."""

    def job(_: Meet) -> Sample:
        warm_for(way, size_bytes)
        region = open_region(way, engine_id, size_bytes)
        touch(region)
        facts = facts_of(region)
        with Stopwatch() as watch:
            region.cleanup()
        return watch.sample(**facts)

    return job


def attach(way: str, engine_id: str, size_bytes: int, calls: int, *, blocks: bool = True, **options: Any) -> Job:
    """Join, take `blocks`, let go: the median of some calls."""

    def job(meet: Meet) -> Sample:
        meet()
        region: Any = None
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            region = open_region(way, engine_id, size_bytes, **options)
            if blocks:
                region.blocks.data_ptr()  # what an engine takes of it
            region.cleanup()
            times.append(time.perf_counter() - began)
        meet()
        return Sample(statistics.median(times))

    return job


def copy_blocks(
    way: str, engine_id: str, size_bytes: int, block_bytes: int, batch: int, calls: int, *, scatter: bool
) -> Job:
    """Copy a batch of blocks into the region, or out of it, in an order of its own: the median of some batches.

    The source, or target, is another part of a larger tensor each time, so that no cache has it already.
    """

    def job(_: Meet) -> Sample:
        import torch

        if way != STOCK and not hasattr(ECSharedRegion, "scatter_blocks" if scatter else "gather_blocks"):
            raise NotInBuild
        warm_for(way, size_bytes)
        region = open_region(way, engine_id, size_bytes, block_bytes)
        blocks = region.blocks
        parts = max(2, 64 * MIB // (batch * block_bytes))
        # Every row differs from its neighbours, and a row from itself shifted.
        rows = torch.arange(parts * batch).to(torch.int8).view(parts, batch, 1)
        outside = rows + torch.randint(-128, 128, (block_bytes,), dtype=torch.int8)
        order = random.Random(1)
        times = []
        try:
            for number in range(calls):
                ids = order.sample(range(region.num_blocks), batch)
                part = outside[number % parts]
                began = time.perf_counter()
                if way != STOCK:
                    region.scatter_blocks(ids, part) if scatter else region.gather_blocks(ids, out=part)
                elif scatter:
                    for row, block in enumerate(ids):
                        blocks[block].copy_(part[row])
                else:
                    for row, block in enumerate(ids):
                        part[row].copy_(blocks[block])
                times.append(time.perf_counter() - began)
            # Once, at the end: it brings the blocks into the caches.
            if not torch.equal(part, blocks[torch.tensor(ids)]):
                raise SampleFailed("the copied bytes differ")
            return Sample(statistics.median(times), facts=facts_of(region))
        finally:
            del blocks
            region.cleanup()

    return job


def import_time(code: str) -> Job:
    """Import in a fresh interpreter: the time of the imports, without the interpreter's own start."""
    text = f"import time; began = time.perf_counter(); {code}; print(time.perf_counter() - began)"

    def job(_: Meet) -> Sample:
        done = subprocess.run(
            [sys.executable, "-P", "-c", text], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode and "ModuleNotFoundError" in done.stderr:
            raise NotMeasured(done.stderr.strip().rpartition("\n")[2].partition(": ")[2])
        if done.returncode:
            raise SampleFailed(done.stderr)
        return Sample(float(done.stdout.split()[-1]))

    return job


@contextlib.contextmanager
def many_regions(count: int, new_id: Callable[[], str]) -> Iterator[None]:
    """So many small live regions of ours are in the directory meanwhile."""
    held = [open_region("ours", new_id(), 4096, 4096) for _ in range(count)]
    try:
        yield
    finally:
        for region in held:
            region.cleanup()


def create_small(way: str, engine_id: str, count: int, calls: int, new_id: Callable[[], str]) -> Job:
    """Create a small region and let go of it, where `count` others are: the median of some calls."""

    def job(_: Meet) -> Sample:
        times = []
        with many_regions(count, new_id):
            for _call in range(calls):
                began = time.perf_counter()
                open_region(way, engine_id, 4096, 4096).cleanup()
                times.append(time.perf_counter() - began)
        return Sample(statistics.median(times))

    return job
