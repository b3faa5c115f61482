"""A control group's memory limit: warned of with numbers before a byte is charged, and not enforced by us."""

from __future__ import annotations

from typing import Any

import pytest

MIB = 1 << 20

FAKE_CONTROL_GROUP = """
import ctypes, logging
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mount(b"none", b"/sys/fs/cgroup", b"tmpfs", 0, b"size=1m") == 0, os.strerror(ctypes.get_errno())
for line in open("/proc/self/cgroup"):
    _, controllers, path = line.strip().split(":", 2)
    if controllers == "":
        folder, limit, current = "/sys/fs/cgroup" + path, "memory.max", "memory.current"
    elif "memory" in controllers.split(","):
        folder, limit, current = "/sys/fs/cgroup/memory" + path, "memory.limit_in_bytes", "memory.usage_in_bytes"
    else:
        continue
    os.makedirs(folder, exist_ok=True)
    open(folder + "/" + limit, "w").write(f"{limit_bytes}\\n")
    open(folder + "/" + current, "w").write(f"{current_bytes}\\n")

records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append((record.levelname, record.getMessage()))
logging.getLogger("ec_shared_region").addHandler(Keep())
logging.getLogger("ec_shared_region").setLevel(logging.INFO)
"""


@pytest.mark.case("CA-19")
def test_a_limit_that_would_be_passed_is_one_warning_with_three_numbers(small_shm: Any, engine_id: str) -> None:
    child = small_shm("size=16m").spawn()
    child.run(FAKE_CONTROL_GROUP, limit_bytes=5 * MIB, current_bytes=3 * MIB)
    child.run("r = Region(id, 4, 1 << 20); j = Region(id, 4, 1 << 20)", id=engine_id)
    records = child.run("records")
    (warning,) = [text for level, text in records if level == "WARNING"]
    for number in (4 * MIB, 3 * MIB, 5 * MIB):
        assert str(number) in warning
    assert "hint:" in warning
    assert records[0][0] == "WARNING", "it must come before the pages are charged"
    child.run("j.cleanup(); r.cleanup()")


def test_a_region_that_fits_the_limit_is_no_warning(small_shm: Any, engine_id: str) -> None:
    child = small_shm("size=16m").spawn()
    child.run(FAKE_CONTROL_GROUP, limit_bytes=8 * MIB, current_bytes=3 * MIB)
    child.run("r = Region(id, 4, 1 << 20); r.cleanup()", id=engine_id)
    assert not [text for level, text in child.run("records") if level == "WARNING"]
