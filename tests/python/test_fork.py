"""A forked child is not a second owner; an exec'ed child has nothing of the region at all."""

from __future__ import annotations

import fcntl
import os
import select
import signal
from typing import Any

import pytest

from procs import path_of, try_lock_exclusive

FORK = """
def forked(work):
    '''Runs `work` in a forked child, which then ends by os._exit, and gives the exit status.'''
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
r = Region(id, 2, 64)
memoryview(r)[0, 0] = 5
"""


def assert_still_the_parents(parent: Any, spawn: Any, engine_id: str, inode: int) -> None:
    """The file, its bytes and the lock are there, and a third process meets the same region."""
    assert path_of(engine_id).stat().st_ino == inode
    assert not try_lock_exclusive(path_of(engine_id))
    assert parent.run("r.is_creator, memoryview(r)[0, 0]") == (True, 5)
    third = spawn()
    assert third.run("r = Region(id, 2, 64); r.is_creator, memoryview(r)[0, 0]", id=engine_id) == (False, 5)
    third.run("r.cleanup()")
    parent.run("r.cleanup()")
    assert not path_of(engine_id).exists()


@pytest.mark.case("FO-01", "FO-02")
@pytest.mark.parametrize(
    "work",
    ["r.cleanup()", "r.__exit__(None, None, None)", "globals().pop('r')", "None", "view = memoryview(r); r.cleanup()"],
)
def test_a_forked_childs_end_disturbs_nothing(spawn: Any, engine_id: str, work: str) -> None:
    parent = spawn()
    parent.run(FORK, id=engine_id)
    inode = path_of(engine_id).stat().st_ino
    assert parent.run(f"def work():\n    {work}\nforked(work)") == 0
    assert_still_the_parents(parent, spawn, engine_id, inode)


@pytest.mark.case("FO-01")
@pytest.mark.case("FR-45")
def test_a_forked_childs_normal_exit_disturbs_nothing(spawn: Any, engine_id: str) -> None:
    """The whole interpreter of the child is torn down, with the region in it."""
    parent = spawn()
    parent.run(FORK, id=engine_id)
    inode = path_of(engine_id).stat().st_ino
    assert (
        parent.run("pid = os.fork()\nif pid == 0: sys.exit(0)\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])") == 0
    )
    assert_still_the_parents(parent, spawn, engine_id, inode)
    assert parent.finish() == 0
    assert parent.stderr == ""


@pytest.mark.case("FO-01")
def test_multiprocessing_by_fork(spawn: Any, engine_id: str) -> None:
    parent = spawn(imports=("multiprocessing",))
    parent.run(FORK, id=engine_id)
    inode = path_of(engine_id).stat().st_ino
    assert parent.run(
        """
def work():
    memoryview(r)[1, 0] = 9
    r.cleanup()
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
child.exitcode, memoryview(r)[1, 0]
"""
    ) == (0, 9)
    assert_still_the_parents(parent, spawn, engine_id, inode)


def test_the_original_in_a_forked_child_unlinks_the_parents_file(spawn: Any, engine_id: str) -> None:
    parent = spawn("original")
    parent.run("r = Region(id, 2, 64)", id=engine_id)
    parent.run("pid = os.fork()\nif pid == 0:\n    r.cleanup()\n    os._exit(0)\nos.waitpid(pid, 0)[1]")
    assert not path_of(engine_id).exists()


def test_a_forked_child_may_use_the_bytes_after_the_parent_left(spawn: Any, engine_id: str) -> None:
    parent = spawn()
    parent.run(FORK, id=engine_id)
    status = parent.run(
        """
go, go_here = os.pipe()
pid = os.fork()
if pid == 0:
    os.read(go, 1)
    os._exit(0 if memoryview(r)[0, 0] == 5 else 1)
r.cleanup()
os.write(go_here, b"g")
os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    )
    assert status == 0
    assert not path_of(engine_id).exists()


def test_a_forked_child_makes_regions_of_its_own(spawn: Any, new_id: Any) -> None:
    parent = spawn()
    parent.run(FORK, id=new_id())
    other = new_id()
    assert (
        parent.run(
            "def work():\n    own = Region(other, 2, 64)\n    assert own.is_creator\n    own.cleanup()\n"
            "    assert not os.path.exists(own._mmap_path)\nforked(work)",
            other=other,
        )
        == 0
    )
    assert not path_of(other).exists()
    parent.run("r.cleanup()")


def test_a_forked_child_may_join_its_parents_region(spawn: Any, engine_id: str) -> None:
    """Its own object is a joiner like any other, and its end takes nothing from the parent."""
    parent = spawn()
    parent.run(FORK, id=engine_id)
    inode = path_of(engine_id).stat().st_ino
    assert (
        parent.run(
            "def work():\n    own = Region(id, 2, 64)\n    assert not own.is_creator\n"
            "    assert memoryview(own)[0, 0] == 5\n    own.cleanup()\n    r.cleanup()\nforked(work)",
            id=engine_id,
        )
        == 0
    )
    assert_still_the_parents(parent, spawn, engine_id, inode)


def test_a_forked_child_does_not_unregister(spawn: Any, engine_id: str) -> None:
    """G11: the registration is the parent's; a fake runtime counts who asks it."""
    pytest.importorskip("torch")
    parent = spawn(imports=("torch",))
    if parent.run("torch.cuda.is_available()"):
        pytest.skip("a real CUDA driver answers here, the fake would not be asked")
    parent.run(FORK, id=engine_id)
    parent.run(
        """
class Fake:
    calls = []
    def cudaHostRegister(self, *a): return 0
    def cudaHostUnregister(self, *a): self.calls.append(os.getpid()); return 0
fake = Fake()
torch.cuda.is_available = lambda: True
torch.cuda.cudart = lambda: fake
r.pin_memory()
"""
    )
    assert parent.run("r.is_pinned") is True
    assert parent.run("def work():\n    r.cleanup()\n    assert Fake.calls == []\nforked(work)") == 0
    parent.run("r.cleanup()")
    assert parent.run("Fake.calls == [os.getpid()]") is True


@pytest.mark.case("FO-05")
def test_the_descriptor_is_closed_on_exec(open_region: Any, engine_id: str) -> None:
    for region in (open_region(engine_id, 2, 64), open_region(engine_id, 2, 64)):
        assert fcntl.fcntl(region._fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert not os.get_inheritable(region._fd)


@pytest.mark.case("FO-04")
def test_an_execed_child_does_not_keep_the_region_alive(spawn: Any, open_region: Any, engine_id: str) -> None:
    """Popen with close_fds=False, then SIGKILL of the creator: reclaimable at once though the other lives on."""
    creator = spawn()
    execed = creator.run(
        "r = Region(id, 2, 64); p = subprocess.Popen(['sleep', '60'], stdin=subprocess.DEVNULL,"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False); p.pid",
        id=engine_id,
    )
    alive = os.pidfd_open(execed)  # before the kill: afterwards the number is nobody's to rely on
    try:
        creator.kill()
        region = open_region(engine_id, 2, 64, timeout=10)
        assert region.is_creator
        assert not select.select([alive], [], [], 0)[0], "it must have lived on for this to mean anything"
    finally:
        signal.pidfd_send_signal(alive, signal.SIGKILL)
        os.close(alive)
