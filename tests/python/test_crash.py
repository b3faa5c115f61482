"""SIGKILL, os._exit and plain exit: whatever is left, the next constructor heals it by itself."""

from __future__ import annotations

import errno
import os
import random
import time
from typing import Any

import pytest

from ec_shared_region import ECSharedRegion
from procs import SHM, path_of

MIB = 1 << 20
FILLED = "r = Region(id, n, b); ctypes.memset(r._blocks_ptr, 0x4f, n * b)"


def orphan(spawn: Any, engine_id: str, blocks: int = 4, block_bytes: int = 7168, region: str = "ours") -> None:
    """A real constructor in a real process, killed; its file is left behind, full of old bytes."""
    child = spawn(region)
    child.run(FILLED, id=engine_id, n=blocks, b=block_bytes)
    child.kill()
    assert path_of(engine_id).exists()


@pytest.mark.case("ST-23", "ST-02", "ST-20")
@pytest.mark.parametrize("mode", ["create_or_join", "create"])
@pytest.mark.parametrize(("blocks", "block_bytes"), [(4, 7168), (7, 7168), (1, 7168), (8, 3584)])
@pytest.mark.case("FR-52")
def test_the_next_constructor_is_creator_at_once_with_zero_bytes(
    spawn: Any, open_region: Any, engine_id: str, mode: str, blocks: int, block_bytes: int
) -> None:
    """G4, G5: same size, larger, smaller, and the same size in another geometry."""
    orphan(spawn, engine_id)
    region = open_region(engine_id, blocks, block_bytes, mode=mode, timeout=10)
    assert region.is_creator
    assert bytes(memoryview(region).cast("B")) == bytes(blocks * block_bytes)
    assert os.path.getsize(region.path) == blocks * block_bytes


def test_mode_join_never_adopts_an_orphan(spawn: Any, open_region: Any, engine_id: str) -> None:
    """A joiner asks for a live region: the dead one is not it, and its successor is."""
    orphan(spawn, engine_id)
    with pytest.raises(TimeoutError):
        ECSharedRegion(engine_id, 4, 7168, mode="join", timeout=0.1)
    joiner = spawn()
    joiner.start("r = Region(id, 4, 7168, mode='join'); bytes(memoryview(r).cast('B')[:4])", id=engine_id)
    assert not joiner.answered(0.05)
    open_region(engine_id, 4, 7168)
    assert joiner.result() == bytes(4)


LOOP = """
while True:
    r = Region(id, 512, 7168)
    ctypes.memset(r._blocks_ptr, 0x4f, 512 * 7168)
    r.cleanup()
"""
NO_TMPFILE = [{"call": "openat", "argument": 2, "bits": 0o20000000, "error": errno.EOPNOTSUPP}]


@pytest.mark.parametrize("rules", [[], NO_TMPFILE], ids=["kernel of today", "sandbox without O_TMPFILE"])
def test_the_creator_killed_at_random_moments(small_shm: Any, engine_id: str, rules: list[dict[str, Any]]) -> None:
    """Wherever the knife falls, the next one is creator at once, with zero bytes, whatever size it asks."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # shown when the test fails
    rng = random.Random(seed)
    shm = small_shm("size=8m")
    heir = shm.spawn()
    for _ in range(25):
        victim = shm.spawn(refuse=rules)
        victim.start(LOOP, id=engine_id)
        time.sleep(rng.uniform(0, 0.02))  # the random moment itself, not a synchronisation
        victim.kill()
        blocks = rng.choice([512, 600, 100])
        assert heir.run(
            "r = Region(id, n, 7168, timeout=10); r.is_creator, any(memoryview(r).cast('B'))", id=engine_id, n=blocks
        ) == (True, False)
        heir.run("r.cleanup()")
        assert shm.names() == []
    assert shm.free_bytes() == 8 * MIB


@pytest.mark.case("ST-16")
def test_two_loops_killed_at_random_moments_under_a_third(small_shm: Any, engine_id: str) -> None:
    """G5 with peers alive: whichever of two dies at any step, the third goes on without an error."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    shm = small_shm("size=8m")
    survivor = shm.spawn()
    survivor.run("stop = False; rounds = 0; problem = None")
    survivor.run(
        """
def work():
    global rounds, problem
    try:
        while not stop:
            with Region(id, 64, 7168, timeout=10) as r:
                assert r.nbytes == 64 * 7168
            rounds += 1
    except BaseException as error:
        problem = repr(error)
thread = threading.Thread(target=work)
thread.start()
""",
        id=engine_id,
    )
    for _ in range(15):
        victims = [shm.spawn().ready(), shm.spawn().ready()]
        for victim in victims:
            victim.start("while True:\n    with Region(id, 64, 7168): pass", id=engine_id)
        time.sleep(rng.uniform(0, 0.03))  # as above
        for victim in victims:
            victim.kill()
    survivor.run("stop = True; thread.join(20)")
    assert survivor.run("problem, thread.is_alive(), rounds > 0") == (None, False, True)
    survivor.run("Region(id, 1, 64).cleanup()", id=engine_id)
    assert shm.names() == []
    assert shm.free_bytes() == 8 * MIB


@pytest.mark.case("ST-01", "ST-05", "ST-13", "OB-05")
@pytest.mark.case("FR-50")
def test_orphans_of_other_ids_are_reclaimed(spawn: Any, open_region: Any, new_id: Any) -> None:
    """Fresh ids at every start would never meet the old name: construction sweeps."""
    dead = [new_id() for _ in range(3)]
    for engine_id in dead:
        orphan(spawn, engine_id)
    orphan(spawn, (of_original := new_id()), region="original")
    open_region(new_id(), 2, 64)
    for engine_id in [*dead, of_original]:
        assert not path_of(engine_id).exists()


@pytest.mark.case("ST-01", "ST-11")
@pytest.mark.case("FR-51")
def test_a_crash_loop_is_no_loop(small_shm: Any, new_id: Any) -> None:
    """Room for one and a half regions: the restart under another id has to reclaim first to fit."""
    shm = small_shm("size=3m")
    first = shm.spawn()
    first.run("r = Region(id, 2, 1 << 20)", id=new_id())
    assert shm.free_bytes() == MIB
    first.kill()
    second = shm.spawn()
    assert second.run("r = Region(id, 2, 1 << 20); r.is_creator", id=new_id()) is True
    assert shm.free_bytes() == MIB
    second.run("r.cleanup()")
    assert shm.free_bytes() == 3 * MIB
    assert shm.names() == []


@pytest.mark.case("ST-02", "ST-10", "ST-20")
@pytest.mark.parametrize("death", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "os.abort()"])
def test_twenty_deaths_keep_within_one_region(small_shm: Any, new_id: Any, death: str) -> None:
    shm = small_shm("size=8m")
    for _ in range(20):
        child = shm.spawn()
        child.run(
            "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); r = Region(id, 1, 1 << 20)", id=new_id()
        )
        child.start(death)
        child.wait()
        assert shm.free_bytes() >= 7 * MIB
    with_region = shm.spawn()
    with_region.run("r = Region(id, 1, 4096); r.cleanup()", id=new_id())
    assert shm.names() == []
    assert shm.free_bytes() == 8 * MIB


@pytest.mark.case("ST-08")
def test_a_live_region_of_another_engine_is_left_alone(spawn: Any, open_region: Any, new_id: Any) -> None:
    other = new_id()
    neighbour = spawn()
    neighbour.run("r = Region(id, 2, 64); memoryview(r)[0, 0] = 5", id=other)
    inode = path_of(other).stat().st_ino
    for _ in range(5):
        with ECSharedRegion(new_id(), 2, 64):
            pass
    assert path_of(other).stat().st_ino == inode
    assert neighbour.run("memoryview(r)[0, 0]") == 5
    joiner = open_region(other, 2, 64)
    assert memoryview(joiner)[0, 0] == 5
    joiner.cleanup()
    neighbour.run("r.cleanup()")


@pytest.mark.case("ST-17")
@pytest.mark.case("FR-49")
def test_another_users_orphan_is_left_alone(
    as_root: None, spawn: Any, open_region: Any, new_id: Any, litter: Any
) -> None:
    foreign = litter(path_of(new_id()))
    foreign.write_bytes(b"theirs")
    foreign.chmod(0o600)
    os.chown(foreign, 1234, 1234)
    assert open_region(new_id(), 2, 64).is_creator
    child = spawn(uid=1000)
    assert child.run("r = Region(id, 2, 64); r.is_creator", id=new_id()) is True
    child.run("r.cleanup()")
    assert foreign.read_bytes() == b"theirs"
    assert foreign.stat().st_uid == 1234


def test_names_without_our_prefix_are_left_alone(open_region: Any, new_id: Any, litter: Any) -> None:
    names = ["vllm_ec_other.txt", "vllm_other.mmap", "x_vllm_ec_a.mmap", "torch_1", "vllm_ec_dir.mmap"]
    paths = [litter(SHM / f"{name}") for name in names]
    for path in paths[:-1]:
        path.write_bytes(b"theirs")
    paths[-1].mkdir()
    open_region(new_id(), 2, 64)
    assert all(path.exists() for path in paths)


def test_waiters_take_over_from_a_killed_creator(spawn: Any, engine_id: str) -> None:
    """A joiner by mode waits for a region; the first creator dies, a later one is met."""
    orphan(spawn, engine_id)
    waiter = spawn()
    waiter.start("r = Region(id, 4, 7168, mode='join'); bytes(memoryview(r).cast('B')[:2])", id=engine_id)
    assert not waiter.answered(0.05)
    creator = spawn()
    assert creator.run("r = Region(id, 4, 7168, mode='create'); r.is_creator", id=engine_id) is True
    assert waiter.result(timeout=10) == bytes(2)
    waiter.run("r.cleanup()")
    creator.run("r.cleanup()")


@pytest.mark.case("LI-13", "ST-10")
@pytest.mark.parametrize(
    "holding",
    [
        "r = Region(id, 2, 64)",
        "r = Region(id, 2, 64); view = memoryview(r)",
        "import numpy; r = Region(id, 2, 64); array = numpy.asarray(r)",
        "r = Region(id, 2, 64); cycle = [r]; cycle.append(cycle)",
        "r = Region(id, 2, 64); import builtins; builtins.kept = r",
        "r = Region(id, 2, 64); threading.Thread(target=time.sleep, args=(30,), daemon=True).start()",
        "class Derived(Region): pass\nr = Derived(id, 2, 64); r.me = r",
    ],
    ids=["plain", "view", "numpy", "cycle", "builtins", "daemon thread", "subclass cycle"],
)
@pytest.mark.case("FR-46")
def test_interpreter_exit_without_cleanup(spawn: Any, engine_id: str, holding: str) -> None:
    """No call at all: exit code 0, nothing on stderr, and the name is gone or at least free to be reclaimed."""
    child = spawn()
    child.run(holding, id=engine_id)
    assert path_of(engine_id).exists()
    assert child.finish() == 0
    assert child.stderr == ""
    assert not path_of(engine_id).exists()


def test_interpreter_exit_with_a_tensor(spawn: Any, engine_id: str) -> None:
    pytest.importorskip("torch")
    child = spawn()
    child.run("r = Region(id, 2, 64); t = r.blocks[1]; t[0] = 1", id=engine_id)
    assert child.finish() == 0
    assert child.stderr == ""
    assert not path_of(engine_id).exists()


@pytest.mark.parametrize("waited_before", [False, True])
@pytest.mark.parametrize(
    "waiting",
    ["target=Region, args=(id, 2, 64), kwargs={'mode': 'join'}", "target=_wait_for_file_size, args=(file, 1)"],
    ids=["constructor", "_wait_for_file_size"],
)
def test_interpreter_exit_while_a_daemon_thread_waits(
    spawn: Any, engine_id: str, tmp_path: Any, waiting: str, waited_before: bool
) -> None:
    """The thread finds the interpreter gone when its wait wants to look for signals: no abort, no panic's text."""
    child = spawn()
    child.run(
        """
from ec_shared_region import _wait_for_file_size
file = os.open(path, os.O_CREAT | os.O_RDWR)
class Slow:
    # Torn down after the interpreter has begun to end, when no other thread may have the GIL any more
    # (so the thread must keep no reference to these globals, or they are not torn down at all).
    def __del__(self, sleep=time.sleep):
        sleep(0.2)
slow = Slow()
""",
        path=str(tmp_path / "file"),
    )
    if waited_before:
        child.run("try: Region(id, 2, 64, mode='join', timeout=0.1)\nexcept TimeoutError: pass", id=engine_id)
    child.run(f"threading.Thread({waiting}, daemon=True).start()", id=engine_id)
    assert child.finish() == 0
    assert child.stderr == ""


@pytest.mark.parametrize("ending", ["raise SystemExit(3)", "sys.exit(3)"])
def test_exit_status_is_the_scripts_own(spawn: Any, engine_id: str, ending: str) -> None:
    child = spawn()
    child.run("r = Region(id, 2, 64)", id=engine_id)
    child.start(ending)
    assert child.wait() == 3
    assert child.stderr == ""
    assert not path_of(engine_id).exists()
