"""Arguments that cannot be right: a typed error with the values and a hint, before anything exists."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import ec_shared_region as ec
from ec_shared_region import ECSharedRegion
from procs import SHM, path_of

# NAME_MAX less the prefix and the suffix, in bytes.
LONGEST = 255 - len("vllm_ec_.mmap")


def refused(kind: type[Exception], *args: Any, **options: Any) -> Exception:
    """Constructs, expects the error, and that neither a name nor a descriptor came of it."""
    names, descriptors = set(os.listdir(SHM)), os.listdir("/proc/self/fd")
    with pytest.raises(kind) as caught:
        ECSharedRegion(*args, **options)
    assert isinstance(caught.value, ec.RegionError)
    assert {name for name in set(os.listdir(SHM)) - names if "vllm_ec" in name} == set()
    assert os.listdir("/proc/self/fd") == descriptors
    what, _, hint = str(caught.value).partition("\n")
    assert what
    assert hint.startswith("hint: ")
    assert "\n" not in hint
    assert caught.value.hint and caught.value.hint in hint
    return caught.value


@pytest.mark.case("PE-07")
@pytest.mark.parametrize(
    "engine_id",
    ["a/b", "../x", "..", "/", "/etc/passwd", "x" * 300, "x" * (LONGEST + 1), "a\0b", "\0", "", "é" * 130],
    ids=lambda value: repr(value[:12]),
)
def test_an_id_that_cannot_be_a_file_name(engine_id: str) -> None:
    error = refused(ec.InvalidArgumentError, engine_id, 2, 64)
    assert isinstance(error, ValueError)


def test_a_lone_surrogate_is_a_value_error() -> None:
    error = refused(ec.InvalidArgumentError, "a\ud800b", 2, 64)
    assert isinstance(error, ValueError)


@pytest.mark.case("FR-36")
def test_the_length_is_counted_in_bytes_and_the_longest_works(open_region: Any) -> None:
    name = f"{os.getpid():x}"
    region = open_region(name + "é" * ((LONGEST - len(name)) // 2), 1, 64)
    assert len(os.path.basename(region.path).encode()) in (254, 255)
    assert os.path.exists(region.path)


@pytest.mark.parametrize("engine_id", [None, 5, b"bytes", bytearray(b"x"), 1.5, ["x"], object()], ids=repr)
def test_an_id_of_another_type(engine_id: Any) -> None:
    error = refused(ec.ArgumentTypeError, engine_id, 2, 64)
    assert isinstance(error, TypeError)
    assert type(engine_id).__name__ in str(error)


@settings(max_examples=150)
@given(st.text(max_size=140))
@example("..").via("refused")
@example("a..b").via("harmless")
@example(" ").via("odd, and a file name")
@example("new\nline").via("odd, and a file name")
@example("%s{0}$HOME").via("nobody expands it")
@example("\u202e").via("odd, and a file name")
def test_any_text_is_refused_or_makes_exactly_its_file(text: str) -> None:
    """Whatever the id: either nothing happens, or the region is where the contract says."""
    names = set(os.listdir(SHM))
    try:
        region = ECSharedRegion(text, 1, 8)
    except ec.InvalidArgumentError as error:
        assert isinstance(error, ValueError)
        made = {name for name in set(os.listdir(SHM)) - names if "vllm_ec" in name}
        assert made == set()
    else:
        with region:
            assert "/" not in text and "\0" not in text and text
            assert os.path.samestat(os.stat(f"/dev/shm/vllm_ec_{text}.mmap"), os.fstat(region._fd))
            assert region.engine_id == text


@pytest.mark.case("OB-04")
@pytest.mark.parametrize("bad", [0, -1, -(2**63), -(2**70)])
@pytest.mark.parametrize("which", ["num_blocks", "block_size_bytes"])
def test_a_size_that_is_not_positive(engine_id: str, which: str, bad: int) -> None:
    """A budget smaller than one block gives `num_blocks` 0; the error shows what was asked."""
    error = refused(ec.InvalidArgumentError, engine_id, **{"num_blocks": 2, "block_size_bytes": 64, which: bad})
    assert isinstance(error, ValueError)
    assert which in str(error)
    assert str(bad) in str(error)


@pytest.mark.parametrize(
    ("blocks", "block_bytes"),
    [(2**40, 2**40), (2**63, 1), (1, 2**63), (2**64, 1), (1, 2**64 + 1), (2**32, 2**31), (2**200, 1), (2**62, 2)],
)
def test_a_size_that_overflows(engine_id: str, blocks: int, block_bytes: int) -> None:
    error = refused(ec.SizeOverflowError, engine_id, blocks, block_bytes)
    assert isinstance(error, OverflowError)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("bad", [1.0, 8.5, math.nan, True, False, "8", b"8", None, [8], 8j], ids=repr)
@pytest.mark.parametrize("which", ["num_blocks", "block_size_bytes"])
def test_a_size_of_another_type(engine_id: str, which: str, bad: Any) -> None:
    error = refused(ec.ArgumentTypeError, engine_id, **{"num_blocks": 2, "block_size_bytes": 64, which: bad})
    assert isinstance(error, TypeError)
    assert which in str(error)
    assert type(bad).__name__ in str(error)


def test_an_integer_of_another_library_is_an_integer(open_region: Any, engine_id: str) -> None:
    numpy = pytest.importorskip("numpy")
    region = open_region(engine_id, numpy.int64(3), numpy.uint16(64))
    assert (region.num_blocks, region.block_size_bytes) == (3, 64)
    assert type(region.num_blocks) is int


def test_a_string_of_a_subclass_is_a_string(open_region: Any, engine_id: str) -> None:
    class Name(str):
        pass

    assert open_region(Name(engine_id), 2, 64).engine_id == engine_id


@settings(max_examples=100)
@given(blocks=st.integers(-(2**70), 2**70), block_bytes=st.integers(-(2**70), 2**70))
def test_any_pair_of_sizes_is_refused_or_exact(engine_id: str, blocks: int, block_bytes: int) -> None:
    # Small ones are made; what no machine has is refused; what this one may really have is left alone.
    assume(not 1 << 16 < blocks * block_bytes < 1 << 50)
    try:
        region = ECSharedRegion(engine_id, blocks, block_bytes)
    except (ec.InvalidArgumentError, ec.NoSpaceError):
        assert not path_of(engine_id).exists()
    else:
        with region:
            assert os.path.getsize(region.path) == blocks * block_bytes == region.nbytes


@pytest.mark.parametrize("timeout", [-1, -0.001, math.nan, -math.inf])
def test_a_timeout_that_is_no_span_of_time(engine_id: str, timeout: float) -> None:
    error = refused(ec.InvalidArgumentError, engine_id, 2, 64, timeout=timeout)
    assert "timeout" in str(error)


@pytest.mark.parametrize("timeout", ["1", None, [1], True], ids=repr)
def test_a_timeout_of_another_type(engine_id: str, timeout: Any) -> None:
    error = refused(ec.ArgumentTypeError, engine_id, 2, 64, timeout=timeout)
    assert "timeout" in str(error)


@pytest.mark.parametrize("timeout", [0, 0.0, 30, 1e9])
def test_timeouts_that_are_fine(open_region: Any, engine_id: str, timeout: float) -> None:
    assert open_region(engine_id, 2, 64, timeout=timeout).is_creator


@pytest.mark.parametrize("option", ["mode", "populate"])
@pytest.mark.parametrize("value", ["", "Create", "attach", "create\0"])
def test_an_unknown_choice_lists_the_known_ones(engine_id: str, option: str, value: str) -> None:
    error = refused(ec.InvalidArgumentError, engine_id, 2, 64, **{option: value})
    assert option in str(error)
    assert "create" in str(error) and "join" in str(error)


@pytest.mark.parametrize("option", ["mode", "populate"])
@pytest.mark.parametrize("value", [None, True, 1, b"create"], ids=repr)
def test_a_choice_of_another_type(engine_id: str, option: str, value: Any) -> None:
    error = refused(ec.ArgumentTypeError, engine_id, 2, 64, **{option: value})
    assert option in str(error)


def test_an_unknown_keyword_is_a_type_error(engine_id: str) -> None:
    with pytest.raises(TypeError):
        ECSharedRegion(engine_id, 2, 64, pinned=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        ECSharedRegion(engine_id, 2)  # type: ignore[call-arg]
    assert not path_of(engine_id).exists()


def test_a_refused_argument_disturbs_no_region(open_region: Any, engine_id: str) -> None:
    region = open_region(engine_id, 2, 64)
    memoryview(region)[0, 0] = 1
    refused(ec.InvalidArgumentError, engine_id, 0, 64)
    refused(ec.ArgumentTypeError, engine_id, 2.0, 64)
    assert memoryview(open_region(engine_id, 2, 64))[0, 0] == 1
