"""Pinning in several processes at once: each decides for itself, and a result can be sent around and voted on."""

from __future__ import annotations

import dataclasses
import os
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fake_cudart
from ec_shared_region import PinResult


@pytest.fixture
def engine_id() -> str:
    return f"group-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def run(engine_id: str, tmp_path: Path) -> Callable[..., Any]:
    folder = tmp_path / "runtime"
    path = fake_cudart.build(folder)
    return lambda program, **options: fake_cudart.run(
        program, {"path": str(path)}, engine_id=engine_id, folder=tmp_path, loader_path=folder, **options
    )


@pytest.mark.case("PI-10", "PI-46")
def test_a_result_can_be_sent_to_other_ranks() -> None:
    """One decision of the group needs a value that crosses a pipe, compares, and is true or false."""
    refused = PinResult(False, "cudart", "/x/libcudart.so.13", 0, 0, 0.1, 801, "code=801")
    pinned = PinResult(True, "cudart", "/x/libcudart.so.13", 2, 1 << 20, 0.1, None, "pinned")
    for result in (refused, pinned):
        sent = pickle.loads(pickle.dumps(result))
        assert sent == result and bool(sent) is bool(result)
        assert PinResult(**dataclasses.asdict(result)) == result
    assert not all([pinned, refused]) and any([pinned, refused])
    with pytest.raises(dataclasses.FrozenInstanceError):
        pinned.ok = False  # type: ignore[misc]


@pytest.mark.case("PI-10")
def test_a_rank_that_is_stuck_in_its_driver_holds_up_no_other(run: Callable[..., Any]) -> None:
    """No lock over processes: a second process joins, pins, unpins and leaves while the first one's driver works."""
    run(
        """
        import torch
        Fake(path).devices(0, 100)  # so that torch's own binding is asked, which waits as long as the test wants
        reader, writer = os.pipe()
        done_reader, done_writer = os.pipe()
        class Driver:
            is_stuck = False
            def cudaHostRegister(self, *_):
                if self.is_stuck:
                    os.write(writer, b"s")
                    os.read(done_reader, 1)
                return 0
            def cudaHostUnregister(self, *_): return 0
        torch.cuda.answers = Driver()
        r = region()
        stuck = os.fork()
        if stuck == 0:
            # A process of its own, with a region of its own.
            Driver.is_stuck = True
            mine = region()
            status = 0 if not mine.is_creator and mine.pin_memory() else 1
            mine.cleanup()
            os._exit(status)
        os.read(reader, 1)
        other = region()
        assert other.pin_memory() and r.pin_memory()
        other.cleanup()
        late = region()
        assert not late.is_creator
        late.cleanup()
        r.unpin_memory()
        assert os.waitpid(stuck, os.WNOHANG) == (0, 0), "it was to be stuck all the time"
        os.write(done_writer, b"d")
        assert os.waitstatus_to_exitcode(os.waitpid(stuck, 0)[1]) == 0
        r.cleanup()
        """,
        torch_says=True,
    )


@pytest.mark.case("PI-10", "PI-02")
def test_a_group_steps_back_to_unpinned_together(run: Callable[..., Any]) -> None:
    """One rank was refused: the others take their registration back and go on, and may try again later."""
    run(
        """
        one, two = region(), region()
        fake = Fake(path)
        results = [one.pin_memory()]
        fake.fail_register(1, 801, 1)
        results.append(two.pin_memory())
        assert [bool(result) for result in results] == [True, False]
        if not all(results):
            for r in (one, two):
                r.unpin_memory()
        assert not one.is_pinned and not two.is_pinned
        kinds = [c.kind for c in fake.calls()]
        assert kinds == ["register", "register", "unregister"], kinds
        memoryview(one)[0, 0] = 3
        assert memoryview(two)[0, 0] == 3
        assert one.pin_memory() and two.pin_memory()
        two.cleanup()
        one.cleanup()
        """
    )


@pytest.mark.case("PI-40")
def test_the_driver_meets_pages_that_are_there_already(run: Callable[..., Any]) -> None:
    """A page that is first touched inside the driver is touched by one thread under its lock: none is left to it."""
    run(
        """
        r = region(512, 7168)
        assert os.stat(r.path).st_blocks * 512 >= r.nbytes
        def resident():
            inside = False
            for line in open("/proc/self/smaps"):
                head = line.split()[0]
                if "-" in head and not head.endswith(":"):
                    low, high = (int(bound, 16) for bound in head.split("-"))
                    inside = low <= r._blocks_ptr < high
                elif inside and head == "Rss:":
                    return int(line.split()[1]) * 1024
        before = resident()
        assert before >= r.nbytes, before
        assert not Fake(path).calls()
        assert r.pin_memory()
        r.cleanup()
        """
    )
