"""One process and one region: construction, layout, attributes, cleanup."""

from __future__ import annotations

import copy
import gc
import logging
import mmap
import os
import pickle
import stat
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ec_shared_region import ECSharedRegion, _wait_for_file_size, logger
from procs import path_of

# Neither a block nor the region is a page multiple, as in an engine (hidden size times element size).
BLOCKS, BLOCK_BYTES = 9, 7168


def test_the_file_is_flat_exact_and_without_header(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, BLOCKS, BLOCK_BYTES)
    assert os.path.getsize(region.path) == BLOCKS * BLOCK_BYTES
    view = memoryview(region)
    for block, byte in ((0, 0), (0, BLOCK_BYTES - 1), (1, 0), (4, 4097), (BLOCKS - 1, BLOCK_BYTES - 1)):
        view[block, byte] = 1 + block
    content = path_of(engine_id).read_bytes()
    expected = bytearray(BLOCKS * BLOCK_BYTES)
    for block, byte in ((0, 0), (0, BLOCK_BYTES - 1), (1, 0), (4, 4097), (BLOCKS - 1, BLOCK_BYTES - 1)):
        expected[block * BLOCK_BYTES + byte] = 1 + block
    assert content == bytes(expected)


def test_fresh_means_zero(open_region: Any, engine_id: str) -> None:
    assert bytes(memoryview(open_region(engine_id, BLOCKS, BLOCK_BYTES)).cast("B")) == bytes(BLOCKS * BLOCK_BYTES)


@pytest.mark.case("PE-01")
@pytest.mark.parametrize("umask", [0, 0o027, 0o777])
def test_the_mode_is_0600_whatever_the_umask(open_region: Any, engine_id: str, umask: int) -> None:
    before = os.umask(umask)
    try:
        region = open_region(engine_id, 2, 64)
        joiner = open_region(engine_id, 2, 64)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(region.path).st_mode) == 0o600
    assert not joiner.is_creator


def test_arguments_by_position_and_by_keyword(open_region: Any, new_id: Callable[[], str]) -> None:
    for region in (
        open_region(new_id(), 3, 64),
        open_region(new_id(), block_size_bytes=64, num_blocks=3),
        open_region(engine_id=new_id(), num_blocks=3, block_size_bytes=64),
    ):
        assert (region.num_blocks, region.block_size_bytes, region.nbytes) == (3, 64, 192)


def test_what_is_added_is_keyword_only(engine_id: str) -> None:
    with pytest.raises(TypeError):
        ECSharedRegion(engine_id, 1, 64, 30.0)  # type: ignore[call-arg, misc]
    assert not path_of(engine_id).exists()


def test_attributes(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, BLOCKS, BLOCK_BYTES)
    assert region.engine_id == engine_id
    assert (region.num_blocks, region.block_size_bytes) == (BLOCKS, BLOCK_BYTES)
    assert region.nbytes == BLOCKS * BLOCK_BYTES
    assert str(region.path) == str(path_of(engine_id))
    assert region.is_creator is True
    assert region.is_pinned is False


@pytest.mark.case("MN-08", "PI-50")
def test_private_names_keep_their_meaning(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, BLOCKS, BLOCK_BYTES)
    assert region._mmap_path == f"/dev/shm/vllm_ec_{engine_id}.mmap"
    assert isinstance(region._mmap_path, str)
    assert region._is_creator is True
    assert region._is_pinned is False
    assert isinstance(region._fd, int)
    assert os.path.samestat(os.fstat(region._fd), os.stat(region._mmap_path))
    assert region._mmap_obj is not None
    assert region._blocks_nbytes == BLOCKS * BLOCK_BYTES
    assert region._blocks_ptr == region.blocks.data_ptr()
    assert region._blocks_ptr % mmap.PAGESIZE == 0


def test_blocks_is_one_tensor_on_the_mapping(open_region: Any, engine_id: str) -> None:
    torch = pytest.importorskip("torch")
    region = open_region(engine_id, BLOCKS, BLOCK_BYTES)
    assert region.blocks.dtype == torch.int8
    assert tuple(region.blocks.shape) == (BLOCKS, BLOCK_BYTES)
    assert region.blocks.is_contiguous()
    region.blocks[3, 5] = -7
    assert region.blocks is region.blocks
    assert memoryview(region)[3, 5] == -7
    assert path_of(engine_id).read_bytes()[3 * BLOCK_BYTES + 5] == 256 - 7


def test_repr_tells_id_shape_role_and_pin_state(open_region: Any, engine_id: str) -> None:
    creator = open_region(engine_id, BLOCKS, BLOCK_BYTES)
    joiner = open_region(engine_id, BLOCKS, BLOCK_BYTES)
    for region in (creator, joiner):
        for part in (engine_id, str(BLOCKS), str(BLOCK_BYTES), "pin"):
            assert part in repr(region)
    assert "creator" in repr(creator)
    assert "joiner" in repr(joiner)
    assert "\n" not in repr(creator)


@pytest.mark.parametrize("with_blocks", [True, False])
def test_after_cleanup(engine_id: str, with_blocks: bool) -> None:
    region = ECSharedRegion(engine_id, BLOCKS, BLOCK_BYTES)
    assert not with_blocks or hasattr(region, "blocks")
    region.cleanup()
    assert not path_of(engine_id).exists()
    assert not hasattr(region, "blocks")
    assert region._fd is None
    assert region._mmap_obj is None
    assert region.is_pinned is False
    assert engine_id in repr(region)
    assert (region.num_blocks, region.block_size_bytes) == (BLOCKS, BLOCK_BYTES)
    with pytest.raises((ValueError, BufferError, TypeError)):
        memoryview(region)


def test_cleanup_again_is_a_no_op(engine_id: str) -> None:
    region = ECSharedRegion(engine_id, 2, 64)
    region.cleanup()
    with ECSharedRegion(engine_id, 2, 64) as successor:
        region.cleanup()
        region.cleanup()
        assert os.path.samestat(os.fstat(successor._fd), os.stat(successor.path))


def test_cleanup_after_the_name_was_removed_by_hand(engine_id: str) -> None:
    region = ECSharedRegion(engine_id, 2, 64)
    path_of(engine_id).unlink()
    region.cleanup()
    assert region._fd is None


def test_context_manager(engine_id: str) -> None:
    with ECSharedRegion(engine_id, 2, 64) as region:
        assert isinstance(region, ECSharedRegion)
        assert path_of(engine_id).exists()
    assert not path_of(engine_id).exists()


@pytest.mark.case("LI-08")
def test_the_callers_own_error_stays_the_error(engine_id: str) -> None:
    region = ECSharedRegion(engine_id, 2, 64)
    view = memoryview(region)
    with pytest.raises(ZeroDivisionError):
        try:
            _ = 1 / 0
        finally:
            region.cleanup()
    with pytest.raises(ZeroDivisionError), ECSharedRegion(engine_id, 2, 64):
        _ = 1 / 0
    view.release()


def test_dropping_the_last_reference_cleans_up(engine_id: str) -> None:
    region = ECSharedRegion(engine_id, 2, 64)
    assert path_of(engine_id).exists()
    del region
    assert not path_of(engine_id).exists()


def test_a_subclass_with_another_signature(engine_id: str) -> None:
    """A port to another device subclasses it, with arguments of its own, and reaches for private names."""

    class Derived(ECSharedRegion):
        def __init__(self, config: dict[str, Any], *, device: str = "npu") -> None:
            self.before = device
            super().__init__(config["id"], config["blocks"], config["bytes"])
            self.after = self._blocks_nbytes

        def pin_memory(self) -> None:
            self.pinned_by = self.before

        def cleanup(self) -> None:
            self.cleaned = self._is_creator
            super().cleanup()

    region = Derived({"id": engine_id, "blocks": 4, "bytes": 64}, device="other")
    assert (region.num_blocks, region.block_size_bytes, region.after) == (4, 64, 256)
    region.pin_memory()
    assert region.pinned_by == "other"
    with region:
        assert path_of(engine_id).exists()
    assert region.cleaned is True
    assert not path_of(engine_id).exists()


def test_a_subclass_whose_init_fails_first_leaves_nothing(engine_id: str) -> None:
    class Derived(ECSharedRegion):
        def __init__(self, fail: bool) -> None:
            if fail:
                raise RuntimeError("before the region")
            super().__init__(engine_id, 1, 64)

        # A caller may clean up what never came to be.
        @classmethod
        def bare(cls) -> Derived:
            return cls.__new__(cls)

    with pytest.raises(RuntimeError, match="before the region"):
        Derived(True)
    try:
        bare = Derived.bare()
    except TypeError:
        pass  # a class that cannot be made half is as good
    else:
        bare.cleanup()
    assert not path_of(engine_id).exists()


def test_a_subclass_whose_init_fails_last_leaves_nothing(engine_id: str) -> None:
    class Derived(ECSharedRegion):
        def __init__(self) -> None:
            super().__init__(engine_id, 1, 64)
            raise RuntimeError("after the region")

    with pytest.raises(RuntimeError, match="after the region") as caught:
        Derived()
    del caught  # its traceback is the last that knows the object
    gc.collect()
    assert not path_of(engine_id).exists()


def test_init_again_does_not_lose_the_first_region(new_id: Callable[[], str]) -> None:
    """A caller's mistake: whatever becomes of the second, nothing of the first stays behind."""
    first, second = new_id(), new_id()
    region = ECSharedRegion(first, 2, 64)
    view = memoryview(region)
    try:
        region.__init__(second, 2, 64)  # type: ignore[misc]
    except Exception as error:
        assert isinstance(error, (RuntimeError, ValueError))
        assert region.engine_id == first
    view[0, 0] = 1
    region.cleanup()
    assert view[0, 0] == 1
    assert not path_of(first).exists()
    assert not path_of(second).exists()


@pytest.mark.parametrize("copier", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_region_is_not_copied(open_region: Any, engine_id: str, copier: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError):
        copier(open_region(engine_id, 2, 64))


@pytest.mark.case("CA-20", "CA-22")
def test_the_cost_is_the_size_and_stays_so(open_region: Any, engine_id: str) -> None:
    """2.08 MiB: an allocator that rounds to powers of two would take 4."""
    blocks, block_bytes = 305, 7168
    region = open_region(engine_id, blocks, block_bytes)
    size = blocks * block_bytes
    whole_pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    assert os.stat(region.path).st_blocks * 512 == whole_pages
    view = memoryview(region).cast("B")
    for value in range(10):
        view[:] = bytes([value]) * size
    assert os.stat(region.path).st_blocks * 512 == whole_pages


@pytest.mark.case("MN-08")
def test_the_log_names_the_real_path(open_region: Any, engine_id: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=logger.name):
        open_region(engine_id, 2, 64)
    assert logger.name == "ec_shared_region"
    assert any(str(path_of(engine_id)) in record.getMessage() for record in caplog.records)


def test_nothing_is_printed(spawn: Any, engine_id: str) -> None:
    child = spawn()
    child.run("r = Region(id, 2, 64); j = Region(id, 2, 64); j.cleanup(); r.cleanup()", id=engine_id)
    assert child.finish() == 0
    assert (child.stdout, child.stderr) == ("", "")


class TestWaitForFileSize:
    """The module function that existing suites call by name."""

    @pytest.fixture
    def file(self, tmp_path: Any) -> Any:
        descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        yield descriptor
        os.close(descriptor)

    def test_large_enough_returns_at_once(self, file: int) -> None:
        os.ftruncate(file, 4096)
        assert _wait_for_file_size(file, 4096) is None
        assert _wait_for_file_size(file, expected_size=100, timeout=0.0) is None

    def test_too_small_until_the_deadline(self, file: int) -> None:
        os.ftruncate(file, 4095)
        with pytest.raises(TimeoutError) as caught:
            _wait_for_file_size(file, expected_size=4096, timeout=0.05)
        assert "4096" in str(caught.value)
        assert "4095" in str(caught.value)

    def test_grows_while_waited_for(self, file: int) -> None:
        grow = threading.Timer(0.02, os.ftruncate, (file, 4096))
        grow.start()
        assert _wait_for_file_size(file, expected_size=4096) is None
        grow.join()

    def test_a_bad_descriptor_is_an_os_error(self, file: int) -> None:
        closed = os.dup(file)
        os.close(closed)
        with pytest.raises(OSError):
            _wait_for_file_size(closed, expected_size=1, timeout=0.0)
