"""Threads of one process: many constructors, and a GIL that is free while one of them waits or works."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ec_shared_region import ECSharedRegion, _wait_for_file_size
from procs import path_of

THREADS = 8


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """Runs `work` in many threads that start together; an error of any is the caller's."""
    barrier = threading.Barrier(THREADS)

    def one(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(one, range(THREADS)))


def test_eight_threads_construct_one_id(new_id: Any) -> None:
    for _ in range(10):
        engine_id = new_id()
        regions = in_threads(lambda _, engine_id=engine_id: ECSharedRegion(engine_id, THREADS, 7168))
        assert sum(region.is_creator for region in regions) == 1
        assert len({os.fstat(region._fd).st_ino for region in regions}) == 1
        for number, region in enumerate(regions):
            memoryview(region)[number, 0] = 1 + number
        for region in regions:
            assert [memoryview(region)[n, 0] for n in range(THREADS)] == list(range(1, THREADS + 1))
        in_threads(lambda number, regions=regions: regions[number].cleanup())
        assert not path_of(engine_id).exists()


def test_eight_threads_construct_eight_ids(new_id: Any) -> None:
    ids = [new_id() for _ in range(THREADS)]
    regions = in_threads(lambda number: ECSharedRegion(ids[number], 2, 7168))
    assert all(region.is_creator for region in regions)
    for region in regions:
        region.cleanup()


def test_eight_threads_clean_up_one_region(new_id: Any) -> None:
    for _ in range(20):
        region = ECSharedRegion(new_id(), 2, 64)
        in_threads(lambda _, region=region: region.cleanup())
        assert region._fd is None
        assert not Path(region.path).exists()


def test_views_are_taken_while_another_thread_cleans_up(new_id: Any) -> None:
    """Either a view that works or an error that says that it is closed; never a crash."""
    for _ in range(30):
        region = ECSharedRegion(new_id(), 2, 64)

        def work(number: int, region: Any = region) -> None:
            if number == 0:
                region.cleanup()
                return
            try:
                view = memoryview(region)
            except (BufferError, ValueError, TypeError):
                return
            view[1, 63] = 1
            assert view[1, 63] == 1
            view.release()

        in_threads(work)


def test_threads_come_and_go_on_one_id(engine_id: str) -> None:
    def work(_: int) -> None:
        for _ in range(40):
            with ECSharedRegion(engine_id, 2, 64) as region:
                assert region.nbytes == 128

    in_threads(work)
    assert not path_of(engine_id).exists()


class Ticker:
    """Counts as long as Python code of another thread can run."""

    def __enter__(self) -> Ticker:
        self.ticks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self.ticks += 1

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.case("PI-37", "FO-10")
def test_other_threads_run_while_a_joiner_waits(engine_id: str) -> None:
    """With the GIL held the other thread would not tick at all."""
    with Ticker() as ticker:
        before = ticker.ticks
        with pytest.raises(TimeoutError):
            ECSharedRegion(engine_id, 2, 64, mode="join", timeout=0.3)
        assert ticker.ticks - before > 5


@pytest.mark.case("PI-37")
def test_other_threads_run_while_a_size_is_waited_for(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    with Ticker() as ticker:
        before = ticker.ticks
        with pytest.raises(TimeoutError):
            _wait_for_file_size(descriptor, expected_size=1, timeout=0.3)
        assert ticker.ticks - before > 5
    os.close(descriptor)


@pytest.mark.case("PI-37", "PI-38")
def test_a_joiner_in_a_thread_meets_a_creator_in_another(engine_id: str) -> None:
    """If the wait held the GIL, the creator could never come."""
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(ECSharedRegion, engine_id, 2, 64, mode="join", timeout=20)
        with pytest.raises(TimeoutError):
            joining.result(timeout=0.05)
        creator = ECSharedRegion(engine_id, 2, 64)
        joiner = joining.result()
    assert (creator.is_creator, joiner.is_creator) == (True, False)
    joiner.cleanup()
    creator.cleanup()


@pytest.mark.case("PI-37", "PI-38")
def test_other_threads_run_while_a_region_is_prepared(small_shm: Any, engine_id: str) -> None:
    child = small_shm("size=320m").spawn()
    # Without the GIL released the other thread gets at most the switch before and after.
    assert (
        child.run(
            """
ticks, stop = [], False
def run():
    while not stop:
        ticks.append(None)
        time.sleep(0.001)
thread = threading.Thread(target=run)
thread.start()
before = len(ticks)
r = Region(id, 256, 1 << 20)
seen = len(ticks) - before
stop = True
thread.join()
r.cleanup()
seen
""",
            id=engine_id,
        )
        > 3
    )


@pytest.mark.case("FO-10", "PI-52")
def test_a_slow_register_does_not_lock_out_the_region(spawn: Any, engine_id: str) -> None:
    """pin_memory() in one thread, blocks in use in another, then cleanup: unmap comes after unregister."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a real CUDA driver answers here, the fake would not be asked")
    child = spawn(imports=("torch",))
    child.run(
        """
order = []
entered, go = threading.Event(), threading.Event()
class Fake:
    def cudaHostRegister(self, *a):
        entered.set(); go.wait(); order.append("registered"); return 0
    def cudaHostUnregister(self, *a):
        order.append("unregistered")
        order.append(mapped())
        return 0
def mapped():
    lines = [l.split()[0].split("-") for l in open("/proc/self/maps")]
    return any(int(low, 16) <= address < int(high, 16) for low, high in lines)
fake = Fake()
torch.cuda.is_available = lambda: True
torch.cuda.cudart = lambda: fake
r = Region(id, 8, 64)
address = r._blocks_ptr
pinning = threading.Thread(target=r.pin_memory)
pinning.start()
entered.wait()
view = memoryview(r)
view[0, 0] = 7           # the region is in use meanwhile
cleaning = threading.Thread(target=r.cleanup)
cleaning.start()
go.set()
pinning.join()
cleaning.join()
view.release()
""",
        id=engine_id,
    )
    assert child.run("order") in (["registered", "unregistered", True], [])
    assert child.run("mapped()") is False
    assert not path_of(engine_id).exists()
