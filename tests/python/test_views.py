"""Tensors, arrays and memoryviews on the region: no copy, and alive as long as anyone looks."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from ec_shared_region import ECSharedRegion
from procs import address_of, is_mapped, path_of

numpy = pytest.importorskip("numpy")


def torch_blocks(region: Any) -> Any:
    pytest.importorskip("torch")
    return region.blocks


def torch_frombuffer(region: Any) -> Any:
    torch = pytest.importorskip("torch")
    return torch.frombuffer(region, dtype=torch.int8).view(region.num_blocks, region.block_size_bytes)


def torch_dlpack(region: Any) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_dlpack(numpy.asarray(region))


def numpy_from_dlpack(region: Any) -> Any:
    return numpy.from_dlpack(torch_blocks(region))


VIEWS: dict[str, Callable[[Any], Any]] = {
    "memoryview": memoryview,
    "numpy.asarray": numpy.asarray,
    "numpy of the tensor": lambda region: torch_blocks(region).numpy(),
    "blocks": torch_blocks,
    "slice of blocks": lambda region: torch_blocks(region)[0:4],
    "view of another type": lambda region: torch_blocks(region).view(pytest.importorskip("torch").int16),
    "torch.frombuffer": torch_frombuffer,
    "torch of a memoryview": lambda region: torch_frombuffer_of_memoryview(region),
    "DLPack to torch": torch_dlpack,
    "DLPack to numpy": numpy_from_dlpack,
}


def torch_frombuffer_of_memoryview(region: Any) -> Any:
    torch = pytest.importorskip("torch")
    return torch.frombuffer(memoryview(region), dtype=torch.int8).view(region.num_blocks, region.block_size_bytes)


@pytest.fixture(params=VIEWS.values(), ids=VIEWS.keys())
def make_view(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return request.param


def test_the_buffer_is_flat_signed_bytes_in_two_dimensions(open_region: Any, engine_id: str) -> None:
    view = memoryview(open_region(engine_id, 3, 7168))
    assert view.format == "b"
    assert view.itemsize == 1
    assert view.ndim == 2
    assert view.shape == (3, 7168)
    assert view.strides == (7168, 1)
    assert view.nbytes == 3 * 7168
    assert view.c_contiguous
    assert not view.readonly
    view[2, 7167] = -128
    assert view[2, 7167] == -128


def test_numpy_sees_the_same(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, 3, 7168)
    array = numpy.asarray(region)
    assert (array.dtype, array.shape, array.strides) == (numpy.int8, (3, 7168), (7168, 1))
    assert array.flags.writeable and array.flags.c_contiguous
    assert array.__array_interface__["data"][0] == region._blocks_ptr
    array[1] = numpy.arange(7168).astype(numpy.int8)
    assert path_of(engine_id).read_bytes()[7168 : 2 * 7168] == array[1].tobytes()


@pytest.mark.parametrize(("blocks", "block_bytes"), [(1, 1), (1, 7168), (7168, 1), (5, 3)])
def test_odd_shapes(open_region: Any, engine_id: str, blocks: int, block_bytes: int) -> None:
    region = open_region(engine_id, blocks, block_bytes)
    assert memoryview(region).shape == (blocks, block_bytes)
    assert numpy.asarray(region).shape == (blocks, block_bytes)
    assert len(bytes(memoryview(region).cast("B"))) == blocks * block_bytes


def test_no_view_is_a_copy(open_region: Any, engine_id: str, make_view: Callable[[Any], Any]) -> None:
    region = open_region(engine_id, 4, 64)
    memoryview(region)[0, 0] = 77
    view = make_view(region)
    raw = view.numpy() if hasattr(view, "numpy") else view
    assert address_of(raw) == region._blocks_ptr
    assert memoryview(raw).cast("B")[0] == 77


@pytest.mark.case("LI-01", "LI-02", "LI-05", "LI-07", "PI-44")
def test_a_view_outlives_cleanup_and_the_region(engine_id: str, make_view: Callable[[Any], Any]) -> None:
    """The mapping goes exactly when the last view does: neither under it nor long after it."""
    region = ECSharedRegion(engine_id, 4, 64)
    address = region._blocks_ptr
    view = make_view(region)
    memoryview(region)[1, 2] = 33
    region.cleanup()
    assert not path_of(engine_id).exists()
    assert not hasattr(region, "blocks")
    assert is_mapped(address)
    assert int(_bytes(view)[64 + 2]) == 33
    del region
    gc.collect()
    assert is_mapped(address)
    _write(view)
    assert int(_bytes(view)[0]) == 5
    del view
    gc.collect()
    assert not is_mapped(address)


# torch.frombuffer(region) gives the buffer back at once and keeps the region object: there the mapping goes with it.
HELD = {name: view for name, view in VIEWS.items() if name != "torch.frombuffer"}


@pytest.mark.parametrize("make", HELD.values(), ids=HELD.keys())
def test_the_mapping_goes_with_the_last_view_though_the_region_object_stays(
    engine_id: str, make: Callable[[Any], Any]
) -> None:
    region = ECSharedRegion(engine_id, 4, 64)
    address = region._blocks_ptr
    view = make(region)
    region.cleanup()
    assert is_mapped(address)
    del view
    gc.collect()
    assert not is_mapped(address)
    assert region.nbytes == 256


def _bytes(view: Any) -> Any:
    return memoryview(view.numpy() if hasattr(view, "numpy") else view).cast("B")


def _write(view: Any) -> None:
    raw = view.numpy() if hasattr(view, "numpy") else view
    memoryview(raw).cast("B")[0] = 5


@pytest.mark.case("LI-04")
def test_a_view_returned_by_a_function_that_forgot_the_region(engine_id: str, make_view: Callable[[Any], Any]) -> None:
    def make() -> Any:
        return make_view(ECSharedRegion(engine_id, 4, 64))

    view = make()
    gc.collect()
    _write(view)
    assert int(_bytes(view)[0]) == 5
    del view
    gc.collect()
    assert not path_of(engine_id).exists()


@pytest.mark.case("LI-10")
def test_a_view_outlives_the_with_block(engine_id: str, make_view: Callable[[Any], Any]) -> None:
    with ECSharedRegion(engine_id, 4, 64) as region:
        view = make_view(region)
        address = region._blocks_ptr
    _write(view)
    assert int(_bytes(view)[0]) == 5
    del view, region
    gc.collect()
    assert not is_mapped(address)


def test_many_views_of_many_kinds_and_the_last_one_counts(engine_id: str) -> None:
    region = ECSharedRegion(engine_id, 4, 64)
    address = region._blocks_ptr
    views = [make(region) for make in VIEWS.values() for _ in range(3)]
    region.cleanup()
    del region
    while views:
        assert is_mapped(address)
        _write(views[-1])
        views.pop()
        gc.collect()
    assert not is_mapped(address)


def test_without_views_cleanup_unmaps_at_once(engine_id: str) -> None:
    region = ECSharedRegion(engine_id, 4, 64)
    address = region._blocks_ptr
    assert is_mapped(address)
    region.cleanup()
    assert not is_mapped(address)


def test_blocks_alone_does_not_keep_the_mapping_after_cleanup(engine_id: str) -> None:
    """The region drops its own tensor: only a caller's reference counts."""
    region = ECSharedRegion(engine_id, 4, 64)
    address = region._blocks_ptr
    torch_blocks(region)[0, 0] = 1
    region.cleanup()
    gc.collect()
    assert not is_mapped(address)


@pytest.mark.case("LI-07")
def test_a_traceback_that_holds_a_slice(engine_id: str) -> None:
    """Nothing seems to use the map, but a frame does; `cleanup` returns as always."""

    def fail(view: Any) -> None:
        _ = view[1:3]
        raise LookupError

    region = ECSharedRegion(engine_id, 4, 64)
    address = region._blocks_ptr
    caught: LookupError | None = None
    try:
        fail(memoryview(region))
    except LookupError as error:
        caught = error
    region.cleanup()
    assert is_mapped(address)
    caught = None
    assert caught is None
    gc.collect()
    assert not is_mapped(address)


@pytest.mark.case("LI-14")
def test_a_memoryview_owns_what_it_points_into(engine_id: str) -> None:
    region = ECSharedRegion(engine_id, 4, 64)
    address = region._blocks_ptr
    outer = memoryview(region)
    inner = memoryview(outer)[1:]
    del region
    gc.collect()
    outer.release()
    assert inner[0, 0] == 0
    assert is_mapped(address)
    inner.release()
    gc.collect()
    assert not is_mapped(address)


def test_a_cycle_through_the_region_is_collected(engine_id: str) -> None:
    class Derived(ECSharedRegion):
        pass

    region = Derived(engine_id, 4, 64)
    address = region._blocks_ptr
    region.me = region
    region.view = memoryview(region)
    reference = weakref.ref(region)
    del region
    gc.collect()
    assert reference() is None
    assert not path_of(engine_id).exists()
    assert not is_mapped(address)


@pytest.mark.case("LI-13")
@pytest.mark.parametrize("kept", ["r.blocks", "r.blocks[1]", "numpy.asarray(r)", "memoryview(r)", "r.blocks.numpy()"])
def test_a_view_at_interpreter_exit(spawn: Any, engine_id: str, kept: str) -> None:
    """Wherever the view lives when the interpreter goes down: status 0, silence, and no name."""
    if "blocks" in kept:
        pytest.importorskip("torch")
    child = spawn()
    child.run(f"import builtins, numpy; r = Region(id, 4, 64); builtins.kept = {kept}", id=engine_id)
    assert child.finish() == 0
    assert child.stderr == ""
    assert not path_of(engine_id).exists()


def test_a_view_in_another_thread_outlives_cleanup(engine_id: str) -> None:
    import threading

    region = ECSharedRegion(engine_id, 64, 7168)
    address = region._blocks_ptr
    started, stop = threading.Event(), threading.Event()
    seen: list[int] = []

    def write(array: Any) -> None:
        while True:
            array[:] = 1
            started.set()
            if stop.is_set():
                break
        seen.append(int(array.sum()))

    thread = threading.Thread(target=write, args=(numpy.asarray(region),))
    thread.start()
    started.wait()
    region.cleanup()
    stop.set()
    thread.join()
    assert seen == [64 * 7168]
    del thread
    gc.collect()
    assert not is_mapped(address)


def test_reference_counts_do_not_drift(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, 4, 64)
    before = sys.getrefcount(region)
    for _ in range(1000):
        memoryview(region).release()
        numpy.asarray(region)
    gc.collect()
    assert sys.getrefcount(region) == before
