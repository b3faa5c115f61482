"""The same work by other packages, in the same rounds as the stock way and ours.

None of them elects a creator, waits for a size or maps ahead, so "every page there" is one write to each page behind
their own call. What is not installed is left out with the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import jobs
from .family import Job, Meet, NotMeasured, Sample, Stopwatch, run, run_together
from .figures import OURS, STOCK, Contest, Peers
from .jobs import MIB
from .measure import Side, warm
from .rows import IMPORTS, Bench

SHARED_MEMORY, TORCH, ICEORYX2, LMCACHE = "shared_memory", "torch share_memory_", "iceoryx2", "LMCache"
CREATED_MIB = 256
CALLS = 50


@dataclass
class Memory:
    """Shared memory of a peer, and how to let go of it."""

    address: int
    size_bytes: int
    close: Callable[[], None]

    def touch(self) -> None:
        jobs.touch_memory(self.address, self.size_bytes)

    def tensor(self) -> Any:
        import torch

        view = (ctypes.c_int8 * self.size_bytes).from_address(self.address)
        return torch.frombuffer(view, dtype=torch.int8)


def _module(name: str, distribution: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotMeasured(f"`{distribution}` is not installed here ({error})") from None


class SharedMemory:
    """The standard library's."""

    @staticmethod
    def create(name: str, size_bytes: int) -> Memory:
        return SharedMemory._memory(name, size_bytes, is_new=True)

    @staticmethod
    def attach(name: str, size_bytes: int) -> Memory:
        return SharedMemory._memory(name, size_bytes, is_new=False)

    @staticmethod
    def _memory(name: str, size_bytes: int, is_new: bool) -> Memory:
        from multiprocessing import shared_memory

        block = shared_memory.SharedMemory(name, create=is_new, size=size_bytes)

        def close() -> None:
            if is_new:
                block.unlink()
            block.close()

        return Memory(ctypes.addressof(ctypes.c_char.from_buffer(block.buf or b"")), size_bytes, close)


class TorchShared:
    """A tensor that torch moves to shared memory; another process gets it through a queue, as a descriptor."""

    @staticmethod
    def create(name: str, size_bytes: int) -> Memory:
        import torch

        del name  # torch names it
        tensor: Any = torch.empty(size_bytes, dtype=torch.int8)
        held = [tensor.share_memory_()]
        del tensor
        return Memory(held[0].data_ptr(), size_bytes, held.clear)


class Iceoryx2:
    """A loaned sample of a publisher; subscribers get it read-only, so there is no joiner that writes."""

    @staticmethod
    def create(name: str, size_bytes: int) -> Memory:
        iox2 = _module("iceoryx2", "iceoryx2")
        iox2.set_log_level(iox2.LogLevel.Error)
        config = iox2.config.default()
        # All of its files, so that they go with the rest.
        config.global_cfg.root_path = iox2.Path.new(f"/dev/shm/{name}-iceoryx2/")
        config.global_cfg.prefix = iox2.FileName.new(f"{name}_")
        node = iox2.NodeBuilder.new().config(config).create(iox2.ServiceType.Ipc)
        service = node.service_builder(iox2.ServiceName.new(name)).publish_subscribe(iox2.Slice[ctypes.c_uint8])
        factory = service.max_publishers(1).max_subscribers(1).subscriber_max_buffer_size(1).create()
        publisher = factory.publisher_builder().initial_max_slice_len(size_bytes).max_loaned_samples(1).create()
        sample = publisher.loan_slice_uninit(size_bytes)
        held: list[Any] = [sample, publisher, factory, service, node]

        def close() -> None:
            nonlocal node, service, factory, publisher, sample
            sample.delete()
            held.clear()
            del sample, publisher, factory, service, node

        return Memory(sample.payload_ptr, size_bytes, close)


class LMCache:
    """The pair of functions by which its processes share memory on a host."""

    @staticmethod
    def create(name: str, size_bytes: int) -> Memory:
        shm = lmcache()
        address = shm.shm_create_readwrite(name, size_bytes)

        def close() -> None:
            shm.shm_unlink(name)
            shm.shm_munmap(address)

        return Memory(address, size_bytes, close)

    @staticmethod
    def attach(name: str, size_bytes: int) -> Memory:
        shm = lmcache()
        address = shm.shm_map_readwrite(name, size_bytes)
        return Memory(address, size_bytes, lambda: shm.shm_munmap(address))


LMCACHE_MODULE = "lmcache.v1.multiprocess.posix_shm"


def lmcache() -> Any:
    os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        return _module(LMCACHE_MODULE, "lmcache")


Create = Callable[[str, int], Memory]
CREATES: dict[str, Create] = {
    SHARED_MEMORY: SharedMemory.create,
    TORCH: TorchShared.create,
    ICEORYX2: Iceoryx2.create,
    LMCACHE: LMCache.create,
}
# Those of whom a second process can get the memory by name and write to it.
ATTACHES: dict[str, Create] = {SHARED_MEMORY: SharedMemory.attach, LMCACHE: LMCache.attach}
PEER_IMPORTS = {
    SHARED_MEMORY: "from multiprocessing import shared_memory",
    TORCH: "import torch",
    ICEORYX2: "import iceoryx2",
    LMCACHE: f"import os; os.environ['LMCACHE_LOG_LEVEL'] = 'ERROR'; import {LMCACHE_MODULE}",
}


def _load(name: str) -> None:
    """Imports what the peer needs: that is not what is timed."""
    if name == ICEORYX2:
        _module("iceoryx2", "iceoryx2")
    elif name == LMCACHE:
        lmcache()


def _created(name: str, region: str, size_bytes: int, *, letting_go: bool) -> Job:
    def job(_: Meet) -> Sample:
        _load(name)
        warm(size_bytes, huge=False)
        with Stopwatch() as making:
            memory = CREATES[name](region, size_bytes)
            memory.touch()
        with Stopwatch() as closing:
            memory.close()
        return (closing if letting_go else making).sample()

    return job


def _held(name: str, region: str, size_bytes: int) -> Job:
    def job(meet: Meet) -> Sample:
        _load(name)
        memory = CREATES[name](region, size_bytes)
        memory.touch()
        meet()
        meet()
        memory.close()
        return Sample(0.0)

    return job


def _joined(name: str, region: str, size_bytes: int, calls: int) -> Job:
    """Attach and write to every page once (`calls` 1); or attach, make a tensor, let go: the median of some calls."""

    def job(meet: Meet) -> Sample:
        _load(name)
        meet()
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            memory = ATTACHES[name](region, size_bytes)
            if calls == 1:
                memory.touch()
                times.append(time.perf_counter() - began)
                memory.close()
            else:
                memory.tensor()
                memory.close()
                times.append(time.perf_counter() - began)
        meet()
        return Sample(statistics.median(times))

    return job


def _alone(bench: Bench, make: Callable[[str], Job]) -> Side:
    return lambda: run(make(bench.new_id()))


def _with_holder(bench: Bench, hold: Callable[[str], Job], join: Callable[[str], Job]) -> Side:
    def side() -> Sample:
        region = bench.new_id()
        return run_together([hold(region), join(region)])[1]

    return side


def _create_side(bench: Bench, size: int, name: str) -> Side:
    if name in (STOCK, OURS):
        return _alone(bench, lambda region: jobs.create(name, region, size))
    return _alone(bench, lambda region: _created(name, region, size, letting_go=False))


def _cleanup_side(bench: Bench, size: int, name: str) -> Side:
    if name in (STOCK, OURS):
        return _alone(bench, lambda region: jobs.cleanup(name, region, size))
    return _alone(bench, lambda region: _created(name, region, size, letting_go=True))


def _join_side(bench: Bench, size: int, name: str) -> Side:
    if name in (STOCK, OURS):
        options = {"populate": "join"} if name == OURS else {}
        return _with_holder(
            bench,
            lambda region: jobs.hold(name, region, size),
            lambda region: jobs.join_and_write(name, region, size, **options),
        )
    return _with_holder(bench, lambda region: _held(name, region, size), lambda region: _joined(name, region, size, 1))


def _attach_side(bench: Bench, size: int, name: str) -> Side:
    if name in (STOCK, OURS):
        return _with_holder(
            bench, lambda region: jobs.hold(name, region, size), lambda region: jobs.attach(name, region, size, CALLS)
        )
    return _with_holder(
        bench, lambda region: _held(name, region, size), lambda region: _joined(name, region, size, CALLS)
    )


def _import_side(bench: Bench, size: int, name: str) -> Side:
    del size
    return _alone(bench, lambda _: jobs.import_time({**IMPORTS, **PEER_IMPORTS}[name]))


@dataclass(frozen=True)
class Plan:
    what: str
    size_bytes: int
    shows_speed: bool
    side: Callable[[Bench, int, str], Side]
    peers: Mapping[str, object] = field(default_factory=lambda: CREATES)


PLANS = (
    Plan(f"create, every page there, {CREATED_MIB} MiB", CREATED_MIB * MIB, True, _create_side),
    Plan(f"attach, every page written once, {CREATED_MIB} MiB", CREATED_MIB * MIB, True, _join_side, ATTACHES),
    Plan("attach, make a tensor, let go, 1 MiB", MIB, False, _attach_side, ATTACHES),
    Plan(f"unmap and last close, {CREATED_MIB} MiB", CREATED_MIB * MIB, False, _cleanup_side),
    Plan("import", 0, False, _import_side),
)


def measure(plan: Plan, bench: Bench) -> Peers:
    peers = Peers(plan.what, plan.size_bytes if plan.shows_speed else None)
    sides = {name: plan.side(bench, plan.size_bytes, name) for name in (STOCK, OURS, *plan.peers)}
    try:
        peers.contest = bench.rounds.play(sides, rounds=5)
    except Exception as error:  # as for a row
        peers.contest = Contest(absent={OURS: str(error)})
    return peers
