"""Arguments and sequences of calls that nobody thought of: subclasses of `Exception` come out, and nothing is left."""

from __future__ import annotations

import contextlib
import decimal
import fractions
import gc
import itertools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import ec_shared_region as ec
from ec_shared_region import ECSharedRegion, _wait_for_file_size
from procs import SHM, path_of

_RUN = f"t{os.getpid():x}-fuzz"
_numbers = itertools.count()


class Odd:
    """Claims to be a number, in ways that the protocol of numbers allows."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __index__(self) -> Any:
        return self.answer()

    def __float__(self) -> Any:
        return self.answer()

    def answer(self) -> Any:
        if isinstance(self.value, type) and issubclass(self.value, Exception):
            raise self.value("odd")
        return self.value

    def __repr__(self) -> str:
        return f"Odd({self.value!r})"


class OddText(str):
    """A str whose methods lie; what counts is the text itself."""

    def encode(self, *_: Any) -> bytes:
        return b"../x"

    def __str__(self) -> str:
        return "../../etc/passwd"

    def __contains__(self, _: object) -> bool:
        return False


integers = st.one_of(
    st.integers(-2, 64),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**31, 2**32, 2**61, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 2**1024, 10**400]),
)
odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.complex_numbers(),
    st.binary(max_size=8),
    st.text(max_size=8),
    st.decimals(),
    st.fractions(),
    st.lists(st.integers(), max_size=2),
    st.sampled_from([object(), int, len, decimal.Decimal("sNaN"), fractions.Fraction(1, 3), ...]),
    st.sampled_from([1, 2.0, "1", None, ValueError, KeyError, OSError, RecursionError]).map(Odd),
)
sizes = st.one_of(integers, integers.map(Odd), odd_values)
ids = st.one_of(
    st.text(max_size=16),
    st.text(alphabet=st.characters(), min_size=60, max_size=260),
    st.sampled_from([".", "..", "a/../b", "\0", "\udc80", "x" * 242, "x" * 243, "%s", "\n"]),
    st.text(alphabet="./\\ab", max_size=8).map(OddText),
    odd_values,
)
words = st.one_of(
    st.sampled_from(["create_or_join", "create", "join", "never"]),
    st.text(max_size=12),
    st.text().map(OddText),
    odd_values,
)
# A wait for what never comes must end: what is really waited for is short, everything else is refused.
timeouts = st.one_of(st.just(0), st.floats(max_value=0.01), integers.filter(lambda n: n <= 0 or n > 2**40), odd_values)


@contextlib.contextmanager
def nothing_comes_of_it() -> Iterator[None]:
    """No name and no descriptor more than before, whatever happens inside."""
    names, descriptors = set(os.listdir(SHM)), os.listdir("/proc/self/fd")
    yield
    gc.collect()
    assert {name for name in set(os.listdir(SHM)) - names if "vllm_ec" in name} == set()
    assert os.listdir("/proc/self/fd") == descriptors


def is_small(blocks: Any, block_bytes: Any) -> bool:
    """What would really be made is kept to a few pages; what no machine has may be asked for."""
    try:
        total = int(blocks.__index__()) * int(block_bytes.__index__())
    except Exception:
        return True
    return not 1 << 16 < total < 1 << 50


@pytest.mark.case("PE-07", "PK-10", "PK-11", "PK-13", "OB-04")
@settings(max_examples=400)
@given(engine_id=ids, blocks=sizes, block_bytes=sizes, timeout=timeouts, mode=words, populate=words)
def test_any_arguments_make_a_region_or_an_exception(
    engine_id: Any, blocks: Any, block_bytes: Any, timeout: Any, mode: Any, populate: Any
) -> None:
    if not is_small(blocks, block_bytes):
        return
    if isinstance(timeout, float) and timeout > 0.01:
        return
    with nothing_comes_of_it():
        try:
            region = ECSharedRegion(engine_id, blocks, block_bytes, timeout=timeout, mode=mode, populate=populate)
        except BaseException as error:
            # KeyboardInterrupt would be the user's; a panic's exception is no Exception and must never be seen.
            assert isinstance(error, Exception), type(error)
            assert "panic" not in type(error).__name__.lower()
        else:
            with region:
                assert type(region.num_blocks) is int and type(region.block_size_bytes) is int
                assert os.path.getsize(region.path) == region.nbytes > 0
                assert os.path.dirname(region.path) == str(SHM)
        del timeout


@pytest.mark.case("PK-10", "PK-13")
@settings(max_examples=200)
@given(max_piece_bytes=st.one_of(st.none(), sizes), device=st.one_of(st.none(), sizes), strict=st.booleans())
def test_any_arguments_of_pin_memory(max_piece_bytes: Any, device: Any, strict: bool) -> None:
    with ECSharedRegion(f"{_RUN}-{next(_numbers)}", 2, 64) as region:
        try:
            result = region.pin_memory(max_piece_bytes=max_piece_bytes, device=device, strict=strict)
        except BaseException as error:
            assert isinstance(error, Exception), type(error)
            assert not region.is_pinned
        else:
            assert isinstance(result, ec.PinResult)
            assert bool(result) is region.is_pinned
        memoryview(region)[1, 63] = 1


@pytest.mark.case("PK-10", "PK-13")
@settings(max_examples=200)
@given(
    # Numbers of descriptors that are surely none of the run's own.
    descriptor=st.one_of(st.integers(max_value=-1), st.integers(min_value=1 << 20)),
    wanted=sizes,
    timeout=timeouts.filter(lambda value: not isinstance(value, float) or value <= 0.01),
)
def test_any_arguments_of_the_wait_for_a_size(descriptor: Any, wanted: Any, timeout: Any) -> None:
    try:
        _wait_for_file_size(descriptor, wanted, timeout)
    except BaseException as error:
        assert isinstance(error, Exception), type(error)
    else:
        raise AssertionError("a descriptor that is none has no size")


@settings(max_examples=100)
@given(descriptor=odd_values, wanted=odd_values, timeout=timeouts.filter(lambda value: not isinstance(value, float)))
def test_odd_arguments_of_the_wait_for_a_size(descriptor: Any, wanted: Any, timeout: Any) -> None:
    try:
        _wait_for_file_size(descriptor, wanted, timeout)
    except BaseException as error:
        assert isinstance(error, Exception), type(error)


SHAPES = [(2, 64), (4, 32), (1, 7168)]


class Holder:
    """What the model knows of one open region."""

    def __init__(self, region: Any, identity: int, blocks: int, block_bytes: int) -> None:
        self.region, self.identity, self.shape = region, identity, (blocks, block_bytes)
        self.view: Any = None


class Life(RuleBasedStateMachine):
    """One process opens, joins, writes, keeps views, leaves and loses names in any order, over two ids.

    The model: at most one region at a name; who finds none living there is creator and sees zeroes; who finds one
    joins it, sees its bytes and its shape, or is refused. A region without a name goes on for those who hold it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ids = [f"{_RUN}-{next(_numbers)}" for _ in range(2)]
        self.at_name: dict[str, int | None] = dict.fromkeys(self.ids)
        self.bytes: dict[int, int] = {}
        self.shapes: dict[int, tuple[int, int]] = {}
        self.holders: list[Holder] = []
        self.kept_views: list[tuple[Any, int]] = []
        self.generation = itertools.count(1)

    def holders_of(self, identity: int) -> list[Holder]:
        return [holder for holder in self.holders if holder.identity == identity]

    def is_alive(self, identity: int) -> bool:
        return bool(self.holders_of(identity)) or any(owner == identity for _, owner in self.kept_views)

    @rule(
        which=st.integers(0, 1),
        shape=st.sampled_from(SHAPES),
        mode=st.sampled_from(["create_or_join", "create", "join"]),
    )
    def open(self, which: int, shape: tuple[int, int], mode: str) -> None:
        engine_id = self.ids[which]
        living = self.at_name[engine_id]
        if living is not None and not self.is_alive(living):
            living = None  # a dead file that nobody has met since
        try:
            region = ECSharedRegion(engine_id, *shape, mode=mode, timeout=0)
        except ec.RegionExistsError:
            assert mode == "create" and living is not None
        except ec.GeometryMismatchError:
            assert living is not None and self.shapes[living] != shape
        except ec.RegionNotFoundError:
            assert mode == "join" and living is None
        except ec.RegionTimeoutError:
            assert mode == "join" and living is None and path_of(engine_id).exists()
        else:
            assert region.is_creator is (living is None)
            if living is None:
                assert mode != "join"
                living = next(self.generation)
                self.bytes[living], self.shapes[living] = 0, shape
                self.at_name[engine_id] = living
            assert mode != "create" or region.is_creator
            assert self.shapes[living] == shape
            self.holders.append(Holder(region, living, *shape))
            self.look(self.holders[-1])

    def look(self, holder: Holder) -> None:
        seen = set(bytes(memoryview(holder.region).cast("B")))
        assert seen == {self.bytes[holder.identity]}

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), value=st.integers(0, 127))
    def write(self, data: Any, value: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        memoryview(holder.region).cast("B")[:] = bytes([value]) * holder.region.nbytes
        self.bytes[holder.identity] = value
        for other in self.holders_of(holder.identity):
            self.look(other)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def keep_a_view(self, data: Any) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        holder.view = memoryview(holder.region)[1:] if holder.shape[0] > 1 else memoryview(holder.region)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), how=st.sampled_from(["cleanup", "drop", "with", "twice"]))
    def leave(self, data: Any, how: str) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        region, holder.region = holder.region, None
        is_creator, path = region.is_creator, region.path
        if holder.view is not None:
            self.kept_views.append((holder.view, holder.identity))
            how = "cleanup"  # a view keeps an object that is only dropped, and with it the name
        if how == "drop":
            del region
            gc.collect()
        elif how == "with":
            with region:
                pass
        else:
            for _ in range(2 if how == "twice" else 1):
                region.cleanup()
        for engine_id, living in self.at_name.items():
            if living == holder.identity and str(path_of(engine_id)) == path:
                if is_creator or not self.is_alive(living):
                    assert not path_of(engine_id).exists()
                    self.at_name[engine_id] = None
                else:
                    assert path_of(engine_id).exists(), "a joiner took the name of a living region"

    @precondition(lambda self: self.kept_views)
    @rule(data=st.data())
    def drop_a_view(self, data: Any) -> None:
        at = data.draw(st.integers(0, len(self.kept_views) - 1))
        view, identity = self.kept_views.pop(at)
        assert set(bytes(view)) == {self.bytes[identity]}, "a view lost its bytes"
        view.release()

    @rule(which=st.integers(0, 1))
    def lose_the_name(self, which: int) -> None:
        """A person, or a clean-up daemon."""
        path_of(self.ids[which]).unlink(missing_ok=True)
        self.at_name[self.ids[which]] = None

    @invariant()
    def names_are_where_the_model_says(self) -> None:
        for engine_id, living in self.at_name.items():
            if living is None:
                assert not path_of(engine_id).exists()
            elif holders := self.holders_of(living):
                assert os.path.samestat(os.stat(path_of(engine_id)), os.fstat(holders[0].region._fd))

    def teardown(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for view, _ in self.kept_views:
                view.release()
            for holder in self.holders:
                holder.view = None
                holder.region.cleanup()
        self.holders, self.kept_views = [], []
        gc.collect()
        for engine_id in self.ids:
            path_of(engine_id).unlink(missing_ok=True)  # the one that a joiner's last view kept alive


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLife = pytest.mark.case("CR-05", "ST-14", "ST-22", "LI-07")(Life.TestCase)
