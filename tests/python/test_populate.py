"""Who prefaults what, what an old kernel makes of it, and what is left when it fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from procs import LOGGED, error_of, path_of

MIB = 1 << 20


def refuse_populate(error: int) -> list[dict[str, Any]]:
    """Both advices, populate for reading (22) and for writing (23), answer with that error."""
    return [{"call": "madvise", "argument": 2, "equals": advice, "error": error} for advice in (22, 23)]


OLD_KERNEL = refuse_populate(errno.EINVAL)
CONSTRUCT = "r = Region(id, 512, 7168, populate=populate); r.is_creator"


def mapped_in(pid: int, address: int) -> int:
    """Bytes of that mapping that the process has in its own page tables, by a walk of the kernel's over them."""
    found = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(bound, 16) for bound in head.split("-"))
            found = low <= address < high
        elif found and head == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("not mapped")


def in_page_tables(child: Any) -> int:
    return mapped_in(child.pid, child.run("r._blocks_ptr"))


@pytest.mark.case("PO-08", "CA-11")
@pytest.mark.parametrize(("populate", "all_pages"), [("create", True), ("join", True), ("never", False)])
def test_the_creator(spawn: Any, engine_id: str, populate: str, all_pages: bool) -> None:
    child = spawn()
    assert child.run(CONSTRUCT, id=engine_id, populate=populate) is True
    size = 512 * 7168
    assert os.stat(path_of(engine_id)).st_blocks * 512 >= size
    if all_pages:
        assert in_page_tables(child) >= size
    else:
        assert in_page_tables(child) <= size // 16
    child.run("r.cleanup()")


@pytest.mark.case("CA-11")
@pytest.mark.parametrize(("populate", "all_pages"), [("create", False), ("join", True), ("never", False)])
@pytest.mark.parametrize("kernel", [[], OLD_KERNEL], ids=["kernel of today", "old kernel"])
def test_a_joiner(
    spawn: Any, open_region: Any, engine_id: str, populate: str, all_pages: bool, kernel: list[dict[str, Any]]
) -> None:
    """It pays no page tables unless asked to, and not a byte changes."""
    creator = open_region(engine_id, 512, 7168)
    pattern = bytes(range(256)) * (512 * 7168 // 256)
    memoryview(creator).cast("B")[:] = memoryview(pattern).cast("b").cast("B")
    child = spawn(refuse=kernel)
    assert child.run(CONSTRUCT, id=engine_id, populate=populate) is False
    if all_pages:
        assert in_page_tables(child) >= 512 * 7168
    else:
        assert in_page_tables(child) <= 512 * 7168 // 16
    assert bytes(memoryview(creator).cast("B")) == pattern
    assert child.run("bytes(memoryview(r).cast('B'))") == pattern
    child.run("r.cleanup()")


@pytest.mark.case("PO-01", "PO-02", "PO-04", "PO-07")
def test_an_old_kernel_is_a_slower_start_and_one_line_in_the_log(spawn: Any, engine_id: str) -> None:
    """Before Linux 5.14 the advice is unknown: EINVAL. Each page is touched instead, truly written."""
    child = spawn(refuse=OLD_KERNEL)
    child.run(LOGGED)
    assert child.run(CONSTRUCT, id=engine_id, populate="create") is True
    assert in_page_tables(child) >= 512 * 7168
    assert child.run("any(memoryview(r).cast('B'))") is False
    assert len([text for _, text in child.run("records") if "touch" in text]) == 1, child.run("records")
    child.run("r.cleanup()")


@pytest.mark.case("PO-01")
def test_the_original_on_an_old_kernel_falls_back_too(spawn: Any, engine_id: str) -> None:
    child = spawn("original", refuse=OLD_KERNEL)
    child.run("r = Region(id, 512, 7168)", id=engine_id)
    assert in_page_tables(child) >= 512 * 7168
    child.run("r.cleanup()")


def test_bytes_written_during_a_joiners_populate_survive(spawn: Any, engine_id: str) -> None:
    """The touch of a page must not put an old byte back over a peer's store."""
    creator, joiner = spawn(), spawn(refuse=OLD_KERNEL).ready()
    creator.run(
        """
r = Region(id, 512, 7168)
view = memoryview(r).cast("B")
stop = False
lost = 0
def count():
    # Each page's first byte is this thread's alone; whoever puts an old value back is caught.
    global lost
    pages = range(0, len(view), mmap.PAGESIZE)
    value = 0
    while not stop:
        value = value % 200 + 1
        for at in pages:
            view[at] = value
        lost += sum(view[at] != value for at in pages)
thread = threading.Thread(target=count)
thread.start()
""",
        id=engine_id,
    )
    for _ in range(20):
        joiner.run("r = Region(id, 512, 7168, populate='join'); r.cleanup()", id=engine_id)
    assert creator.run("stop = True; thread.join(); lost") == 0
    creator.run("del view; r.cleanup()")


@pytest.mark.case("PO-02", "ST-07")
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOMEM, errno.EHWPOISON if hasattr(errno, "EHWPOISON") else 133])
def test_another_error_is_an_error_and_leaves_nothing(spawn: Any, open_region: Any, engine_id: str, error: int) -> None:
    """Only EINVAL means an old kernel. No file, no descriptor and no mapping stay; nobody unlinks by hand."""
    child = spawn(refuse=refuse_populate(error))
    caught = error_of(child, CONSTRUCT, id=engine_id, populate="create")
    assert "OSError" in caught.classes and "RegionError" in caught.classes
    assert caught.errno == error
    assert caught.filename == str(path_of(engine_id))
    assert not path_of(engine_id).exists()
    assert child.run("'/dev/shm/' in open('/proc/self/maps').read()") is False
    assert (
        child.run(
            "[n for n in os.listdir('/proc/self/fd') if os.path.exists(p := f'/proc/self/fd/{n}')"
            " and '/dev/shm' in os.readlink(p)]"
        )
        == []
    )
    assert open_region(engine_id, 512, 7168).is_creator


def test_the_original_leaves_its_file_there(spawn: Any, engine_id: str, litter: Any) -> None:
    child = spawn("original", refuse=refuse_populate(errno.EIO))
    assert error_of(child, "Region(id, 8, 64)", id=engine_id).errno == errno.EIO
    assert litter(path_of(engine_id)).exists()


def test_a_joiner_whose_populate_fails_leaves_the_region_to_its_owner(
    spawn: Any, open_region: Any, engine_id: str
) -> None:
    """G7: a failed attach touches nothing."""
    creator = open_region(engine_id, 8, 7168)
    memoryview(creator)[0, 0] = 4
    child = spawn(refuse=refuse_populate(errno.EIO))
    error = error_of(child, "r = Region(id, 8, 7168, populate='join')", id=engine_id)
    assert error.errno == errno.EIO
    assert path_of(engine_id).exists()
    assert memoryview(open_region(engine_id, 8, 7168))[0, 0] == 4


@pytest.mark.case("PI-41", "NU-10")
def test_no_huge_page_advice_by_default(spawn: Any, engine_id: str) -> None:
    """The kernel would answer it with EIO here, and construction is none the wiser."""
    huge = {"call": "madvise", "argument": 2, "equals": 14, "error": errno.EIO}
    child = spawn(refuse=[huge])
    child.run(LOGGED)
    assert child.run(CONSTRUCT, id=engine_id, populate="create") is True
    assert {level for level, _ in child.run("records")} == {"INFO"}
    child.run("r.cleanup()")


@pytest.mark.case("PO-11")
def test_fallocate_that_lacks_memory_is_told_from_lacking_space(spawn: Any, engine_id: str) -> None:
    child = spawn(refuse=[{"call": "fallocate", "error": errno.ENOMEM}])
    error = error_of(child, CONSTRUCT, id=engine_id, populate="create")
    assert error.errno == errno.ENOMEM
    assert "NoSpaceError" in error.classes
    assert not path_of(engine_id).exists()
