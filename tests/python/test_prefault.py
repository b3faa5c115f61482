"""The ladder of preparing: which pages a region is made of, by how many threads, on which nodes, told to whom.

And what a joiner sees of it: it comes in at publication, and gets no byte that is not backed.
"""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from procs import LOGGED, ChildDied, error_of, path_of, wait_until

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")
MADV_COLLAPSE = 25
REFUSE_COLLAPSE = {"call": "madvise", "argument": 2, "equals": MADV_COLLAPSE, "error": errno.EINVAL}
HUGE_PAGE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
HUGE_PAGE = int(HUGE_PAGE_FILE.read_text()) if HUGE_PAGE_FILE.exists() else 0
# Two huge pages, a tail that is no whole page, and rows that are no page multiple.
BLOCKS, BLOCK_SIZE = 613, 7168
TOTAL = BLOCKS * BLOCK_SIZE
WHOLE = TOTAL - TOTAL % HUGE_PAGE if HUGE_PAGE else 0

needs_huge_pages = pytest.mark.skipif(
    not 0 < HUGE_PAGE <= TOTAL // 2, reason=f"huge pages of {HUGE_PAGE} bytes: none, or too large for a quick test"
)

REPORT = "(p := r.prefault_report, (p.tier, p.method, p.huge_bytes, p.base_bytes, p.threads, p.fallback))[1]"
MAKE = f"r = Region(id, {BLOCKS}, {BLOCK_SIZE}, **options); {REPORT}"
ALLOCATED = "os.stat(r._mmap_path).st_blocks * 512"


def rounded(size: int) -> int:
    return (size + PAGE - 1) // PAGE * PAGE


def gives_no_huge_pages(child: Any) -> bool:
    return "[deny]" in child.run("open('/sys/kernel/mm/transparent_hugepage/shmem_enabled').read()")


@needs_huge_pages
@pytest.mark.case("NU-08")
@pytest.mark.parametrize("option", ["", "huge=never", "huge=advise", "huge=within_size", "huge=always"])
@pytest.mark.parametrize("wish", ["auto", "require", "off"])
def test_every_mount_and_wish(small_shm: Any, engine_id: str, option: str, wish: str) -> None:
    """Huge pages where they may be, never a byte more than asked for, zeroed, and joined at the same alignment."""
    shm = small_shm(",".join(filter(None, ["size=64m", option])))
    creator, joiner = shm.spawn(), shm.spawn()
    if gives_no_huge_pages(creator):
        pytest.skip("shmem_enabled is deny on this machine")
    tier, method, huge, base, threads, fallback = creator.run(MAKE, id=engine_id, options={"huge_pages": wish})
    gives = option in ("huge=advise", "huge=within_size", "huge=always")
    if wish == "off":
        assert (tier, huge, fallback) == ("base", 0, "huge pages are switched off")
    else:
        assert (tier, huge, fallback) == ("mount" if gives else "collapse", WHOLE, None)
    assert huge + base == TOTAL
    assert method == "populate_write" and threads == 1
    assert creator.run(ALLOCATED) == rounded(TOTAL)
    assert creator.run("any(memoryview(r).cast('B'))") is False

    tier, method, huge, base, _, _ = joiner.run(MAKE, id=engine_id, options={"populate": "join"})
    assert (tier, method) == ("none", "populate_read")
    assert (huge, base) == ((0, TOTAL) if wish == "off" else (WHOLE, TOTAL - WHOLE))
    for child in (creator, joiner):
        assert child.run("r._blocks_ptr") % HUGE_PAGE == 0
    creator.run("memoryview(r)[612, 7167] = 5")
    assert joiner.run("memoryview(r)[612, 7167]") == 5
    creator.run("r.cleanup()")
    joiner.run("r.cleanup()")
    assert (shm.names(), shm.free_bytes()) == ([], 64 * MIB)


@needs_huge_pages
@pytest.mark.case("NU-08")
@pytest.mark.parametrize("option", ["huge=never", "huge=advise", "huge=within_size", "huge=always"])
@pytest.mark.parametrize("populate", ["create", "never"])
@pytest.mark.parametrize("size", [100, HUGE_PAGE - 1, HUGE_PAGE + 1])
def test_no_mount_makes_a_region_larger(small_shm: Any, engine_id: str, option: str, populate: str, size: int) -> None:
    child = small_shm(f"size=64m,{option}").spawn()
    child.run("r = Region(id, 1, size, populate=populate)", id=engine_id, size=size, populate=populate)
    assert child.run(ALLOCATED) == rounded(size)
    assert child.run("any(memoryview(r).cast('B'))") is False
    assert child.run(ALLOCATED) == rounded(size)
    child.run("r.cleanup()")


@needs_huge_pages
@pytest.mark.case("PI-41", "NU-10")
def test_a_kernel_without_collapse_is_base_pages_and_no_warning(spawn: Any, engine_id: str) -> None:
    child = spawn(refuse=[REFUSE_COLLAPSE])
    child.run(LOGGED)
    tier, _, huge, base, _, fallback = child.run(MAKE, id=engine_id, options={})
    assert (tier, huge, base) == ("base", 0, TOTAL)
    assert "Invalid argument" in fallback
    assert child.run(ALLOCATED) == rounded(TOTAL)
    assert not [text for level, text in child.run("records") if level == "WARNING"]
    child.run("r.cleanup()")


@needs_huge_pages
def test_required_huge_pages_that_are_not_there_are_an_error_with_numbers(
    spawn: Any, open_region: Any, engine_id: str
) -> None:
    child = spawn(refuse=[REFUSE_COLLAPSE])
    error = error_of(child, MAKE, id=engine_id, options={"huge_pages": "require"})
    assert {"NoHugePagesError", "RegionError", "OSError"} <= set(error.classes)
    assert error.errno == errno.ENOMEM and error.filename == str(path_of(engine_id))
    assert f"0 of {WHOLE} bytes" in error.text and "\nhint: " in error.text
    assert not path_of(engine_id).exists()
    small = error_of(child, "Region(id, 1, 64, huge_pages='require')", id=engine_id)
    assert "NoHugePagesError" in small.classes and "smaller than a huge page" in small.text
    # Who joins places nothing, so it requires nothing.
    open_region(engine_id, 4, 64)
    assert child.run("r = Region(id, 4, 64, huge_pages='require'); r.is_creator", id=engine_id) is False
    child.run("r.cleanup()")


@pytest.mark.case("PI-40")
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_the_work_and_end_with_it(large_shm: Any, engine_id: str, threads: int) -> None:
    child = large_shm.spawn()
    before = child.run("len(os.listdir('/proc/self/task'))")
    report = child.run(
        "r = Region(id, 96, 1 << 20, prefault_threads=threads); " + REPORT, id=engine_id, threads=threads
    )
    assert report[4] == threads
    assert child.run(ALLOCATED) == 96 * MIB
    assert child.run("any(memoryview(r).cast('B'))") is False
    assert child.run("len(os.listdir('/proc/self/task'))") == before
    child.run("r.cleanup()")


def test_threads_that_cannot_be_started_are_done_without(large_shm: Any, engine_id: str) -> None:
    child = large_shm.spawn(uid=61234, imports=("resource",))
    code = """
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
r = Region(id, 96, 1 << 20, prefault_threads=4)
r.prefault_report.threads
"""
    assert child.run(code, id=engine_id) == 1
    child.run("r.cleanup()")


@pytest.mark.parametrize("size", [1, PAGE, 96 * MIB])
def test_progress_grows_to_the_whole(large_shm: Any, engine_id: str, size: int) -> None:
    child = large_shm.spawn()
    code = "seen = []; r = Region(id, 1, size, progress=lambda done, total: seen.append((done, total))); seen"
    seen = child.run(code, id=engine_id, size=size)
    assert [total for _, total in seen] == [size] * len(seen)
    done = [done for done, _ in seen]
    assert done == sorted(done) and done[-1] == size
    # A reservation alone is progress too.
    child.run("r.cleanup()")
    assert child.run(code.replace("1, size,", "1, size, populate='never',"), id=engine_id, size=size)[-1] == (
        size,
        size,
    )
    child.run("r.cleanup()")


def test_what_progress_raises_ends_the_constructor_and_leaves_nothing(large_shm: Any, engine_id: str) -> None:
    child = large_shm.spawn()
    code = """
def progress(done, total):
    if done > 32 << 20:
        raise KeyError("enough")
Region(id, 256, 1 << 20, progress=progress)
"""
    error = error_of(child, code, id=engine_id)
    assert error.classes[0] == "KeyError" and "enough" in error.text
    assert large_shm.names() == []
    assert child.run("'/dev/shm/' in open('/proc/self/maps').read()") is False


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"huge_pages": "maybe"}, "ValueError"),
        ({"huge_pages": True}, "TypeError"),
        ({"numa": "left"}, "ValueError"),
        ({"numa": -1}, "ValueError"),
        ({"numa": 1.0}, "TypeError"),
        ({"numa": 99_999}, "ValueError"),
        ({"prefault_threads": 0}, "ValueError"),
        ({"prefault_threads": "2"}, "TypeError"),
        ({"progress": 3}, "TypeError"),
    ],
)
def test_bad_options(spawn: Any, engine_id: str, options: dict[str, Any], kind: str) -> None:
    error = error_of(spawn(), "Region(id, 1, 64, **options)", id=engine_id, options=options)
    assert kind in error.classes and "RegionError" in error.classes and "\nhint: " in error.text
    assert next(iter(options)) in error.text
    assert not path_of(engine_id).exists()


@pytest.mark.case("NU-01", "NU-07")
@pytest.mark.parametrize(("numa", "policy"), [("interleave", "interleave"), (0, "prefer")])
def test_the_policy_is_set_before_a_page_is_placed(spawn: Any, engine_id: str, numa: Any, policy: str) -> None:
    """On a machine of several nodes each of them gets its share; on any machine the file has the policy."""
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel knows no NUMA policies")
    child = spawn()
    child.run(LOGGED)
    child.run("r = Region(id, 64, 1 << 20, numa=numa, huge_pages='off')", id=engine_id, numa=numa)
    if [text for level, text in child.run("records") if level == "WARNING"]:
        pytest.skip("a sandbox refuses mbind here")
    lines = child.run("open('/proc/self/numa_maps').read()").splitlines()
    address = f"{child.run('r._blocks_ptr'):x}"
    line = next(line for line in lines if line.startswith(address))
    assert policy in line.split()[1], line
    nodes = [name for name in os.listdir("/sys/devices/system/node") if name[4:].isdigit()]
    shares = {part[0]: int(part[1]) for part in (field.split("=") for field in line.split()) if part[0][0] == "N"}
    if numa == "interleave" and len(nodes) > 1:
        assert len(shares) > 1 and min(shares.values()) * 2 > max(shares.values()), line
    child.run("r.cleanup()")


@pytest.mark.case("NU-01", "NU-04", "NU-05")
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("numa", ["interleave", 0])
def test_a_sandbox_that_refuses_the_policy_is_one_calm_line(spawn: Any, engine_id: str, error: int, numa: Any) -> None:
    child = spawn(refuse=[{"call": "mbind", "error": error}])
    child.run(LOGGED)
    child.run("r = Region(id, 64, 7168, numa=numa)", id=engine_id, numa=numa)
    warnings = [text for level, text in child.run("records") if level == "WARNING"]
    assert len(warnings) == 1 and "NUMA" in warnings[0] and "hint: " in warnings[0]
    assert child.run("any(memoryview(r).cast('B'))") is False
    child.run("r.cleanup()")
    # Who does not ask makes no such call.
    child.run("records.clear(); r = Region(id, 64, 7168)", id=engine_id)
    assert not [text for level, text in child.run("records") if level == "WARNING"]
    child.run("r.cleanup()")


# A creator at work: its progress callback keeps it there until it is told to go on.
SLOW_CREATOR = """
go = threading.Event()
def progress(done, total):
    go.wait()
thread = threading.Thread(target=lambda: globals().update(r=Region(id, 512, 7168, progress=progress)))
thread.start()
"""


def creator_at_work(spawn: Any, engine_id: str) -> Any:
    creator = spawn()
    creator.run(SLOW_CREATOR, id=engine_id)
    wait_until(path_of(engine_id).exists, "the region has its name")
    return creator


def test_a_joiner_comes_in_at_publication_and_waits_for_the_backing(spawn: Any, engine_id: str) -> None:
    creator = creator_at_work(spawn, engine_id)
    joiner, ahead = spawn(), spawn().ready()
    assert joiner.run("r = Region(id, 512, 7168); (r.is_creator, r.is_ready)", id=engine_id) == (False, False)
    assert joiner.run("r.check().problems") == ()
    ahead.start("r = Region(id, 512, 7168, populate='join'); r.is_ready", id=engine_id)
    joiner.start("r.blocks.shape == (512, 7168)")
    assert not joiner.answered(0.3) and not ahead.answered()
    creator.run("go.set(); thread.join()")
    assert joiner.result() is True and ahead.result() is True
    assert joiner.run("r.is_ready") is True
    creator.run("memoryview(r)[3, 4] = 5")
    assert joiner.run("r.blocks[3, 4].item()") == 5
    for child in (creator, joiner, ahead):
        child.run("r.cleanup()")


@pytest.mark.parametrize(
    "use",
    [
        "r.blocks",
        "memoryview(r)",
        "r._mmap_obj",
        "r._blocks_ptr",
        "r.wait_until_ready()",
        "__import__('numpy').asarray(r)",
    ],
)
def test_every_use_of_the_bytes_waits_up_to_the_timeout(spawn: Any, engine_id: str, use: str) -> None:
    creator = creator_at_work(spawn, engine_id)
    joiner = spawn()
    joiner.run("r = Region(id, 512, 7168, timeout=0.2)", id=engine_id)
    error = error_of(joiner, use)
    assert "TimeoutError" in error.classes and "RegionError" in error.classes
    assert "being prepared" in error.text and "\nhint: " in error.text
    creator.run("go.set(); thread.join()")
    joiner.run(use + "; None")
    for child in (creator, joiner):
        child.run("r.cleanup()")


@pytest.mark.parametrize("gone", ["killed", "failed"])
def test_a_creator_that_goes_leaves_the_rest_to_those_who_are_in(spawn: Any, engine_id: str, gone: str) -> None:
    """Who waits learns of it at once, backs the pages itself, and goes on with those that joined before it."""
    creator = creator_at_work(spawn, engine_id)
    joiners = [spawn() for _ in range(3)]
    for joiner in joiners:
        joiner.run("r = Region(id, 512, 7168)", id=engine_id)
        joiner.start("view = memoryview(r); any(view.cast('B'))")
    if gone == "killed":
        creator.kill()
    else:
        creator.run("def progress(*_): raise KeyError('no')\ngo.set()")
        creator.run("thread.join()")
    assert [joiner.result() for joiner in joiners] == [False] * 3
    assert os.stat(path_of(engine_id)).st_blocks * 512 >= 512 * 7168
    joiners[0].run("view[1, 2] = 3")
    assert joiners[1].run("view[1, 2]") == 3
    if gone == "failed":
        creator.run("r.cleanup()")
    for joiner in joiners:
        joiner.run("view.release(); r.cleanup()")
    assert not path_of(engine_id).exists()


def test_room_that_is_gone_when_a_joiner_must_back_the_pages_is_an_error(small_shm: Any, engine_id: str) -> None:
    """No bus error, no byte that is not backed: the filesystem was filled while the creator was at work."""
    shm = small_shm("size=16m")
    creator = shm.spawn()
    creator.run(SLOW_CREATOR.replace("512, 7168", "12, 1 << 20"), id=engine_id)
    wait_until(lambda: shm.names() != [], "the region has its name")
    joiner = shm.spawn()
    joiner.run("r = Region(id, 12, 1 << 20)", id=engine_id)
    shm.anchor.run("open('/dev/shm/neighbour', 'wb').write(bytes(8 << 20)); None")
    creator.kill()
    error = error_of(joiner, "memoryview(r)")
    assert {"NoSpaceError", "OSError"} <= set(error.classes) and error.errno == errno.ENOSPC
    shm.anchor.run("os.unlink('/dev/shm/neighbour')")
    assert joiner.run("any(memoryview(r).cast('B'))") is False
    joiner.run("r.cleanup()")
    assert shm.names() == []


def test_cleanup_ends_a_wait_in_another_thread(spawn: Any, engine_id: str) -> None:
    creator = creator_at_work(spawn, engine_id)
    joiner = spawn()
    code = """
r = Region(id, 512, 7168)
caught = []
def use():
    try:
        r.wait_until_ready()
    except ValueError as error:
        caught.append(str(error))
thread = threading.Thread(target=use)
thread.start()
time.sleep(0.1)
r.cleanup()
thread.join()
caught
"""
    assert "closed" in joiner.run(code, id=engine_id)[0]
    creator.run("go.set(); thread.join(); r.cleanup()")


def test_ctrl_c_ends_a_wait_for_the_backing(spawn: Any, engine_id: str) -> None:
    creator = creator_at_work(spawn, engine_id)
    joiner = spawn()
    joiner.run("r = Region(id, 512, 7168)", id=engine_id)
    joiner.start("r.wait_until_ready()")
    assert not joiner.answered(0.2)
    joiner.signal(signal.SIGINT)
    with pytest.raises((ChildDied, Exception)) as caught:
        joiner.result()
    assert "KeyboardInterrupt" in str(caught.value)
    creator.run("go.set(); thread.join(); r.cleanup()")


def test_a_forked_child_may_wait_for_the_backing_too(spawn: Any, engine_id: str) -> None:
    creator = creator_at_work(spawn, engine_id)
    joiner = spawn()
    code = """
r = Region(id, 512, 7168)
child = os.fork()
if child == 0:
    os._exit(7 if not any(memoryview(r).cast('B')) else 1)
time.sleep(0.1)
"""
    joiner.run(code, id=engine_id)
    creator.run("go.set(); thread.join()")
    assert joiner.run("os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])") == 7
    for each in (joiner, creator):
        each.run("r.cleanup()")


@pytest.mark.parametrize("threads", [1, 3])
def test_a_callback_that_forks_makes_a_child_that_does_not_wait_for_threads_it_lacks(
    large_shm: Any, engine_id: str, threads: int
) -> None:
    creator = large_shm.spawn()
    code = """
import signal
child = None
def progress(done, total):
    global child
    if child is None:
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # a child that hangs dies of it
try:
    r = Region(id, 96, 1 << 20, prefault_threads=threads, progress=progress)
except BaseException as error:
    if child != 0:
        raise
    mapped = id in open("/proc/self/maps").read()
    os._exit(7 if "forked" in str(error) and not mapped else 8)
os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
    assert creator.run(code, id=engine_id, threads=threads) == 7
    assert creator.run("any(memoryview(r).cast('B'))") is False
    assert len(large_shm.names()) == 1
    creator.run("r.cleanup()")
