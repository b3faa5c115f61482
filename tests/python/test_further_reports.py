"""What public reports of other programs came to here: surroundings that nobody foresaw, and words that help."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ec_shared_region as ec
from ec_shared_region import ECSharedRegion
from procs import SHM, ChildError, error_of, is_mapped, path_of

COLLECT_LOG = """
import logging
class Collect(logging.Handler):
    def emit(self, record):
        lines.append((record.levelname, record.getMessage()))
lines = []
logging.getLogger('ec_shared_region').addHandler(Collect())
logging.getLogger('ec_shared_region').setLevel(logging.DEBUG)
"""
MAP_SHARED = 1


@pytest.fixture
def small_shm(small_shm: Callable[..., Any]) -> Any:
    """One of 8 MiB."""
    return small_shm("size=8m")


def lines_of(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [line for line in caplog.messages if word in line]


# Descriptors


@pytest.mark.case("FR-01", "FR-02")
def test_a_daemon_that_closes_all_descriptors(small_shm: Any, engine_id: str) -> None:
    """The numbers belong to others then: they are not closed, and not used. The bytes stay, and the name goes."""
    child = small_shm.spawn()
    child.run(COLLECT_LOG)
    child.run("r = Region(id, 4, 4096); v = memoryview(r)", id=engine_id)
    child.run(
        "ours = [int(f) for f in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + f)"
        " and os.readlink('/proc/self/fd/' + f).startswith('/dev/shm')]\n"
        "null = os.open('/dev/null', os.O_RDWR)\n"
        "for f in ours: os.dup2(null, f)"
    )
    assert child.run("len(ours)") >= 2  # the directory and the file
    child.run("v[0, 0] = 3")
    for call in ("r.check()", "r.identity()"):
        error = error_of(child, call)
        assert error.errno == errno.EBADF
        assert error.hint is not None and "closed all descriptors" in error.hint
    # Another process still joins the memory.
    other = small_shm.spawn()
    other.run("r = Region(id, 4, 4096)", id=engine_id)
    assert other.run("memoryview(r)[0, 0]") == 3
    other.run("r.cleanup()")
    assert child.run("v.release(); r.cleanup(); [level for level, _ in lines if level == 'WARNING']") == ["WARNING"]
    assert small_shm.names() == []
    assert child.run("{os.readlink(f'/proc/self/fd/{f}') for f in ours}") == {"/dev/null"}


@pytest.mark.case("FR-03")
@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1, 2)])
@pytest.mark.case("FR-35")
def test_a_region_never_takes_the_number_of_a_standard_stream(small_shm: Any, engine_id: str, closed: Any) -> None:
    """Else what a library prints would be written into block 0."""
    child = small_shm.spawn().ready()
    child.run("for f in closed: os.close(f)", closed=closed)
    child.run("r = Region(id, 4, 4096); j = Region(id, 4, 4096)", id=engine_id)
    assert child.run("[f for f in (0, 1, 2) if os.path.exists(f'/proc/self/fd/{f}')]") == sorted({0, 1, 2} - {*closed})
    assert child.run("r._fd > 2 and j._fd > 2")
    child.run("r.cleanup(); j.cleanup()")
    child.run("for f in closed: os.open('/dev/null', os.O_RDWR)", closed=closed)


@pytest.mark.case("FR-04", "FR-05")
def test_no_descriptor_is_left_for_it(small_shm: Any, engine_id: str) -> None:
    """At every number of descriptors short: an error with the remedy, and nothing behind."""
    child = small_shm.spawn().ready()
    child.run("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))")
    child.run(
        "taken = []\ntry:\n    while True: taken.append(os.open('/dev/null', os.O_RDONLY))\nexcept OSError: pass",
    )
    for _ in range(12):
        try:
            child.run("Region(id, 4, 4096).cleanup()", id=engine_id)
            break
        except ChildError as error:
            assert error.errno == errno.EMFILE, error.text
            assert error.hint is not None and "ulimit -n" in error.hint
            assert small_shm.names() == []
        child.run("os.close(taken.pop())")
    else:
        pytest.fail("twelve descriptors are not enough for a region")
    child.run("for f in taken: os.close(f)")


# Names


@pytest.mark.case("FR-06", "FR-07")
@pytest.mark.parametrize("end", ["\nERROR forged", "\x1b[2J\x1b[31m", "\r", "\x7f", "\x9b31m", "\u202egpj", "\u2028"])
def test_a_name_is_obeyed_by_no_terminal(
    engine_id: str, end: str, open_region: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "ec_shared_region")
    region = open_region(engine_id + end, 4, 128)
    assert region.engine_id == engine_id + end and region.path == str(path_of(engine_id + end))
    with pytest.raises(ec.GeometryMismatchError) as caught:
        ECSharedRegion(engine_id + end, 8, 64)
    with pytest.raises(ec.RegionNotFoundError) as missing:
        ECSharedRegion(f"not-{engine_id}", 8, 64, mode="join", timeout=0)
    region.cleanup()
    shown = [*caplog.messages, *str(caught.value).split("\nhint: "), *str(missing.value).split("\nhint: ")]
    assert len(lines_of(caplog, engine_id)) >= 2
    assert not any(end in text or "\n" in text or not text.isprintable() for text in shown), shown


@pytest.mark.case("FR-08", "FR-09")
@pytest.mark.parametrize(
    "end", ["%s%d%n", "{0}{x}", " ", "\\", "'\"`", "~*?", "-rf", "\u65e5\u672c", "\u00e9", "e\u0301"]
)
def test_an_odd_name_is_a_name(engine_id: str, end: str, open_region: Callable[..., Any]) -> None:
    """Formats nothing, globs nothing, and two spellings of one letter are two names."""
    name = engine_id + end
    creator, joiner = open_region(name, 4, 64), open_region(name, 4, 64)
    assert (creator.is_creator, joiner.is_creator) == (True, False)
    assert path_of(name).exists()
    assert [entry for entry in os.listdir(SHM) if engine_id in entry] == [path_of(name).name]


@pytest.mark.case("FR-09")
def test_numeric_ids_are_text(open_region: Callable[..., Any], engine_id: str) -> None:
    first, second = open_region(f"{engine_id}007", 4, 64), open_region(f"{engine_id}7", 8, 64)
    assert first.is_creator and second.is_creator
    with pytest.raises(TypeError, match="engine_id"):
        ECSharedRegion(7, 4, 64)  # type: ignore[arg-type]


def test_a_text_that_shows_itself_as_something_else(open_region: Callable[..., Any], engine_id: str) -> None:
    class Liar(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "../elsewhere"

    region = open_region(Liar(engine_id), 4, 64)
    assert type(region.engine_id) is str and region.path == str(path_of(engine_id))


# The filesystem


@pytest.mark.case("FR-10", "FR-11")
def test_a_directory_on_a_disk_is_one_warning(small_shm: Any, engine_id: str) -> None:
    """A bind mount of a folder, as some container tools make: it works, and says why it is slow."""
    folder = tempfile.mkdtemp(dir="/var/tmp")
    try:
        child = small_shm.spawn().ready()
        kind = child.run(
            "libc = __import__('ctypes').CDLL(None)\n"
            "assert libc.unshare(0x20000) == 0 and libc.mount(b'none', b'/', None, 16384 | 1 << 18, None) == 0\n"
            "assert libc.mount(folder.encode(), b'/dev/shm', None, 4096, None) == 0\n"
            "open('/proc/mounts').read().split(' /dev/shm ')[-1].split()[0]",
            folder=folder,
        )
        if kind in {"tmpfs", "ramfs"}:
            pytest.skip("/var/tmp is in memory here")
        child.run(COLLECT_LOG)
        child.run("r = Region(id, 4, 4096); j = Region(id, 4, 4096); memoryview(r)[3, 5] = 7", id=engine_id)
        assert child.run("memoryview(j)[3, 5]") == 7
        warnings = child.run("[text for level, text in lines if level == 'WARNING']")
        assert len(warnings) == 1 and "not in memory" in warnings[0] and "\nhint: mount a tmpfs" in warnings[0]
        child.run("j.cleanup(); r.cleanup()")
        assert os.listdir(folder) == []
    finally:
        os.rmdir(folder)


def test_a_tmpfs_is_no_warning(
    open_region: Callable[..., Any], engine_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    open_region(engine_id, 4, 4096)
    assert not lines_of(caplog, "not in memory")


@pytest.mark.case("FR-12")
def test_a_quota_is_told_from_a_full_filesystem(small_shm: Any, engine_id: str) -> None:
    child = small_shm.spawn(refuse=[{"call": "fallocate", "error": errno.EDQUOT}]).ready()
    error = error_of(child, "Region(id, 4, 4096, populate='never')", id=engine_id)
    assert error.errno == errno.EDQUOT and error.classes[0] == "NoSpaceError"
    assert "not enough quota" in error.text
    assert error.hint is not None and "quota" in error.hint and "--shm-size" not in error.hint
    assert small_shm.names() == []


@pytest.mark.case("FR-12")
def test_a_quota_of_inodes(small_shm: Any, engine_id: str) -> None:
    o_tmpfile = 0o20000000
    child = small_shm.spawn(refuse=[{"call": "openat", "error": errno.EDQUOT, "argument": 2, "bits": o_tmpfile}])
    error = error_of(child, "Region(id, 4, 4096)", id=engine_id)
    assert error.errno == errno.EDQUOT and "not enough quota" in error.text


@pytest.mark.case("FR-13", "FR-14")
@pytest.mark.parametrize(
    ("call", "number", "word"),
    [
        ("mmap", errno.EACCES, "SELinux"),
        ("mmap", errno.EPERM, "security policy"),
        ("mmap", errno.EAGAIN, "ulimit -l"),
        ("mmap", errno.ENOMEM, "max_map_count"),
        ("flock", errno.ENOLCK, "flock"),
        ("flock", errno.ENOSYS, "flock"),
        ("ftruncate", errno.EINVAL, "tmpfs"),
    ],
)
@pytest.mark.case("FR-38")
def test_the_hint_goes_by_the_call_that_failed(
    small_shm: Any, engine_id: str, call: str, number: int, word: str
) -> None:
    rule: dict[str, Any] = {"call": call, "error": number}
    if call == "mmap":
        rule |= {"argument": 3, "equals": MAP_SHARED}
    child = small_shm.spawn(refuse=[rule])
    error = error_of(child, "Region(id, 4, 4096)", id=engine_id)
    assert error.errno == number and call in error.text
    assert error.hint is not None and word in error.hint
    assert small_shm.names() == []


@pytest.mark.case("FR-15", "FR-16")
@pytest.mark.parametrize("kind", ["a symlink to a tmpfs", "a symlink to nothing", "a file", "hugetlbfs"])
def test_what_else_dev_shm_may_be(small_shm: Any, engine_id: str, kind: str) -> None:
    child = small_shm.spawn(None).ready()
    child.run(
        "import ctypes\nfrom ec_shared_region import ECSharedRegion as Region\nlibc = ctypes.CDLL(None)\n"
        "def mount(kind, at, data=None): return libc.mount(b'none', at, kind, 0, data) == 0\n"
        "assert libc.unshare(0x20000) == 0 and libc.mount(b'none', b'/', None, 16384 | 1 << 18, None) == 0"
    )
    if kind == "hugetlbfs":
        if not child.run("mount(b'hugetlbfs', b'/dev/shm')"):
            pytest.skip("no hugetlbfs here")
        error = error_of(child, "Region(id, 4, 4096)", id=engine_id)
        assert error.hint is not None and "tmpfs" in error.hint
        return
    child.run("assert mount(b'tmpfs', b'/mnt', b'size=1m,mode=1777') and mount(b'tmpfs', b'/dev', b'size=64k')")
    if kind == "a symlink to a tmpfs":
        child.run("os.symlink('/mnt', '/dev/shm'); r = Region(id, 4, 4096); j = Region(id, 4, 4096)", id=engine_id)
        assert child.run("(r.is_creator, j.is_creator, os.listdir('/mnt'))") == (True, False, [path_of(engine_id).name])
        child.run("j.cleanup(); r.cleanup()")
        assert child.run("os.listdir('/mnt')") == []
        return
    child.run("os.symlink('/nothing', '/dev/shm')" if "symlink" in kind else "open('/dev/shm', 'w').close()")
    error = error_of(child, "Region(id, 4, 4096)", id=engine_id)
    assert "/dev/shm" in error.text
    assert error.hint is not None and "writable tmpfs" in error.hint


@pytest.mark.case("FR-17")
@pytest.mark.case("FR-39")
def test_a_directory_that_only_root_may_write_to(small_shm: Any, engine_id: str, as_root: None) -> None:
    """As a sandbox made it once: mode 0755."""
    small_shm.anchor.run("os.chmod('/dev/shm', 0o755)")
    child = small_shm.spawn(uid=65534)
    error = error_of(child, "Region(id, 4, 4096)", id=engine_id)
    assert error.errno == errno.EACCES and str(SHM) in error.text
    assert error.hint is not None and "1777" in error.hint


@pytest.mark.case("FR-18")
def test_without_proc(small_shm: Any, engine_id: str) -> None:
    """Opened, shared, identified and left without /proc."""
    child = small_shm.spawn().ready()
    child.run(
        "libc = __import__('ctypes').CDLL(None)\n"
        "assert libc.unshare(0x20000) == 0 and libc.mount(b'none', b'/', None, 16384 | 1 << 18, None) == 0\n"
        "assert libc.mount(b'none', b'/proc', b'tmpfs', 0, b'size=64k') == 0"
    )
    child.run("r = Region(id, 4, 4096); j = Region(id, 4, 4096); memoryview(r)[1, 1] = 5", id=engine_id)
    assert child.run("(memoryview(j)[1, 1], r.identity() == j.identity(), r.check().ok)") == (5, True, True)
    child.run("r.cleanup()")
    error = error_of(child, "j.identity()")
    assert "neither /proc nor the name" in error.text and error.hint is not None
    child.run("j.cleanup()")
    assert small_shm.names() == []


@pytest.mark.case("FR-42")
def test_without_ofd_locks(small_shm: Any, engine_id: str) -> None:
    """Opened and shared; what needs them says so."""
    rules = [{"call": "fcntl", "error": errno.EINVAL, "argument": 1, "equals": number} for number in (36, 37, 38)]
    child = small_shm.spawn(refuse=rules).ready()
    child.run("r = Region(id, 4, 4096); j = Region(id, 4, 4096); memoryview(r)[1, 1] = 5", id=engine_id)
    assert child.run("(r.is_creator, j.is_creator, memoryview(j)[1, 1])") == (True, False, 5)
    error = error_of(child, "j.identity()")
    assert "no OFD locks" in error.text and error.hint is not None and "OFD locks" in error.hint
    child.run("j.cleanup(); r.cleanup()")
    assert small_shm.names() == []


# The process


@pytest.mark.case("FR-19", "FR-20")
def test_a_core_file_leaves_the_region_out(open_region: Callable[..., Any], engine_id: str) -> None:
    """Also where the name is gone: such a mapping counts as anonymous, and is dumped by default."""
    regions = [open_region(engine_id, 600, 4096), open_region(engine_id, 600, 4096)]
    for region in regions:
        address = region._blocks_ptr
        assert is_mapped(address)
        flags = ""
        is_ours = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
                low, high = (int(bound, 16) for bound in line.split()[0].split("-"))
                is_ours = low <= address < high
            elif is_ours and line.startswith("VmFlags:"):
                flags = line
        assert " dd" in flags, flags


@pytest.mark.case("FR-21")
@pytest.mark.case("FR-44")
def test_a_sub_interpreter_is_refused_and_hangs_nobody() -> None:
    code = """
import _xxsubinterpreters as interpreters, sys
other = interpreters.create()
try:
    interpreters.run_string(other, "import ec_shared_region")
except interpreters.RunFailedError as error:
    print(error)
"""
    if sys.version_info >= (3, 13):
        pytest.skip("the module has another name there")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "sub-interpreter\nhint: " in done.stdout


@pytest.mark.case("FR-22")
def test_no_thread_is_left_by_a_construction(spawn: Any, engine_id: str) -> None:
    """Python 3.12 warns of a fork with threads: there are none of ours."""
    child = spawn()
    assert (
        child.run("r = Region(id, 4096, 4096, prefault_threads=4); len(os.listdir('/proc/self/task'))", id=engine_id)
        == 1
    )
    child.run("r.cleanup()")


@pytest.mark.case("FR-23")
def test_threads_that_cannot_be_started(small_shm: Any, engine_id: str, as_root: None) -> None:
    """A limit of processes (`ulimit -u`, a container's pids): fewer threads, and the same region."""
    child = small_shm.spawn().ready()
    # A user of its own: the limit counts all that the user runs.
    child.run("import resource, kernel; resource.setrlimit(resource.RLIMIT_NPROC, (1, 1)); kernel.become(61234)")
    child.run("r = Region(id, 128, 4096, prefault_threads=4, huge_pages='off')", id=engine_id)
    assert child.run("r.check().ok")
    child.run("r.cleanup()")


@pytest.mark.case("FR-24")
def test_a_zombie_holds_nothing(spawn: Any, engine_id: str) -> None:
    """Killed and not waited for by its parent: its pid is still there, and it is dead."""
    child = spawn()
    pid = child.run(
        "pid = os.fork()\n"
        "if pid == 0:\n    Region(id, 4, 4096); os.kill(os.getpid(), signal.SIGKILL)\n"
        "while open(f'/proc/{pid}/stat').read().split()[2] != 'Z': time.sleep(0.001)\n"
        "pid",
        id=engine_id,
    )
    assert Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    child.run("r = Region(id, 8, 64, timeout=5); assert r.is_creator; r.cleanup(); os.waitpid(pid, 0)", id=engine_id)


def test_a_working_directory_that_is_gone(spawn: Any, engine_id: str) -> None:
    child = spawn(None)
    child.run("import tempfile; d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)")
    child.run("from ec_shared_region import ECSharedRegion; r = ECSharedRegion(id, 4, 4096); r.cleanup()", id=engine_id)


@pytest.mark.parametrize("flags", [["-OO"], ["-W", "error"], ["-X", "dev"], ["-I"]])
def test_the_interpreters_switches_change_nothing(engine_id: str, flags: list[str]) -> None:
    code = f"from ec_shared_region import ECSharedRegion as R; r = R({engine_id!r}, 4, 64); r.cleanup(); r.cleanup()"
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.case("FR-53")
def test_a_holder_in_another_pid_namespace(small_shm: Any, new_id: Callable[[], str], as_root: None) -> None:
    """As in another container: seen alive by its locks, and dead as soon as it is; no pid has to mean anything."""
    engine_id, other_id = new_id(), new_id()
    child, other = small_shm.spawn().ready(), small_shm.spawn().ready()
    child.run("libc = __import__('ctypes').CDLL(None); assert libc.unshare(0x20000000) == 0")
    child.run(
        "reader, writer = os.pipe()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    assert os.getpid() == 1\n"
        "    r = Region(id, 4, 4096); os.write(writer, b'x'); time.sleep(3600)\n"
        "os.read(reader, 1); os.close(reader); os.close(writer)",
        id=engine_id,
    )
    assert error_of(other, "Region(id, 8, 64)", id=engine_id).classes[0] == "GeometryMismatchError"
    other.run("Region(id, 4, 64).cleanup()", id=other_id)  # and its sweep leaves the other alone
    assert small_shm.names() == [path_of(engine_id).name]
    child.run("os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)")
    assert other.run("r = Region(id, 8, 64); r.is_creator", id=engine_id)
    other.run("r.cleanup()")


@pytest.mark.case("FR-27", "FR-28")
def test_privileges_that_are_dropped_later(small_shm: Any, engine_id: str, as_root: None) -> None:
    """The file stays root's: `check` says so before somebody wonders, and the warning says who can remove it."""
    child = small_shm.spawn().ready()
    child.run(COLLECT_LOG)
    child.run("import kernel; r = Region(id, 4, 4096); kernel.become(65534)", id=engine_id)
    assert any("uid 65534" in problem for problem in child.run("r.check().problems"))
    child.run("r.cleanup()")
    warnings = child.run("[text for level, text in lines if level == 'WARNING']")
    assert len(warnings) == 1 and "next constructor of this user" in warnings[0]
    root = small_shm.spawn()
    root.run("r = Region(id, 4, 4096); assert r.is_creator; r.cleanup()", id=engine_id)
    assert small_shm.names() == []


@pytest.mark.case("FR-29", "FR-30")
def test_a_resource_tracker_that_takes_the_name(spawn: Any, engine_id: str, open_region: Callable[..., Any]) -> None:
    """Somebody opens the file by `multiprocessing.shared_memory`: its tracker unlinks what it never made."""
    region = open_region(engine_id, 4, 4096)
    memoryview(region)[0, 0] = 9
    name = path_of(engine_id).name
    code = f"from multiprocessing.shared_memory import SharedMemory; s = SharedMemory({name!r}); print(s.buf[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "9\n", done.stderr
    assert not path_of(engine_id).exists()
    found = region.check()
    assert found.name == "lost" and "late joiners will make another one" in found.problems[0]
    assert memoryview(region)[0, 0] == 9
    child = spawn()
    child.run("r = Region(id, 4, 4096)", id=engine_id)
    assert child.run("(r.is_creator, memoryview(r)[0, 0])") == (True, 0)
    region.cleanup()
    assert path_of(engine_id).exists(), "took the successor's name"
    child.run("r.cleanup()")


# What is said


@pytest.mark.case("FR-49")
def test_what_was_passed_over_is_a_line_at_debug(
    litter: Callable[[Path], Path],
    new_id: Callable[[], str],
    open_region: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    stranger = path_of(new_id())
    litter(stranger).mkdir()
    caplog.set_level("DEBUG", "ec_shared_region")
    open_region(new_id(), 4, 64)
    (line,) = lines_of(caplog, stranger.name)
    assert "it is a directory" in line
    assert [record.levelname for record in caplog.records if stranger.name in record.getMessage()] == ["DEBUG"]


@pytest.mark.parametrize("kind", ["memoryview", "numpy", "blocks", "torch.frombuffer", "nothing"])
@pytest.mark.case("FR-55")
def test_the_closing_line_says_what_keeps_the_memory(
    kind: str, open_region: Callable[..., Any], engine_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    import numpy
    import torch

    make: dict[str, Callable[[Any], Any]] = {
        "memoryview": memoryview,
        "numpy": numpy.asarray,
        "blocks": lambda region: region.blocks[1:3],
        "torch.frombuffer": lambda region: torch.frombuffer(region, dtype=torch.int8),
        "nothing": lambda region: None,
    }
    caplog.set_level("INFO", "ec_shared_region")
    region = open_region(engine_id, 4, 4096)
    view = make[kind](region)
    region.cleanup()
    (line,) = lines_of(caplog, "closed ")
    assert line.endswith(
        engine_id + ".mmap" if kind == "nothing" else "; held by 1 view, its memory stays until the last is gone"
    )
    del view


def test_a_closed_regions_buffer_has_a_hint(open_region: Callable[..., Any], engine_id: str) -> None:
    region = open_region(engine_id, 4, 4096)
    region.cleanup()
    with pytest.raises(BufferError, match="closed\nhint: open a new region"):
        memoryview(region)


@pytest.mark.case("FR-58")
def test_the_creators_line_says_what_room_is_left(small_shm: Any, engine_id: str) -> None:
    child = small_shm.spawn()
    child.run(COLLECT_LOG)
    child.run("r = Region(id, 16, 4096); j = Region(id, 16, 4096); r.cleanup(); j.cleanup()", id=engine_id)
    created, joined = child.run("[text for _, text in lines if text.startswith(('created', 'joined'))]")
    free = small_shm.free_bytes() - 16 * 4096
    assert f"; {free} of " in created and "bytes are left in /dev/shm" in created
    assert "are left" not in joined
