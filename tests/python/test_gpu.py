"""What only a GPU can show. Run by `make test-gpu`; everywhere else these tests skip with their reason."""

from __future__ import annotations

import multiprocessing
import os
import uuid

import pytest

from ec_shared_region import ECSharedRegion

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch


@pytest.fixture
def region():
    with ECSharedRegion(f"gpu-{os.getpid()}-{uuid.uuid4().hex[:8]}", 4096, 7168) as region:
        yield region


@pytest.mark.case("PI-31")
def test_slices_are_pinned_after_and_not_after_unpin(region) -> None:
    assert not region.blocks[3].is_pinned()
    result = region.pin_memory()
    assert result, result
    assert result.backend == "cudart" and result.library_path
    assert region.blocks.is_pinned() and region.blocks[3].is_pinned()
    region.unpin_memory()
    assert not region.blocks[3].is_pinned()
    assert region.pin_memory() and region.blocks[3].is_pinned()


def test_copies_across_every_border_of_pieces_are_right(region, torch) -> None:
    result = region.pin_memory(max_piece_bytes=64 << 10)
    assert result and result.pieces > 100, result
    region.blocks.copy_(torch.randint(-128, 128, region.blocks.shape, dtype=torch.int8))
    on_device = torch.empty(region.blocks.shape, dtype=torch.int8, device="cuda")
    on_device.copy_(region.blocks, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(on_device.cpu(), region.blocks)
    on_device.add_(1)
    region.blocks.copy_(on_device, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(on_device.cpu(), region.blocks)


@pytest.mark.case("PI-11")
def test_a_refused_registration_leaves_the_next_call_clean(region, torch) -> None:
    torch.empty(1, device="cuda")
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(region._blocks_ptr, region.nbytes, 1)) == 0
    result = region.pin_memory()  # the runtime answers 712
    assert result and result.pieces == 0
    torch.empty(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    region.unpin_memory()
    assert region.blocks[0].is_pinned(), "unregistered what was not ours"
    assert int(cudart.cudaHostUnregister(region._blocks_ptr)) == 0


def _pin_and_copy(engine_id: str, ready, go, verdict) -> None:
    import torch

    with ECSharedRegion(engine_id, 1024, 7168) as region:
        pinned = bool(region.pin_memory())
        ready.wait()
        go.wait()
        copy = region.blocks.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        verdict.put((pinned, bool((copy == 7).all())))


def test_two_processes_pin_one_region_at_once() -> None:
    context = multiprocessing.get_context("spawn")
    ready, go, verdict = context.Barrier(3), context.Event(), context.Queue()
    engine_id = f"gpu-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    processes = [context.Process(target=_pin_and_copy, args=(engine_id, ready, go, verdict)) for _ in range(2)]
    with ECSharedRegion(engine_id, 1024, 7168) as region:
        for process in processes:
            process.start()
        ready.wait(120)
        region.blocks.fill_(7)
        go.set()
        assert [verdict.get(timeout=120) for _ in processes] == [(True, True)] * 2
        for process in processes:
            process.join(60)
            assert process.exitcode == 0


def test_block_copies_refuse_memory_of_a_device(region, torch) -> None:
    with pytest.raises(TypeError, match="`src` is on cuda:0: wanted memory of the CPU"):
        region.scatter_blocks([1], torch.zeros(7168, dtype=torch.int8, device="cuda"))
    with pytest.raises(TypeError, match="`out` is on cuda:0"):
        region.gather_blocks([1], torch.zeros(7168, dtype=torch.int8, device="cuda"))


def test_block_copies_on_a_pinned_region(region, torch) -> None:
    assert region.pin_memory()
    src = torch.randint(-128, 128, (3, 7168), dtype=torch.int8).pin_memory()
    region.scatter_blocks([7, 1, 2], src)
    assert torch.equal(region.blocks[[7, 1, 2]].cuda().cpu(), src)
    assert torch.equal(region.gather_blocks([7, 1, 2]), src)
