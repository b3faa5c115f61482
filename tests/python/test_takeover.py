"""Who may take a region away: not a creator that fails with joiners inside, not a child, not a process that dies."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import procs

PATIENCE_SECONDS = 60


def inode_of(path: str) -> int:
    return os.stat(path).st_ino


@pytest.mark.case("CR-05")
def test_a_creator_that_is_interrupted_while_it_prefaults_leaves_its_joiners_the_region(
    large_shm: Any, engine_id: str
) -> None:
    creator, joiner, third = (large_shm.spawn() for _ in range(3))
    for child in (joiner, third):
        child.run("import ec_shared_region")
    creator.run(
        """
r, constructing = None, True
def interrupt(number, frame):
    if constructing:
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupt)
"""
    )
    creator.start(
        "try: r = Region(id, 512, 1 << 20)\nexcept KeyboardInterrupt: pass\nconstructing = False", id=engine_id
    )
    # A joiner comes in as soon as every byte is reserved, which is before every page is mapped ahead.
    joiner.run("j = Region(id, 512, 1 << 20)", id=engine_id)
    os.kill(creator.pid, signal.SIGINT)
    creator.result(timeout=PATIENCE_SECONDS)
    third.run("t = Region(id, 512, 1 << 20)", id=engine_id)
    assert third.run("os.fstat(t._fd).st_ino") == joiner.run("os.fstat(j._fd).st_ino"), "a twin"
    third.run("t.cleanup()")
    joiner.run("j.cleanup()")
    creator.run("r and r.cleanup()")
    assert large_shm.names() == []


@pytest.mark.case("FO-01")
@pytest.mark.parametrize("ending", ["os._exit(0)", "raise SystemExit(0)", "return"])
def test_a_handler_that_forks_during_the_constructor_makes_no_second_owner(
    large_shm: Any, engine_id: str, ending: str
) -> None:
    child = large_shm.spawn()
    child.run(
        f"""
def handler(number, frame):
    global forked
    signal.setitimer(signal.ITIMER_REAL, 0)
    forked = os.fork()
    if forked == 0:
        {ending}
signal.signal(signal.SIGALRM, handler)
"""
    )
    child.run(
        """
me = os.getpid()
signal.setitimer(signal.ITIMER_REAL, 0.02)
try:
    r = Region(id, 400, 1 << 20)
except BaseException as error:
    if os.getpid() != me:
        os._exit(0)
    raise
if os.getpid() != me:
    r.cleanup()
    os._exit(1)
os.waitpid(forked, 0)
""",
        id=engine_id,
        timeout=PATIENCE_SECONDS,
    )
    assert child.run("os.path.exists(r.path) and os.fstat(r._fd).st_nlink == 1")
    child.run("r.cleanup()")
    assert large_shm.names() == []


@pytest.mark.case("FO-01")
def test_a_fork_in_another_thread_does_not_inherit_a_constructor_at_work(large_shm: Any, engine_id: str) -> None:
    parent, other = large_shm.spawn(), large_shm.spawn()
    other.run("import ec_shared_region")
    forked = parent.run(
        """
threading.Thread(target=lambda: Region(id, 600, 1 << 20), daemon=True).start()
while not os.path.exists(f"/dev/shm/vllm_ec_{id}.mmap"):
    pass
pid = os.fork()
if pid == 0:
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 1)  # the parent's end is seen by the end of its output
    os.dup2(nothing, 2)
    time.sleep(300)
    os._exit(0)
pid
""",
        id=engine_id,
    )
    try:
        parent.kill()
        assert other.run("r = Region(id, 64, 4096, timeout=20); r.is_creator", id=engine_id, timeout=PATIENCE_SECONDS)
        other.run("r.cleanup()")
    finally:
        os.kill(forked, signal.SIGKILL)


@pytest.mark.case("LI-07")
@pytest.mark.parametrize("view", ["memoryview(j)", "memoryview(j._mmap_obj)"])
def test_the_last_view_of_a_dead_creators_region_takes_the_name(spawn: Any, engine_id: str, view: str) -> None:
    creator, joiner = spawn(), spawn()
    creator.run("r = Region(id, 2, 64)", id=engine_id)
    joiner.run(f"j = Region(id, 2, 64); view = {view}", id=engine_id)
    creator.kill()
    joiner.run("j.cleanup()")
    assert joiner.run("os.path.exists(j.path)"), "the view still uses it"
    joiner.run("view.release(); del view")
    assert not joiner.run("os.path.exists(j.path)")


@pytest.mark.case("MN-02")
@pytest.mark.parametrize("options", ["", ", mode='create'"])
def test_a_region_whose_holder_is_dying_is_waited_for(large_shm: Any, engine_id: str, options: str) -> None:
    """A killed process holds its memory until it is unmapped; another shape must not fail on that."""
    holder, successor = large_shm.spawn(), large_shm.spawn()
    holder.run("r = Region(id, 512, 1 << 20)", id=engine_id)
    successor.run("import ec_shared_region")
    os.kill(holder.pid, signal.SIGKILL)
    assert successor.run(f"s = Region(id, 64, 4096{options}); s.is_creator", id=engine_id, timeout=PATIENCE_SECONDS)
    successor.run("s.cleanup()")
    holder.close()


def test_two_threads_in_one_constructor_leave_no_nameless_region(spawn: Any, engine_id: str) -> None:
    child = spawn()
    child.run(
        """
def work(region):
    go.wait()
    try:
        region.__init__(id, 2, 64)
    except RuntimeError:
        refused.append(1)
refused = []
for _ in range(50):
    region = Region.__new__(Region)
    go = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(region,)) for _ in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert os.fstat(region._fd).st_nlink == 1
    region.cleanup()
assert len(refused) == 50
""",
        id=engine_id,
    )


def test_a_timeout_beyond_all_floats_is_an_error_of_ours(spawn: Any, engine_id: str) -> None:
    error = procs.error_of(spawn(), "Region(id, 2, 64, timeout=10**400)", id=engine_id)
    assert "RegionError" in error.classes and "ValueError" in error.classes
