"""Block copies, against torch's own indexing: every kind of ids, of memory and of mistake."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ec_shared_region
from ec_shared_region import (
    ArgumentTypeError,
    BlockIndexError,
    ECSharedRegion,
    InvalidArgumentError,
    RegionClosedError,
)
from procs import is_mapped

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")


def pattern(*shape: int, seed: int = 1) -> Any:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def region(open_region: Any, engine_id: str) -> Any:
    """Ten blocks of 100 bytes, with something in each."""
    region = open_region(engine_id, 10, 100)
    region.blocks.copy_(pattern(10, 100, seed=2))
    return region


IDS = {
    "list": lambda ids: ids,
    "tuple": tuple,
    "tensor": torch.tensor,
    "strided tensor": lambda ids: torch.tensor([ids, ids]).T[:, 0],
    "array": numpy.array,
    "strided array": lambda ids: numpy.array([ids, ids]).T[:, 1],
    "read-only array": lambda ids: numpy.frombuffer(numpy.array(ids).tobytes(), dtype=numpy.int64),
    "array.array": lambda ids: array.array("q", ids),
    "array of ctypes": lambda ids: (ctypes.c_int64 * len(ids))(*ids),
    "memoryview": lambda ids: memoryview(numpy.array(ids)),
    "list of numpy ints": lambda ids: list(numpy.array(ids)),
    "misaligned array": lambda ids: _misaligned(numpy.array(ids)),
    "list of tensors": lambda ids: list(torch.tensor(ids)),
}


def _misaligned(ids: Any) -> Any:
    return numpy.frombuffer(b"x" + ids.tobytes(), dtype=numpy.uint8)[1:].view(numpy.int64)


@pytest.mark.parametrize("make", IDS.values(), ids=IDS.keys())
def test_every_kind_of_ids_means_the_same(region: Any, make: Any) -> None:
    ids = [7, 2, 3, 9]
    src = pattern(4, 100)
    wanted = region.blocks.clone()
    wanted[ids] = src
    region.scatter_blocks(make(ids), src)
    assert torch.equal(region.blocks, wanted)
    assert torch.equal(region.gather_blocks(make(ids)), src)


@pytest.mark.parametrize("ids", [range(3, 8), range(8, 3, -1), range(1, 10, 3), range(9, -1, -4), range(5, 6)])
def test_ranges(region: Any, ids: range) -> None:
    src = pattern(len(ids), 100)
    wanted = region.blocks.clone()
    wanted[list(ids)] = src
    region.scatter_blocks(ids, src)
    assert torch.equal(region.blocks, wanted)
    assert torch.equal(region.gather_blocks(ids), src)


def test_a_range_is_not_unrolled(open_region: Any, engine_id: str) -> None:
    """Its ids would take more memory than there is: only the ends are looked at."""
    region = open_region(engine_id, 4, 1)
    with pytest.raises(IndexError, match="block id out of range: 4 at position 4"):
        region.gather_blocks(range(1 << 60))
    with pytest.raises(IndexError, match="block id out of range: 4 at position 4"):
        region.gather_blocks(range(1 << 80))
    with pytest.raises(IndexError, match="block id out of range: an integer of 81 bits at position 0"):
        region.gather_blocks(range(1 << 80, 1 << 81))
    with pytest.raises(IndexError, match="block id out of range: an integer of 71 bits at position 1"):
        region.gather_blocks(range(1, 1 << 80, 1 << 70))
    with pytest.raises(IndexError, match="block id out of range: -1 at position 0"):
        region.gather_blocks(range(-1, 1 << 80, 1 << 70))
    assert region.gather_blocks(range(3, 1 << 80, 1 << 80), bytearray(1)) == b"\0"


MEMORY = {
    "tensor": lambda tensor: tensor,
    "flat tensor": lambda tensor: tensor.flatten(),
    "tensor of bfloat16": lambda tensor: tensor.view(torch.bfloat16),
    "tensor at an odd address": lambda tensor: _at(1, tensor),
    "tensor at a word": lambda tensor: _at(8, tensor),
    "numpy array": lambda tensor: tensor.numpy(),
    "numpy array of records": lambda tensor: tensor.numpy().view([("O", "i1", 2), ("b", "i2")]),
    "bytearray": lambda tensor: bytearray(tensor.numpy().tobytes()),
    "memoryview": lambda tensor: memoryview(bytearray(tensor.numpy().tobytes())),
    "array.array": lambda tensor: array.array("b", tensor.numpy().tobytes()),
    "array of ctypes": lambda tensor: (ctypes.c_byte * tensor.nbytes).from_buffer_copy(tensor.numpy().tobytes()),
    "mmap": lambda tensor: _mmap(tensor.numpy().tobytes()),
}


def _at(offset: int, tensor: Any) -> Any:
    moved = torch.zeros(tensor.nbytes + 128, dtype=torch.int8)[offset : offset + tensor.nbytes]
    moved.copy_(tensor.flatten())
    return moved


def _mmap(content: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(content))
    memory[:] = content
    return memory


def _bytes(memory: Any) -> bytes:
    if isinstance(memory, torch.Tensor):
        memory = memory.view(torch.int8).numpy()
    return bytes(memoryview(memory).cast("B"))


@pytest.mark.parametrize("make", MEMORY.values(), ids=MEMORY.keys())
def test_every_kind_of_memory_holds_the_same(region: Any, make: Any) -> None:
    src = pattern(3, 100)
    region.scatter_blocks([4, 0, 8], make(src))
    assert torch.equal(region.blocks[[4, 0, 8]], src)
    out = make(torch.zeros(3, 100, dtype=torch.int8))
    assert region.gather_blocks([8, 4, 0], out) is out
    assert _bytes(out) == _bytes(src[[2, 0, 1]].contiguous())


def test_bytes_and_read_only_memory_can_be_a_source(region: Any) -> None:
    region.scatter_blocks([1], b"x" * 100)
    region.scatter_blocks([2], memoryview(b"y" * 100))
    assert _bytes(region.blocks[1]) == b"x" * 100
    assert _bytes(region.blocks[2]) == b"y" * 100


def test_a_gather_makes_a_tensor_that_is_a_copy(region: Any) -> None:
    before = region.blocks.clone()
    gathered = region.gather_blocks([1, 3])
    assert (gathered.dtype, gathered.shape, gathered.device.type) == (torch.int8, (2, 100), "cpu")
    region.blocks[1].zero_()
    assert torch.equal(gathered, before[[1, 3]])


def test_a_default_device_does_not_matter(region: Any) -> None:
    with torch.device("meta"):
        gathered = region.gather_blocks([1])
    assert gathered.device.type == "cpu"
    assert torch.equal(gathered[0], region.blocks[1])


def test_a_gather_may_repeat_ids(region: Any) -> None:
    ids = [5, 5, 6, 5, 4, 4]
    assert torch.equal(region.gather_blocks(ids), region.blocks[ids])


@pytest.mark.parametrize("ids", [[], (), range(0), range(5, 2), torch.tensor([], dtype=torch.int64), array.array("q")])
def test_an_empty_batch_is_no_work(region: Any, ids: Any) -> None:
    before = region.blocks.clone()
    region.scatter_blocks(ids, b"")
    region.scatter_blocks(ids, torch.empty(0))
    region.scatter_blocks(ids, b"", nbytes=0)
    assert region.gather_blocks(ids).shape == (0, 100)
    assert region.gather_blocks(ids, bytearray()) == b""
    assert torch.equal(region.blocks, before)


@pytest.mark.parametrize("left_out", [1, 50, 99])
def test_the_last_block_may_be_partial(region: Any, left_out: int) -> None:
    nbytes = 300 - left_out
    src = pattern(nbytes)
    wanted = region.blocks.clone()
    wanted[[6, 2]] = src[:200].view(2, 100)
    wanted[3, : 100 - left_out] = src[200:]
    region.scatter_blocks([6, 2, 3], src, nbytes=nbytes)
    assert torch.equal(region.blocks, wanted)  # the rest of the last block is as it was
    out = bytearray(nbytes)
    region.gather_blocks([6, 2, 3], out, nbytes=nbytes)
    assert out == _bytes(src)
    gathered = region.gather_blocks([6, 2, 3], nbytes=nbytes)
    assert gathered.shape == (nbytes,)
    assert torch.equal(gathered, src)
    assert torch.equal(region.gather_blocks([6, 2, 3], nbytes=300), region.blocks[[6, 2, 3]].flatten())


@given(data=st.data())
def test_copies_are_what_indexing_does(new_id: Any, data: Any) -> None:
    num_blocks = data.draw(st.integers(1, 30), "num_blocks")
    block_bytes = data.draw(st.sampled_from([1, 3, 64, 100, 255, 257, 1024, 7168]), "block_bytes")
    ids = data.draw(st.lists(st.integers(0, num_blocks - 1), max_size=40), "ids")
    unique = list(dict.fromkeys(ids))
    left_out = data.draw(st.integers(0, block_bytes - 1), "left_out")
    offset = data.draw(st.integers(0, 65), "offset")
    with ECSharedRegion(new_id(), num_blocks, block_bytes) as region:
        region.blocks.copy_(pattern(num_blocks, block_bytes, seed=3))
        nbytes = max(len(unique) * block_bytes - left_out, 0)
        src = _at(offset, pattern(len(unique) * block_bytes))[:nbytes]
        wanted = region.blocks.clone()
        filled = wanted[unique].flatten()
        filled[:nbytes] = src
        wanted[unique] = filled.view(len(unique), block_bytes)
        region.scatter_blocks(unique, src, nbytes=nbytes)
        assert torch.equal(region.blocks, wanted)

        nbytes = max(len(ids) * block_bytes - left_out, 0)
        around = torch.zeros(nbytes + offset + 64, dtype=torch.int8)
        region.gather_blocks(ids, around[offset : offset + nbytes], nbytes=nbytes)
        assert torch.equal(around[offset : offset + nbytes], wanted[ids].flatten()[:nbytes])
        assert not around[:offset].any() and not around[offset + nbytes :].any()


@pytest.mark.parametrize("block_bytes", [7168, 4096, 1000, 65536 + 1])
def test_large_batches(open_region: Any, engine_id: str, block_bytes: int) -> None:
    """Above the sizes from which stores go past the cache, from which two threads work, and that are copied at once."""
    room = os.statvfs("/dev/shm")
    if room.f_bavail * room.f_frsize < 80 << 20:
        pytest.skip("needs 80 MiB of /dev/shm")
    num_blocks = (80 << 20) // block_bytes
    region = open_region(engine_id, num_blocks, block_bytes)
    ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(5))
    src = pattern(num_blocks, block_bytes)
    region.scatter_blocks(ids, src)
    assert torch.equal(region.blocks[ids], src)
    out = torch.zeros(num_blocks * block_bytes + 1, dtype=torch.int8)[1:]
    region.gather_blocks(ids, out)
    assert torch.equal(out.view(num_blocks, block_bytes), src)


def test_another_process_sees_the_bytes(region: Any, spawn: Any, engine_id: str) -> None:
    src = pattern(2, 100)
    region.scatter_blocks([9, 3], src)
    child = spawn()
    copied = child.run("out = bytearray(200); Region(id, 10, 100).gather_blocks([9, 3], out); bytes(out)", id=engine_id)
    assert copied == _bytes(src)


def test_two_threads_copy_at_once(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, 4000, 7168)
    sources = [pattern(2000, 7168, seed=seed) for seed in (1, 2)]
    failures: list[str] = []

    def work(first: int, src: Any) -> None:
        ids = list(range(first, 4000, 2))
        for _ in range(5):
            region.scatter_blocks(ids, src)
            if not torch.equal(region.gather_blocks(ids), src):
                failures.append(f"blocks from {first}")

    threads = [threading.Thread(target=work, args=(first, src)) for first, src in enumerate(sources)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_cleanup_during_a_copy_does_not_pull_the_memory_away(engine_id: str) -> None:
    region = ECSharedRegion(engine_id, 2000, 7168)
    address = region._blocks_ptr
    src = pattern(2000, 7168)
    started = threading.Event()
    closed: list[type] = []

    def work() -> None:
        try:
            while True:
                region.scatter_blocks(range(2000), src)
                started.set()
        except RegionClosedError as error:
            closed.append(type(error))

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    region.cleanup()
    thread.join()
    assert closed == [RegionClosedError]
    gc.collect()
    assert not is_mapped(address)


def test_a_forked_child_copies_after_its_parent_did(spawn: Any, engine_id: str) -> None:
    """With a second thread at work in both; the child has none of its parent's."""
    child = spawn()
    status, copied = child.run(
        """
r = Region(id, 3000, 8192)
r.scatter_blocks(range(3000), bytes([7]) * (3000 * 8192))
pid = os.fork()
if pid == 0:
    out = bytearray(3000 * 8192)
    r.gather_blocks(range(2999, -1, -1), out)
    r.scatter_blocks(range(3000), bytes([8]) * (3000 * 8192))
    os._exit(0 if out == bytes([7]) * (3000 * 8192) else 1)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
out = bytearray(3000 * 8192)
r.gather_blocks(range(3000), out)
copied = out == bytes([8]) * (3000 * 8192)
r.cleanup()
status, copied
""",
        id=engine_id,
    )
    assert (status, copied) == (0, True)


def test_ids_and_buffers_without_torch(engine_id: str) -> None:
    """Nobody imports torch where no tensor is wanted."""
    code = f"""
import sys
from ec_shared_region import ECSharedRegion
with ECSharedRegion("{engine_id}", 4, 8) as region:
    region.scatter_blocks([3, 1], b"abcdefghABCDEFGH")
    out = bytearray(16)
    assert region.gather_blocks(range(3, 0, -2), out) is out
    assert out == b"abcdefghABCDEFGH"
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_blocks_can_be_moved_within_the_region(region: Any) -> None:
    before = region.blocks.clone()
    region.scatter_blocks([7, 9], region.blocks[2:4])
    region.gather_blocks([1, 0], region.blocks[4:6])
    wanted = before.clone()
    wanted[[7, 9]] = before[2:4]
    wanted[[4, 5]] = before[[1, 0]]
    assert torch.equal(region.blocks, wanted)


@pytest.mark.parametrize("ids", [[2], [3], [9, 2], range(1, 3)])
def test_a_view_of_the_same_blocks_is_refused(region: Any, ids: Any) -> None:
    before = region.blocks.clone()
    view = region.blocks.flatten()[250 : 250 + 100 * len(ids)]
    with pytest.raises(InvalidArgumentError, match="`src` shares bytes with the blocks that are copied") as caught:
        region.scatter_blocks(ids, view)
    assert ".clone()" in str(caught.value)
    with pytest.raises(InvalidArgumentError, match="`out` shares bytes"):
        region.gather_blocks(ids, memoryview(region).cast("B")[250 : 250 + 100 * len(ids)])
    assert torch.equal(region.blocks, before)


def test_reference_counts_do_not_drift(region: Any) -> None:
    ids, src, out = [4, 5], pattern(2, 100), bytearray(200)
    counts = [sys.getrefcount(thing) for thing in (region, ids, src, out)]
    for _ in range(1000):
        region.scatter_blocks(ids, src)
        region.gather_blocks(ids, out)
        region.gather_blocks(ids)
        with pytest.raises(ValueError):
            region.scatter_blocks([4, 4], src)
    assert [sys.getrefcount(thing) for thing in (region, ids, src, out)] == counts
    out += b"x"  # a buffer that is still held would refuse


class Chameleon:
    """An id whose conversion runs code of the caller's."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def __index__(self) -> int:
        return int(self.act() or 0)


def test_code_that_runs_among_the_ids(region: Any) -> None:
    ids: list[Any] = [1, Chameleon(lambda: ids.clear()), 2, 3]
    assert region.gather_blocks(ids).shape == (2, 100)
    with pytest.raises(ZeroDivisionError):
        region.gather_blocks([1, Chameleon(lambda: 1 // 0)])
    closing = ECSharedRegion(region.engine_id, 10, 100)
    with pytest.raises(RegionClosedError):
        closing.gather_blocks([Chameleon(closing.cleanup)], bytearray(100))


# What must not be, with the class that a caller would catch and what the message says.
NO_IDS = {
    "below zero": ([3, -1], IndexError, "block id out of range: -1 at position 1: the region has 10 blocks"),
    "beyond the end": ([10], ValueError, "block id out of range: 10 at position 0: the region has 10 blocks"),
    "beyond 64 bits": ([0, 1 << 70], IndexError, "block id out of range: an integer of 71 bits at position 1"),
    "unprintable": ([10**5000], IndexError, "block id out of range: an integer of 16610 bits at position 0"),
    "negative tensor": (torch.tensor([-1]), IndexError, "block id out of range: -1 at position 0"),
    "range below zero": (range(2, -3, -1), IndexError, "block id out of range: -1 at position 3"),
    "float": ([1.0], TypeError, "invalid block id at position 0: float"),
    "bool": ([1, True], TypeError, "invalid block id at position 1: bool"),
    "numpy bool": ([numpy.True_], TypeError, "invalid block id at position 0: bool"),
    "None": ([None], TypeError, "invalid block id at position 0: NoneType"),
    "text": ("12", TypeError, "invalid ids: str"),
    "number": (3, TypeError, "invalid ids: int"),
    "set": ({1}, TypeError, "invalid ids: set"),
    "generator": ((i for i in [1]), TypeError, "invalid ids: generator"),
    "nothing": (None, TypeError, "invalid ids: NoneType"),
    "int32 array": (numpy.array([1], "i4"), TypeError, "invalid ids: elements of format `i`, 4 bytes each: wanted"),
    "uint64 array": (numpy.array([1], "u8"), TypeError, "invalid ids: elements of format `L`, 8 bytes each: wanted"),
    "big-endian array": (numpy.array([1], ">i8"), TypeError, "invalid ids: elements of format `>q`"),
    "bool array": (numpy.array([True]), TypeError, r"invalid ids: elements of format `\?`"),
    "float array": (numpy.array([1.0]), TypeError, "invalid ids: elements of format `d`"),
    "bytes": (b"\x01", TypeError, "invalid ids: elements of format `B`"),
    "two dimensions": (numpy.array([[1]]), TypeError, "invalid ids: 2 dimensions"),
    "tensor of two dimensions": (torch.tensor([[1]]), TypeError, "invalid ids: a tensor of torch.int64 with 2 dim"),
    "tensor of none": (torch.tensor(1), TypeError, "invalid ids: a tensor of torch.int64 with 0 dimensions on cpu"),
    "int32 tensor": (torch.tensor([1], dtype=torch.int32), TypeError, "invalid ids: a tensor of torch.int32 with 1"),
    "mask": (torch.tensor([True]), TypeError, "invalid ids: a tensor of torch.bool"),
    "tensor elsewhere": (torch.tensor([1], device="meta"), TypeError, "with 1 dimensions on meta"),
}


@pytest.mark.parametrize(("ids", "kind", "text"), NO_IDS.values(), ids=NO_IDS.keys())
def test_what_is_no_id(region: Any, ids: Any, kind: type[Exception], text: str) -> None:
    before = region.blocks.clone()
    src = pattern(1, 100)
    for copy in (region.scatter_blocks, region.gather_blocks):
        with pytest.raises(kind, match=text) as caught:
            copy(ids, src)
        assert isinstance(caught.value, ec_shared_region.RegionError)
        assert caught.value.hint is not None and "hint: " in str(caught.value)
    assert torch.equal(region.blocks, before)


def test_an_index_error_is_a_value_error(region: Any) -> None:
    with pytest.raises(BlockIndexError) as caught:
        region.gather_blocks([10])
    assert isinstance(caught.value, IndexError) and isinstance(caught.value, ValueError)
    assert caught.value.hint == "ids are whole numbers from 0 to 9; none counts from the end"


@pytest.mark.parametrize("make", IDS.values(), ids=IDS.keys())
def test_a_scatter_refuses_an_id_twice(region: Any, make: Any) -> None:
    before = region.blocks.clone()
    with pytest.raises(InvalidArgumentError, match="duplicate block id: 4 at positions 1 and 3"):
        region.scatter_blocks(make([9, 4, 7, 4, 9]), pattern(5, 100))
    assert torch.equal(region.blocks, before)


NO_MEMORY = {
    "a list": (lambda: [1] * 100, TypeError, "invalid `{}`: list", "contiguous CPU tensor"),
    "nothing": (lambda: 0, TypeError, "invalid `{}`: int", "contiguous CPU tensor"),
    "text": (lambda: "x" * 100, TypeError, "invalid `{}`: str", "contiguous CPU tensor"),
    "objects": (lambda: numpy.array([None] * 100), TypeError, "invalid `{}`: its elements are Python objects", ""),
    "records of objects": (
        lambda: numpy.zeros(10, [("a", "i2"), ("b", "O")]),
        TypeError,
        "invalid `{}`: its elements are Python objects",
        "",
    ),
    "too few bytes": (lambda: bytearray(99), ValueError, "`{}` holds 99 bytes: wanted 100 bytes for 1 bl", "nbytes=99"),
    "too many bytes": (lambda: pattern(101), ValueError, "`{}` holds 101 bytes: wanted 100 bytes for 1 blocks of", ""),
    "another dtype": (lambda: torch.zeros(100), ValueError, "`{}` holds 400 bytes: wanted 100 bytes", ""),
    "a strided tensor": (
        lambda: pattern(10, 20)[:, ::2],
        ValueError,
        r"`{}` is not contiguous: shape \(10, 10\), strides \(20, 2\)",
        "contiguous",
    ),
    "a transposed tensor": (lambda: pattern(10, 10).T, ValueError, "`{}` is not contiguous", "contiguous"),
    "an expanded tensor": (lambda: pattern(1).expand(100), ValueError, "`{}` is not contiguous", "contiguous"),
    "a strided array": (lambda: pattern(200).numpy()[::2], ValueError, "`{}` is not contiguous", "ascontiguousarray"),
    "a strided memoryview": (lambda: memoryview(bytearray(200))[::2], ValueError, "`{}` is not contiguous", ""),
    "a Fortran array": (
        lambda: numpy.asfortranarray(pattern(10, 10).numpy()),
        ValueError,
        "`{}` is not contiguous",
        "ascontiguousarray",
    ),
    "another device": (
        lambda: torch.empty(100, dtype=torch.int8, device="meta"),
        TypeError,
        "`{}` is on meta: wanted memory of the CPU",
        "directly",
    ),
    "a sparse tensor": (
        lambda: torch.zeros(10, 10).to_sparse(),
        TypeError,
        "`{}` has layout torch.sparse_coo: wanted torch.strided",
        "to_dense",
    ),
    "a lazy conjugate": (
        lambda: torch.zeros(12, dtype=torch.complex64).conj(),
        ValueError,
        "`{}` is a lazy conjugate or negative",
        "resolve_conj",
    ),
    "a freed storage": (lambda: freed(), ValueError, "`{}` has no memory: 100 bytes at address 0", "freed"),
}


def freed() -> Any:
    tensor = pattern(100)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(("make", "kind", "text", "hint"), NO_MEMORY.values(), ids=NO_MEMORY.keys())
def test_what_is_no_memory(region: Any, make: Any, kind: type[Exception], text: str, hint: str) -> None:
    before = region.blocks.clone()
    for what, copy in (("src", region.scatter_blocks), ("out", region.gather_blocks)):
        with pytest.raises(kind, match=text.format(what)) as caught:
            copy([1], make())
        assert isinstance(caught.value, ec_shared_region.RegionError)
        assert caught.value.hint is not None and hint in caught.value.hint
    assert torch.equal(region.blocks, before)


class OnDevice(torch.Tensor):
    """As much of a tensor on a GPU as a machine without one has."""

    @property
    def device(self) -> Any:
        return torch.device("cuda", 1)


def test_a_cuda_tensor_is_refused_by_name(region: Any) -> None:
    tensor = pattern(100).as_subclass(OnDevice)
    with pytest.raises(ArgumentTypeError, match="`src` is on cuda:1: wanted memory of the CPU") as caught:
        region.scatter_blocks([1], tensor)
    assert "region.blocks[i].copy_(tensor)" in str(caught.value)
    with pytest.raises(ArgumentTypeError, match="`out` is on cuda:1") as caught:
        region.gather_blocks([1], tensor)
    assert "tensor.copy_(region.blocks[i])" in str(caught.value)


@pytest.mark.parametrize("out", [bytes(100), memoryview(bytes(100)), numpy.frombuffer(bytes(100), "i1")])
def test_a_gather_writes_to_nothing_that_is_read_only(region: Any, out: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="`out` is read-only"):
        region.gather_blocks([1], out)
    assert _bytes(out) == bytes(100)


def test_a_gather_does_not_change_what_autograd_watches(region: Any) -> None:
    out = torch.zeros(25, requires_grad=True)
    with pytest.raises(InvalidArgumentError, match="`out` requires grad"):
        region.gather_blocks([1], out)
    region.gather_blocks([1], out.detach())
    assert _bytes(out.detach()) == _bytes(region.blocks[1])
    region.scatter_blocks([2], out)


@pytest.mark.parametrize(
    ("nbytes", "kind", "text"),
    [
        (100, ValueError, "100 bytes do not end in the last of 2 blocks of 100 bytes: wanted 101 to 200 bytes"),
        (201, ValueError, "201 bytes do not end in the last of 2 blocks of 100 bytes: wanted 101 to 200 bytes"),
        (0, ValueError, "0 bytes do not end in the last of 2 blocks"),
        (150, ValueError, "`src` holds 200 bytes: wanted 150 bytes for 2 blocks"),
        (-1, ValueError, "invalid nbytes: -1: it must be from 0 to"),
        (1 << 60, ValueError, "invalid nbytes: 1152921504606846976"),
        (1 << 5000, ValueError, "invalid nbytes: an integer of 5001 bits"),
        (150.0, TypeError, "invalid nbytes: 150.0: it must be an int, not float"),
        (True, TypeError, "invalid nbytes: True: it must be an int, not bool"),
        ("150", TypeError, "invalid nbytes: '150': it must be an int, not str"),
    ],
)
def test_a_number_of_bytes_that_fits_nothing(region: Any, nbytes: Any, kind: type[Exception], text: str) -> None:
    before = region.blocks.clone()
    with pytest.raises(kind, match=text):
        region.scatter_blocks([1, 2], pattern(200), nbytes=nbytes)
    assert torch.equal(region.blocks, before)


def test_the_bytes_of_a_gather_must_be_possible(region: Any) -> None:
    with pytest.raises(ValueError, match="wanted 0 to 0 bytes"):
        region.gather_blocks([], nbytes=1)


@pytest.mark.parametrize("ids", [[1], []])
def test_a_closed_region_copies_nothing(engine_id: str, ids: list[int]) -> None:
    region = ECSharedRegion(engine_id, 10, 100)
    region.cleanup()
    memory = bytearray(100 * len(ids))
    for copy in (region.scatter_blocks, region.gather_blocks):
        with pytest.raises(RegionClosedError, match="the region is closed"):
            copy(ids, memory)
    with pytest.raises(RegionClosedError):
        region.gather_blocks(ids)


def test_a_failed_copy_keeps_no_mapping(engine_id: str) -> None:
    region = ECSharedRegion(engine_id, 10, 100)
    address = region._blocks_ptr
    with pytest.raises(ValueError) as caught:
        region.scatter_blocks([1], b"short")
    region.cleanup()
    assert not is_mapped(address)
    assert caught.value.__traceback__ is not None


def test_ctrl_c_ends_a_long_copy(spawn: Any, engine_id: str) -> None:
    """What was copied stays; the region is as good as before, and the second thread is gone."""
    child = spawn(imports=("signal", "threading", "time"))
    child.run(
        "r = Region(id, 40, 1 << 20); ids = list(range(40)) * 10; out = bytearray(400 << 20)",
        id=engine_id,
    )
    raised, threads = child.run(
        """
def interrupt():
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
raised = None
try:
    while True:
        r.gather_blocks(ids, out)
except KeyboardInterrupt as error:
    raised = type(error).__name__
raised, len(os.listdir("/proc/self/task"))
"""
    )
    assert raised == "KeyboardInterrupt"
    assert threads <= 2  # the interrupting one may still be ending
    child.run("r.gather_blocks(ids, out); r.cleanup()")


def test_a_signal_handler_that_forks_during_a_copy(spawn: Any, engine_id: str) -> None:
    """The child comes back into the middle of its parent's copy, without the second thread, and ends it."""
    child = spawn(imports=("signal",))
    outcomes = child.run(
        """
r = Region(id, 40, 1 << 20)
for number in range(40):
    r.scatter_blocks([number], bytes([number]) * (1 << 20))
ids, out = list(range(40)) * 10, bytearray(400 << 20)
forked = []
def handler(number, frame):
    forked.append(os.fork())
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.03)
while not forked:
    r.gather_blocks(ids, out)
is_right = all(out[(at << 20) + 7] == at % 40 for at in range(400)) and out[-1] == 39
if forked[0] == 0:
    os._exit(0 if is_right else 1)
is_right, os.waitstatus_to_exitcode(os.waitpid(forked[0], 0)[1])
""",
        id=engine_id,
    )
    assert outcomes == (True, 0)
    child.run("r.cleanup()")
