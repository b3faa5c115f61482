"""Threads that meet in one object, at moments that an interpreter without a lock has and one with it nearly has.

With the lock, threads change places as often as the interpreter can; without it (a free-threaded build) they run
at once. What is asserted holds for both.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest

from ec_shared_region import ECSharedRegion, RegionClosedError, logger
from ec_shared_region import region as module
from procs import path_of

torch = pytest.importorskip("torch")

HAS_DRIVER = torch.cuda.is_available()
THREADS = 4
ROUNDS = 150


@pytest.fixture(autouse=True)
def change_places_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Runs every one in a thread of its own, from one barrier; gives what they returned or raised, in order."""
    barrier = threading.Barrier(len(works))
    answers: list[Any] = [None] * len(works)

    def one(number: int) -> None:
        barrier.wait()
        try:
            answers[number] = works[number]()
        except Exception as error:
            answers[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_all_threads_get_the_same_blocks(open_region: Any, new_id: Any) -> None:
    for _ in range(ROUNDS):
        region = open_region(new_id(), 3, 64)
        tensors = at_once(*[lambda region=region: region.blocks] * THREADS)
        assert all(tensor is region.blocks for tensor in tensors), tensors
        assert region._mmap_obj.exports == 1
        del tensors
        region.cleanup()


def test_blocks_do_not_come_back_after_cleanup(open_region: Any, new_id: Any) -> None:
    """Either a tensor that works, also later, or an AttributeError; and afterwards no attribute."""
    for _ in range(ROUNDS):
        region = open_region(new_id(), 3, 64)
        *tensors, nothing = at_once(*[lambda region=region: region.blocks] * 2, region.cleanup)
        assert nothing is None
        assert not hasattr(region, "blocks")
        assert "blocks" not in vars(region)
        for tensor in tensors:
            if not isinstance(tensor, AttributeError):
                tensor[2, 63] = 1
                assert tensor.sum() >= 1


def test_views_questions_and_cleanup_at_once(open_region: Any, new_id: Any) -> None:
    for _ in range(ROUNDS):
        region = open_region(new_id(), 3, 64)
        view, array, mapping, check, identity, text, first, second = at_once(
            lambda region=region: memoryview(region),
            lambda region=region: numpy.asarray(region),
            lambda region=region: region._mapping(),
            region.check,
            region.identity,
            region.__repr__,
            region.cleanup,
            region.cleanup,
        )
        if not isinstance(view, BufferError):
            view[2, 63] = 7
            view.release()
        if not isinstance(array, (BufferError, RegionClosedError)):
            array[2, 63] = 7
        if not isinstance(mapping, RegionClosedError):
            memoryview(mapping)[3 * 64 - 1] = 7
        for answer in (check, identity):
            assert not isinstance(answer, Exception) or isinstance(answer, RegionClosedError), answer
        assert isinstance(text, str)
        assert (first, second) == (None, None)
        assert not path_of(region.engine_id).exists()


def test_one_of_several_cleanups_closes(open_region: Any, new_id: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger.name):
        for _ in range(ROUNDS):
            at_once(*[open_region(new_id(), 1, 64).cleanup] * THREADS)
    closed = Counter(record.getMessage() for record in caplog.records if record.getMessage().startswith("closed"))
    assert len(closed) == ROUNDS
    assert set(closed.values()) == {1}


def test_one_object_opens_one_region(new_id: Any) -> None:
    """Several threads in the constructor of one object, and one that cleans up: one opens, or none is left open."""
    for _ in range(ROUNDS // 3):
        region = ECSharedRegion.__new__(ECSharedRegion)
        ids = [new_id() for _ in range(3)]
        opened = at_once(*[lambda id=id, region=region: region.__init__(id, 1, 64) for id in ids])  # type: ignore[misc]
        winners = [id for id, answer in zip(ids, opened, strict=True) if answer is None]
        assert len(winners) == 1
        assert all(isinstance(answer, RuntimeError) for answer in opened if answer is not None), opened
        assert [path_of(id).exists() for id in ids] == [id == winners[0] for id in ids]
        at_once(region.cleanup, region._close)
        assert not path_of(winners[0]).exists()

        _, problems = at_once(
            lambda region=region, id=ids[0]: region._open(id, 1, 64, 1.0, "create", "never", None), region._close
        )
        assert problems == []
        # Whichever came first: the object and the file say the same.
        is_open = path_of(ids[0]).exists()
        if is_open:
            assert memoryview(region).nbytes == 64
            region._close()
        with pytest.raises(BufferError):
            memoryview(region)
        assert not path_of(ids[0]).exists()


def test_the_open_regions_are_listed_while_others_come_and_go(new_id: Any) -> None:
    """What happens at exit, when daemon threads are still at work."""
    stop = threading.Event()

    def list_them() -> None:
        try:
            for _ in range(20 * ROUNDS):
                for reference in module._open_regions.valuerefs():
                    reference()
        finally:
            stop.set()

    def come_and_go() -> None:
        while not stop.is_set():
            ECSharedRegion(new_id(), 1, 64).cleanup()

    assert not [answer for answer in at_once(list_them, come_and_go, come_and_go) if isinstance(answer, Exception)]


class Runtime:
    """In the place of `torch.cuda.cudart()`: counts, and answers with one code."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[str] = []

    def cudaHostRegister(self, *_: int) -> int:
        self.calls.append("register")
        return self.code

    def cudaHostUnregister(self, *_: int) -> int:
        self.calls.append("unregister")
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Runtime]:
    if HAS_DRIVER:
        pytest.skip("a real CUDA driver answers here, the fake would not be asked")

    def make(code: int) -> Runtime:
        fake = Runtime(code)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
        return fake

    return make


def test_threads_that_pin_at_once_register_once(runtime: Any, open_region: Any, new_id: Any) -> None:
    for _ in range(ROUNDS // 5):
        fake = runtime(0)
        region = open_region(new_id(), 1, 4096)
        results = at_once(*[region.pin_memory] * THREADS)
        assert fake.calls == ["register"]
        assert all(results), results
        # Who came late may know less, but nobody's result is forgotten for it.
        assert "torch" in {result.backend for result in results}
        assert region.pin_memory().backend == "torch"
        at_once(*[region.cleanup] * THREADS)
        assert fake.calls == ["register", "unregister"]


def test_pin_unpin_and_cleanup_at_once(runtime: Any, open_region: Any, new_id: Any) -> None:
    for _ in range(ROUNDS // 5):
        fake = runtime(0)
        region = open_region(new_id(), 1, 4096)
        answers = at_once(region.pin_memory, region.unpin_memory, region.pin_memory, region.cleanup)
        for answer in answers:
            assert not isinstance(answer, Exception) or isinstance(answer, RegionClosedError), answer
        assert not region.is_pinned
        assert fake.calls.count("register") == fake.calls.count("unregister")


def test_a_refusal_is_warned_of_once(
    runtime: Any, open_region: Any, new_id: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(ROUNDS // 5):
        runtime(2)
        region = open_region(new_id(), 1, 4096)
        caplog.clear()
        results = at_once(*[region.pin_memory] * THREADS)
        assert {result.code for result in results} == {2}
        warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warned) == 1, [record.getMessage() for record in warned]
        region.cleanup()


def test_an_object_that_opens_again_keeps_what_it_lent(spawn: Any, new_id: Any) -> None:
    """`torch.frombuffer` keeps the object and no buffer of it: a tensor on memory that is gone would be a crash."""
    child = spawn(imports=("torch",))
    first, second = new_id(), new_id()
    assert child.run(
        """
r = Region(first, 64, 4096)
tensor = torch.frombuffer(r, dtype=torch.int8)
tensor[-1] = 7
r.cleanup()
r.__init__(second, 64, 4096)
other = torch.frombuffer(r, dtype=torch.int8)
other[-1] = 5
r.cleanup()
int(tensor[-1]), int(other[-1]), tensor.data_ptr() != other.data_ptr()
""",
        first=first,
        second=second,
    ) == (7, 5, True)
    assert child.run("del tensor, other, r; gc.collect(); 'vllm_ec' in open('/proc/self/maps').read()") is False
    assert not path_of(first).exists() and not path_of(second).exists()
