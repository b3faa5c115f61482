"""The original pure-Python class, written anew from its contract, faults included.

It is what an existing engine runs today: one suite is run against it and against ours, and the two
share live regions in the interoperability tests. It takes no lock, makes the file in place, trusts
any file that is large enough and unlinks by path. Nothing here is to be improved.

torch is imported on first use of `blocks`, which lets a test start many such processes cheaply.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import time
from typing import Any

logger = logging.getLogger("oracle")

MADV_POPULATE_WRITE = 23
POLL_SECONDS = 0.005


def _wait_for_file_size(fd: int, expected_size: int, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while os.fstat(fd).st_size < expected_size:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"file did not reach {expected_size} bytes within {timeout} s")
        time.sleep(POLL_SECONDS)


def _madvise_populate_write(mapping: mmap.mmap, length: int) -> None:
    mapping.madvise(MADV_POPULATE_WRITE, 0, length)


def _fallback_populate_write(mapping: mmap.mmap, length: int) -> None:
    for offset in range(0, length, mmap.PAGESIZE):
        mapping[offset] = mapping[offset]


def _populate(mapping: mmap.mmap, length: int) -> None:
    try:
        _madvise_populate_write(mapping, mmap.PAGESIZE)  # one page tells whether the kernel knows it
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _fallback_populate_write(mapping, length)
        return
    _madvise_populate_write(mapping, length)


def _code(result: Any) -> int:
    return int(getattr(result, "value", result))


class ECSharedRegion:
    def __init__(self, engine_id: str, num_blocks: int, block_size_bytes: int) -> None:
        self.engine_id = engine_id
        self.num_blocks = num_blocks
        self.block_size_bytes = block_size_bytes
        self._mmap_path = f"/dev/shm/vllm_ec_{engine_id}.mmap"
        self._is_pinned = False
        self._blocks: Any = None
        total = num_blocks * block_size_bytes
        try:
            self._fd: int | None = os.open(self._mmap_path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            self._is_creator = True
            self._between_make_and_size()
            os.ftruncate(self._fd, total)
        except FileExistsError:
            self._fd = os.open(self._mmap_path, os.O_RDWR)
            self._is_creator = False
            _wait_for_file_size(self._fd, total)
        self._mmap_obj: mmap.mmap | None = mmap.mmap(self._fd, total)
        if self._is_creator:
            _populate(self._mmap_obj, total)
        self._blocks_ptr = ctypes.addressof(ctypes.c_char.from_buffer(self._mmap_obj))
        self._blocks_nbytes = total

    def _between_make_and_size(self) -> None:
        """A seam: tests make a slow or a dying creator here."""

    @property
    def blocks(self) -> Any:
        if self._mmap_obj is None:
            raise AttributeError("blocks")
        if self._blocks is None:
            import torch

            flat = torch.frombuffer(memoryview(self._mmap_obj), dtype=torch.int8)
            self._blocks = flat.view(self.num_blocks, self.block_size_bytes)
        return self._blocks

    def pin_memory(self) -> None:
        import torch

        if self._is_pinned or not torch.cuda.is_available():
            return
        code = _code(torch.cuda.cudart().cudaHostRegister(self._blocks_ptr, self._blocks_nbytes, 0))
        if code != 0:
            logger.warning("cudaHostRegister failed with code %d", code)
            return
        self._is_pinned = True

    def cleanup(self) -> None:
        if self._is_creator:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._mmap_path)
        if self._is_pinned:
            import torch

            code = _code(torch.cuda.cudart().cudaHostUnregister(self._blocks_ptr))
            if code != 0:
                logger.warning("cudaHostUnregister failed with code %d", code)
            self._is_pinned = False
        self._blocks = None
        if self._mmap_obj is not None:
            try:
                self._mmap_obj.close()
            except BufferError:
                logger.warning("views are alive, the mapping is leaked")
            self._mmap_obj = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
