"""What the existing suites of such a class assert, as one suite over the original and ours.

They patch `torch.cuda` and read private names; a class that takes the original's place has to pass them.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

import procs

torch = pytest.importorskip("torch")

# Read before any test patches it: with a real driver ours registers for good and asks no fake.
HAS_DRIVER = torch.cuda.is_available()


@pytest.fixture(params=["oracle", "ec_shared_region"], ids=["original", "ours"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


@pytest.fixture
def region(module: ModuleType, engine_id: str) -> Iterator[Any]:
    region = module.ECSharedRegion(engine_id=engine_id, num_blocks=8, block_size_bytes=64)
    yield region
    region.cleanup()


@pytest.fixture
def cudart(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    if HAS_DRIVER and module.__name__ == "ec_shared_region":
        pytest.skip("a real CUDA driver answers here, the fake would not be asked")
    fake = MagicMock()
    fake.cudaHostRegister.return_value = MagicMock(value=0)
    fake.cudaHostUnregister.return_value = MagicMock(value=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


def test_the_first_is_creator_and_the_second_is_not(module: ModuleType, region: Any, engine_id: str) -> None:
    joiner = module.ECSharedRegion(engine_id, 8, 64)
    assert region._is_creator is True
    assert joiner._is_creator is False
    joiner.cleanup()
    assert os.path.exists(region._mmap_path)


def test_path_size_and_mode(region: Any, engine_id: str) -> None:
    assert region._mmap_path == str(procs.path_of(engine_id))
    assert os.path.getsize(region._mmap_path) == 512
    assert os.stat(region._mmap_path).st_mode & 0o777 == 0o600


def test_blocks(region: Any) -> None:
    assert region.blocks.shape == (8, 64)
    assert region.blocks.dtype == torch.int8
    assert region.blocks.data_ptr() == region._blocks_ptr
    assert region.blocks.numel() == region._blocks_nbytes == 512
    assert int(region.blocks.sum()) == 0


def test_a_write_is_seen_by_the_other(module: ModuleType, region: Any, engine_id: str) -> None:
    joiner = module.ECSharedRegion(engine_id, 8, 64)
    region.blocks[3] = torch.arange(64, dtype=torch.int8)
    assert torch.equal(joiner.blocks[3], torch.arange(64, dtype=torch.int8))
    joiner.blocks[5].fill_(-1)
    assert int(region.blocks[5].sum()) == -64
    joiner.cleanup()


def test_blocks_survive_a_joiner(module: ModuleType, region: Any, engine_id: str) -> None:
    region.blocks.fill_(7)
    joiner = module.ECSharedRegion(engine_id, 8, 64)
    assert int(region.blocks.to(torch.int64).sum()) == 7 * 512
    joiner.cleanup()


def test_cleanup_three_times(module: ModuleType, engine_id: str) -> None:
    region = module.ECSharedRegion(engine_id, 8, 64)
    assert region.blocks is not None
    for _ in range(3):
        region.cleanup()
    assert not os.path.exists(region._mmap_path)
    assert not hasattr(region, "blocks")
    assert region._fd is None
    assert region._mmap_obj is None
    assert region._is_pinned is False


def test_a_non_creator_never_unlinks(module: ModuleType, region: Any, engine_id: str) -> None:
    joiner = module.ECSharedRegion(engine_id, 8, 64)
    joiner.cleanup()
    joiner.cleanup()
    assert os.path.exists(region._mmap_path)


def test_wait_for_file_size_returns(module: ModuleType, region: Any) -> None:
    assert module._wait_for_file_size(region._fd, expected_size=512, timeout=1.0) is None


def test_wait_for_file_size_times_out(module: ModuleType, region: Any) -> None:
    with pytest.raises(TimeoutError):
        module._wait_for_file_size(region._fd, expected_size=513, timeout=0.02)


def test_a_joiner_waits_for_a_slow_creator(module: ModuleType, engine_id: str, litter: Any) -> None:
    """The suite itself plays the creator: it makes the name first and sizes it later."""
    path = litter(procs.path_of(engine_id))
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    sizer = threading.Timer(0.05, os.ftruncate, (descriptor, 512))
    sizer.start()
    joiner = module.ECSharedRegion(engine_id, 8, 64)
    assert joiner._is_creator is False
    assert joiner._blocks_nbytes == 512
    sizer.join()
    joiner.cleanup()
    assert path.exists(), "its creator lives, a joiner has nothing to remove"
    os.close(descriptor)


def test_a_subclass_reaches_the_private_names(module: ModuleType, engine_id: str) -> None:
    class Derived(module.ECSharedRegion):  # type: ignore[name-defined, misc]
        def pin_memory(self) -> None:
            assert self._blocks_ptr and self._blocks_nbytes
            self._registered = (self._blocks_ptr, self._blocks_nbytes)

    region = Derived(engine_id, 8, 64)
    region.pin_memory()
    assert region._registered == (region.blocks.data_ptr(), 512)
    region.cleanup()


def test_pin_registers_the_whole_mapping_once(cudart: MagicMock, region: Any) -> None:
    region.pin_memory()
    region.pin_memory()
    assert region._is_pinned is True
    assert cudart.cudaHostRegister.call_count == 1
    assert cudart.cudaHostRegister.call_args.args[:2] == (region._blocks_ptr, region._blocks_nbytes)


@pytest.mark.parametrize("plain", [True, False], ids=["int", "enum"])
def test_a_failed_register_is_a_warning(cudart: MagicMock, region: Any, plain: bool, caplog: Any) -> None:
    cudart.cudaHostRegister.return_value = 2 if plain else MagicMock(value=2)
    region.pin_memory()
    assert region._is_pinned is False
    assert any(record.levelname == "WARNING" and "2" in record.getMessage() for record in caplog.records)
    region.cleanup()
    cudart.cudaHostUnregister.assert_not_called()


def test_unregister_exactly_once(cudart: MagicMock, region: Any) -> None:
    pointer = region._blocks_ptr
    region.pin_memory()
    region.cleanup()
    region.cleanup()
    cudart.cudaHostUnregister.assert_called_once_with(pointer)
    assert region._is_pinned is False


def test_pin_is_a_no_op_without_cuda(region: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> Any:
        raise AssertionError("asked without CUDA")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "cudart", never)
    region.pin_memory()
    assert region._is_pinned is False


def test_cleanup_without_pin_asks_no_cuda(cudart: MagicMock, region: Any) -> None:
    region.cleanup()
    cudart.cudaHostUnregister.assert_not_called()
