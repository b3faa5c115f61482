"""What /proc says of a soak's processes: who maps what, who holds a lock, who is left."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

SHM = Path("/dev/shm")
DELETED = " (deleted)"


def device() -> str:
    """The file system of /dev/shm, as /proc/PID/maps and /proc/locks write it."""
    number = os.stat(SHM).st_dev
    return f"{os.major(number):02x}:{os.minor(number):02x}"


def room_bytes() -> float:
    """Free bytes in /dev/shm. A tmpfs without a limit says that it has none at all, statfs(2)."""
    room = os.statvfs(SHM)
    return room.f_bavail * room.f_frsize if room.f_blocks else math.inf


def mapped_regions(pid: int | str, prefix: str) -> list[tuple[str, int, bool]]:
    """Name, inode and "the name is gone" of every region file that the process maps. Empty where it is gone itself."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if f"/dev/shm/{prefix}" in line:
                fields = line.split(maxsplit=5)
                path = fields[5]
                name = path.removesuffix(DELETED).removeprefix("/dev/shm/")
                found.append((name, int(fields[4]), path.endswith(DELETED)))
    return found


def region_descriptors(pid: int | str) -> list[str]:
    """Descriptors of files in /dev/shm, or of /dev/shm itself."""
    found = []
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{number}")
                if target.startswith("/dev/shm"):
                    found.append(f"{number} -> {target}")
    return found


def names(prefix: str) -> dict[str, int]:
    """Names of the soak's files with their inodes."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(SHM) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                with contextlib.suppress(OSError):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_ino
    return found


def locks(on_device: str, inodes: set[int] | None) -> list[str]:
    """Lines of /proc/locks for these inodes of a device, or for any of it."""
    found = []
    for line in Path("/proc/locks").read_text().splitlines():
        where = next((field for field in line.split() if field.startswith(f"{on_device}:")), None)
        if where is not None and (inodes is None or int(where.rsplit(":", 1)[1]) in inodes):
            found.append(line)
    return found


def children(of: int) -> dict[int, tuple[str, str]]:
    """Name and state of every child of a process."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{entry}/stat").read_text()
                name, _, rest = text.rpartition(")")
                fields = rest.split()
                if int(fields[1]) == of:
                    found[int(entry)] = (name.partition("(")[2], fields[0])
    return found


def where(pid: int) -> str:
    """Where a process hangs, for a finding."""
    parts = []
    for name in ("wchan", "syscall", "stack"):
        with contextlib.suppress(OSError):
            parts.append(f"{name}: {Path(f'/proc/{pid}/{name}').read_text().strip()}")
    return "; ".join(parts)


def run_delay_seconds() -> float:
    """How long this thread was ready to run while others ran, since it began."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def own_name() -> str:
    """The name by which /proc shows this process, and those that are forked from it."""
    return Path("/proc/self/comm").read_text().strip()
