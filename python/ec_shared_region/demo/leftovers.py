"""Files of an engine in /dev/shm: which there are, and taking the dead ones away."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import ec_shared_region

from .messages import DemoError

__all__ = ["Leftover", "ensure_free", "of_engine", "reclaim"]

DIRECTORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that is there, and how many of its bytes are not zero."""

    path: str
    size_bytes: int
    nonzero_bytes: int


def of_engine(engine_id: str) -> list[Leftover]:
    """What bears the engine's name in /dev/shm."""
    path = DIRECTORY / f"vllm_ec_{engine_id}.mmap"
    try:
        nonzero_bytes = 0
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            while chunk := file.read(1 << 24):
                nonzero_bytes += len(chunk) - chunk.count(0)
    except FileNotFoundError:
        return []
    return [Leftover(str(path), size_bytes, nonzero_bytes)]


def reclaim(engine_id: str) -> bool:
    """Removes the engine's file if nobody alive holds it: a constructor does that by itself.

    :return: somebody alive holds it, and none of the demo's processes is left: it is another engine's.
    """
    try:
        _open_and_close(engine_id)
    except ec_shared_region.RegionExistsError:
        return True
    except ec_shared_region.RegionError:
        pass
    return False


def ensure_free(engine_id: str) -> None:
    """Raises unless the id is valid and no live region bears it, before anything is started."""
    try:
        _open_and_close(engine_id)
    except ec_shared_region.RegionExistsError as error:
        raise DemoError(
            f"a live region bears the engine id `{engine_id}`: `{DIRECTORY}/vllm_ec_{engine_id}.mmap`",
            hint="choose another --engine-id, or leave it out",
        ) from error
    except ec_shared_region.RegionError as error:
        raise DemoError(
            str(error).removesuffix(f"\nhint: {error.hint}"),
            hint=error.hint,
            exit_code=2 if isinstance(error, ec_shared_region.InvalidArgumentError) else 3,
        ) from error


def _open_and_close(engine_id: str) -> None:
    """A region of one byte, only where there is no live one."""
    ec_shared_region.ECSharedRegion(engine_id, 1, 1, mode="create", timeout=5.0, populate="never").cleanup()
