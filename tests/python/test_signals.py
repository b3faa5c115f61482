"""Signals in the middle of things: Ctrl-C is prompt and leaves nothing, a storm of timers changes nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from procs import ChildError, path_of, wait_until

MIB = 1 << 20
PROMPT = 10  # seconds; the wait that is cut short would last 30


def is_asleep(pid: int) -> bool:
    """Asleep at most of many looks: the main thread is in its wait, which may poll, not on the way to it."""
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for _ in range(50)]
    return states.count("S") > 40


def interrupt(child: Any) -> ChildError:
    child.signal(signal.SIGINT)
    with pytest.raises(ChildError) as caught:
        child.result(timeout=PROMPT)
    return caught.value


@pytest.mark.parametrize("what", ["no file", "unsized original"])
def test_ctrl_c_while_a_joiner_waits(spawn: Any, engine_id: str, what: str, litter: Any) -> None:
    """G12: KeyboardInterrupt out of the wait, with nothing left open, and the process usable after."""
    holder = None
    if what == "unsized original":
        holder = os.open(litter(path_of(engine_id)), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    child = spawn()
    before = child.run("len(os.listdir('/proc/self/fd'))")
    child.start("Region(id, 8, 64, mode='join' if missing else 'create_or_join')", id=engine_id, missing=holder is None)
    assert not child.answered(0.05)
    wait_until(lambda: is_asleep(child.pid), "the joiner waits")
    error = interrupt(child)
    assert error.classes[0] == "KeyboardInterrupt"
    assert child.run("len(os.listdir('/proc/self/fd'))") == before
    assert child.run("'/dev/shm/' in open('/proc/self/maps').read()") is False
    if holder is not None:
        assert os.fstat(holder).st_size == 0, "a failed attach touches nothing"
        os.close(holder)
        path_of(engine_id).unlink()
    assert child.run("r = Region(id, 8, 64); r.is_creator", id=engine_id) is True
    child.run("r.cleanup()")


def test_ctrl_c_in_wait_for_file_size(spawn: Any, tmp_path: Any) -> None:
    child = spawn()
    child.run(
        "from ec_shared_region import _wait_for_file_size; f = os.open(path, os.O_CREAT | os.O_RDWR)",
        path=str(tmp_path / "file"),
    )
    child.start("_wait_for_file_size(f, expected_size=1)")
    assert not child.answered(0.05)
    wait_until(lambda: is_asleep(child.pid), "the wait")
    assert interrupt(child).classes[0] == "KeyboardInterrupt"


def test_a_handled_signal_does_not_end_a_wait(spawn: Any, open_region: Any, engine_id: str, tmp_path: Path) -> None:
    """A Python handler runs during the wait, not after it, and the wait goes on to its region."""
    child = spawn()
    flag = tmp_path / "the handler ran"
    child.run("signal.signal(signal.SIGUSR1, lambda *a: open(flag, 'w').close())", flag=str(flag))
    child.start("r = Region(id, 8, 64, mode='join'); r.is_creator", id=engine_id)
    assert not child.answered(0.05)
    wait_until(lambda: is_asleep(child.pid), "the joiner waits")
    child.signal(signal.SIGUSR1)
    wait_until(flag.exists, "the handler ran")
    assert not child.answered(0.05)
    open_region(engine_id, 8, 64)
    assert child.result(timeout=PROMPT) is False
    child.run("r.cleanup()")


def test_a_handler_that_raises_ends_the_wait_with_its_error(spawn: Any, engine_id: str) -> None:
    """The alarm of a supervisor's own deadline."""
    child = spawn()
    child.run("def late(*a): raise InterruptedError('my deadline')\nsignal.signal(signal.SIGALRM, late)")
    child.start("signal.setitimer(signal.ITIMER_REAL, 0.05); Region(id, 8, 64, mode='join')", id=engine_id)
    with pytest.raises(ChildError) as caught:
        child.result(timeout=PROMPT)
    assert caught.value.text == "my deadline"
    assert not path_of(engine_id).exists()


def test_ctrl_c_during_a_long_preparation(large_shm: Any, engine_id: str) -> None:
    """Half a GiB is being reserved and populated: no name, no page of it is left."""
    free = large_shm.free_bytes()
    child = large_shm.spawn().ready()
    child.start("r = Region(id, 512, 1 << 20)", id=engine_id)
    wait_until(lambda: large_shm.free_bytes() < free - 32 * MIB, "the preparation has begun")
    child.signal(signal.SIGINT)
    try:
        child.result(timeout=PROMPT)
    except ChildError as error:
        assert error.classes[0] == "KeyboardInterrupt"
    else:
        # A fast machine was done first; then the interrupt came with the next bytecode or comes here.
        with pytest.raises(ChildError):
            child.run("time.sleep(5)")
        child.run("r.cleanup()")
    assert large_shm.names() == []
    assert large_shm.free_bytes() == free
    assert child.run("'/dev/shm/' in open('/proc/self/maps').read()") is False


@pytest.mark.case("PO-10", "PO-13", "PO-14")
@pytest.mark.parametrize("kernel", ["today's", "old"])
def test_a_storm_of_timers_during_construction(large_shm: Any, engine_id: str, kernel: str) -> None:
    """A profiler's timer each millisecond, with a Python handler: pieces are retried, nothing starts anew for ever."""
    import errno

    old = [{"call": "madvise", "argument": 2, "equals": 23, "error": errno.EINVAL}]
    child = large_shm.spawn(refuse=old if kernel == "old" else [])
    child.run(
        """
ticks = 0
def tick(*a):
    global ticks
    ticks += 1
signal.signal(signal.SIGALRM, tick)
signal.signal(signal.SIGPROF, tick)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
try:
    r = Region(id, 256, 1 << 20)
finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_PROF, 0)
""",
        id=engine_id,
    )
    assert child.run("r.is_creator, os.stat(r._mmap_path).st_blocks * 512 >= r.nbytes") == (True, True)
    assert child.run("ticks") > 0
    child.run("ctypes.memset(r._blocks_ptr, 1, r.nbytes); r.cleanup()")


@pytest.mark.case("PO-10", "PO-13", "PO-14")
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ("today's", {}),
        ("today's", {"huge_pages": "off", "prefault_threads": 1}),
        ("today's", {"populate": "never"}),
        ("old", {"huge_pages": "off"}),
    ],
    ids=["as it comes", "base pages, one thread", "reserved only", "touched"],
)
def test_a_storm_of_timers_while_4_gib_are_prepared(
    roomy_shm: Any, engine_id: str, kernel: str, options: dict[str, Any]
) -> None:
    """Thousands of interruptions, each of which runs Python code: it ends, every byte backed and none beside."""
    import errno

    old = [{"call": "madvise", "argument": 2, "equals": 23, "error": errno.EINVAL}]  # MADV_POPULATE_WRITE
    child = roomy_shm.spawn(refuse=old if kernel == "old" else [])
    child.run(
        """
ticks = 0
def tick(*a):
    global ticks
    ticks += 1
    sum(range(50))
signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
try:
    r = Region(id, 4096, 1 << 20, timeout=150, **options)
finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
""",
        timeout=150,
        id=engine_id,
        options=options,
    )
    # Python runs between pieces, so that many signals are one call of the handler.
    assert child.run("ticks") > 10, "it was not interrupted while it prepared"
    assert child.run("r.is_creator, os.stat(r._mmap_path).st_blocks * 512 == r.nbytes") == (True, True)
    # At either end and in the middle: a page that is there and zero, and takes a byte.
    offsets = [0, (2 << 30) + 7, (4 << 30) - 1]
    peek = "[ctypes.c_char.from_address(r._blocks_ptr + at).value for at in offsets]"
    assert child.run(peek, offsets=offsets) == [b"\0"] * 3
    child.run("for at in offsets: ctypes.memset(r._blocks_ptr + at, 1, 1)", offsets=offsets)
    child.run("r.cleanup()", timeout=60)
    assert roomy_shm.names() == []


def test_ctrl_c_in_a_holder_leaves_no_name(spawn: Any, engine_id: str) -> None:
    """The usual end of a run by hand: KeyboardInterrupt unwinds the script."""
    child = spawn()
    child.run("r = Region(id, 8, 64)", id=engine_id)
    child.start("signal.signal(signal.SIGINT, signal.default_int_handler)\nwhile True: time.sleep(0.001)")
    assert not child.answered(0.02)
    child.signal(signal.SIGINT)
    with pytest.raises(ChildError):
        child.result()
    assert child.finish() == 0
    assert not path_of(engine_id).exists()
