"""What the machine can do at best: zeroing, which no populate can beat, and contiguous copies, which no scatter can.

Measured in a process of its own: the memory that it works on stays warm there, and the C library's copy is told (by
GLIBC_TUNABLES, which hold for a whole process) to go past the caches, as the best copy of large memory does. The
library's own idea of when to do so comes from the size of a cache that a virtual machine shares with many others.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from .family import die_with_the_parent

MADV_HUGEPAGE = 14
MADV_NOHUGEPAGE = 15
MADV_POPULATE_WRITE = 23
TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x40000"

_libc = ctypes.CDLL(None, use_errno=True)  # its functions run without the GIL
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.memset.restype = _libc.memcpy.restype = ctypes.c_void_p


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def populate(address: int, size_bytes: int) -> None:
    """Has every page of private or shared memory placed; touches them where the kernel knows no such advice."""
    if _libc.madvise(address, size_bytes, MADV_POPULATE_WRITE) != 0:
        _libc.memset(address, 0, size_bytes)


def anonymous(size_bytes: int, huge: bool) -> mmap.mmap:
    """Private memory in pages of 2 MiB (where there are any) or in base pages, every page placed."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _libc.madvise(address_of(memory), size_bytes, MADV_HUGEPAGE if huge else MADV_NOHUGEPAGE)
    populate(address_of(memory), size_bytes)
    return memory


def in_threads(work: Callable[[int, int], None], size_bytes: int, threads: int) -> float:
    """Seconds that `work(offset, length)` takes over all of it, a part for each thread."""
    if threads == 1:
        began = time.perf_counter()
        work(0, size_bytes)
        return time.perf_counter() - began
    part = -(-size_bytes // threads // mmap.PAGESIZE) * mmap.PAGESIZE
    offsets = range(0, size_bytes, part)
    gate = threading.Barrier(len(offsets) + 1)

    def each(offset: int) -> None:
        gate.wait()
        work(offset, min(part, size_bytes - offset))

    crew = [threading.Thread(target=each, args=(offset,)) for offset in offsets]
    for thread in crew:
        thread.start()
    gate.wait()
    began = time.perf_counter()
    for thread in crew:
        thread.join()
    return time.perf_counter() - began


class _Bench:
    """Memory of one size at a time, and what can be done with it."""

    def __init__(self) -> None:
        self._memory: list[mmap.mmap] = []

    def _addresses(self, count: int, size_bytes: int) -> list[int]:
        self._memory = [memory for memory in self._memory if len(memory) == size_bytes]
        while len(self._memory) < count:
            self._memory.append(anonymous(size_bytes, huge=True))
        return [address_of(memory) for memory in self._memory[:count]]

    def zero(self, size_bytes: int, threads: int) -> float:
        """The better of two ways: the C library's, and the kernel's own on pages of 2 MiB."""
        (address,) = self._addresses(1, size_bytes)
        by_library = in_threads(lambda at, length: _libc.memset(address + at, 0, length), size_bytes, threads)
        self._memory[0].madvise(mmap.MADV_DONTNEED)
        by_kernel = in_threads(lambda at, length: populate(address + at, length), size_bytes, threads)
        return min(by_library, by_kernel)

    def copy(self, size_bytes: int, threads: int) -> float:
        target, source = self._addresses(2, size_bytes)
        return in_threads(
            lambda at, length: _libc.memcpy(target + at, source + at, length),
            size_bytes,
            threads,
        )

    def drop(self, size_bytes: int, threads: int) -> float:
        """Gives the memory back."""
        del size_bytes, threads
        self._memory.clear()
        return 0.0


class Limits:
    """The other side of the process that measures limits."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            env={**os.environ, "GLIBC_TUNABLES": TUNABLES},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, what: str, size_bytes: int, threads: int) -> float:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([what, size_bytes, threads]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that measures limits has died")
        return float(json.loads(answer))

    def zero(self, size_bytes: int, threads: int) -> float:
        """Seconds to zero so many bytes in so many threads."""
        return self._ask("zero", size_bytes, threads)

    def copy(self, size_bytes: int, threads: int) -> float:
        """Seconds to copy so many bytes in so many threads."""
        return self._ask("copy", size_bytes, threads)

    def drop(self) -> None:
        """Gives the memory back that was worked on."""
        self._ask("drop", 0, 1)

    def cpu_seconds(self) -> float:
        """CPU time of that process until now."""
        with open(f"/proc/{self._process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    die_with_the_parent()
    bench = _Bench()
    for line in sys.stdin:
        what, size_bytes, threads = json.loads(line)
        print(json.dumps(getattr(bench, what)(size_bytes, threads)), flush=True)


if __name__ == "__main__":
    main()
