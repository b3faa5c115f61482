"""The class that callers know, over the Rust core."""

from __future__ import annotations

import atexit
import logging
import operator
import os
import warnings
import weakref
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar, overload

from . import _core, check, copies, errors, pin, prefault, stats
from .check import CheckResult, Identity
from .errors import argument_error as _argument_error
from .pin import PinResult
from .prefault import PrefaultReport
from .stats import RegionStats

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    import torch

    from .copies import BlockIds, Memory, Out

__all__ = ["ECSharedRegion", "logger"]

logger = logging.getLogger("ec_shared_region")

_Value = TypeVar("_Value")

# Paths and codes of failed registrations that were warned of in this process: a region that is opened again and again
# meets the same refusal.
_warned: dict[tuple[str, int | None], PinResult] = {}

# Cleaned up when the interpreter ends; a process that is killed leaves its file to the next constructor. By `id`, in a
# dictionary and no set: its references can be listed in one step, whatever other threads open and close.
_open_regions: weakref.WeakValueDictionary[int, ECSharedRegion] = weakref.WeakValueDictionary()


class _WhileOpen(Generic[_Value]):
    """An attribute that is made on first use and kept until `cleanup` takes it away.

    What `functools.cached_property` does, but that threads which come at once get the same value, and that one made
    while another thread cleans up does not come back. No lock: a signal handler or a forked child could meet it held.
    """

    def __init__(self, make: Callable[[ECSharedRegion], _Value]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    @overload
    def __get__(self, region: None, owner: object = None) -> Self: ...
    @overload
    def __get__(self, region: ECSharedRegion, owner: object = None) -> _Value: ...
    def __get__(self, region: ECSharedRegion | None, owner: object = None) -> Self | _Value:
        if region is None:
            return self
        name = self._make.__name__
        try:
            # The first thread's stays.
            value: _Value = region.__dict__.setdefault(name, self._make(region))
        except errors.RegionClosedError:
            if region._is_open:
                raise
        # `cleanup` says "closed" first and takes the value away then: it sees ours, or we see that it was here.
        if not region._is_open:
            region.__dict__.pop(name, None)
            return self._make(region)  # as of a closed region
        return value


class ECSharedRegion(_core.Region):
    """Host memory in fixed-size blocks, shared by every process that opens the same ``engine_id``.

    The bytes live in ``/dev/shm/vllm_ec_{engine_id}.mmap``: ``num_blocks * block_size_bytes`` of them, one
    block behind the other, no header. The first process to come creates the region, zeroed and with every
    page backed; the others join it, also while it is prepared, and wait for that when they first use the
    bytes. The region owns only the memory: it does not allocate or evict blocks,
    and the bytes of a block need the callers' own ordering between processes.

    :param engine_id: name of the engine, one component of a path: no ``/``, at most 242 bytes.
    :param num_blocks: number of blocks, at least 1.
    :param block_size_bytes: bytes of a block, at least 1; need not be a multiple of the page size.
    :param timeout: seconds after which a wait for another process ends with :class:`TimeoutError`.
    :param mode: ``"create_or_join"``; ``"create"`` raises :class:`FileExistsError` where the region is in
        use; ``"join"`` never creates and waits up to ``timeout``.
    :param populate: who maps the pages ahead of their first use: ``"create"``, the creator; ``"join"``, a
        joiner too; ``"never"``, nobody (the bytes are reserved all the same).
    :param huge_pages: may the creator place the region in huge pages? ``"auto"``: where they are to be had
        soon, never making the region larger; ``"off"``; ``"require"``: else :class:`NoHugePagesError`.
    :param numa: where the creator places the pages: ``"default"``, as the kernel does; ``"interleave"``, in
        turn over the nodes; the number of a node, preferred. A sandbox that forbids it is a warning.
    :param prefault_threads: threads that prepare the region. Default: by its size and the cores, at most 4.
    :param progress: called between the pieces of the preparation with the bytes done and the bytes in all.
        What it raises ends the constructor.

    :raises ValueError: a value that no region can have, or another geometry lives under this id.
    :raises TypeError: sizes that are no integers, an id that is no string.
    :raises OSError: no space (``ENOSPC``, ``ENOMEM``), no huge pages where they are required, a file at the
        path that is not ours (:class:`PermissionError`), a missing or read-only ``/dev/shm``,
        :class:`TimeoutError`.

    All are also :class:`ec_shared_region.RegionError` and say what to do. Whatever is raised, nothing is
    left behind. The object is a context manager and exports its memory without a copy
    (``memoryview(region)``, ``numpy.asarray(region)``: int8, shape ``(num_blocks, block_size_bytes)``).
    """

    num_blocks: int
    """Number of blocks."""
    block_size_bytes: int
    """Bytes of one block."""
    engine_id: str
    """The id that the region was opened by."""

    # Names that callers, subclasses and tests of the original class reach for.
    _mmap_path: str
    _is_creator: bool = False
    _fd: int | None = None
    _blocks_nbytes: int

    _is_open: bool = False
    _opened: _core.OpenReport
    _is_registered_elsewhere: bool = False
    _pin_result: PinResult | None = None

    def __init__(
        self,
        engine_id: str,
        num_blocks: int,
        block_size_bytes: int,
        *,
        timeout: float = 30.0,
        mode: Literal["create_or_join", "create", "join"] = "create_or_join",
        populate: Literal["create", "join", "never"] = "create",
        huge_pages: Literal["auto", "off", "require"] = "auto",
        numa: Literal["default", "interleave"] | int = "default",
        prefault_threads: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        engine_id = _text("engine_id", engine_id)
        num_blocks = _whole_number("num_blocks", num_blocks)
        block_size_bytes = _whole_number("block_size_bytes", block_size_bytes)
        opened = self._open(
            engine_id,
            num_blocks,
            block_size_bytes,
            _seconds("timeout", timeout),
            _text("mode", mode),
            _text("populate", populate),
            _text("huge_pages", huge_pages),
            numa if isinstance(numa, str) else str(_whole_number("numa", numa)),
            None if prefault_threads is None else _whole_number("prefault_threads", prefault_threads, smallest=1),
            logger.warning,
            _callable("progress", progress),
        )
        self.engine_id = engine_id
        self.num_blocks = num_blocks
        self.block_size_bytes = block_size_bytes
        self._mmap_path = opened.path
        self._is_creator = opened.is_creator
        self._fd = opened.fd
        self._opened = opened
        for name in ("_mmap_obj", "_blocks_ptr", "prefault_report"):
            self.__dict__.pop(name, None)
        self._is_open = True
        self._blocks_nbytes = num_blocks * block_size_bytes
        _open_regions[id(self)] = self
        for file_name, freed_bytes in opened.reclaimed:
            logger.info("removed %s, which a dead process left: %d bytes", _core.shown(file_name), freed_bytes)
        for file_name, reason in opened.passed_over:
            logger.debug("left %s where it is: %s", _core.shown(file_name), reason)
        if logger.isEnabledFor(logging.INFO):
            self._log_opened(opened)

    def _log_opened(self, opened: _core.OpenReport) -> None:
        logger.info(
            "%s region %s (engine_id %s, inode %d): %d blocks x %d bytes = %d bytes, in %.3f s "
            "(waited %.3f s, %s by %s in %.3f s, %d bytes in huge pages, %d threads)%s%s",
            "created" if opened.is_creator else "joined",
            self._shown_path,
            _core.shown(self.engine_id),
            opened.inode,
            self.num_blocks,
            self.block_size_bytes,
            self._blocks_nbytes,
            opened.elapsed_seconds,
            opened.waited_seconds,
            opened.tier,
            opened.method,
            opened.prefault_seconds,
            opened.huge_bytes,
            opened.threads,
            "" if opened.is_ready else "; its creator still prepares it",
            _room_left(opened.path) if opened.is_creator else "",
        )
        if opened.fallback is not None:
            logger.debug("%s: base pages: %s", self._shown_path, opened.fallback)

    @cached_property
    def prefault_report(self) -> PrefaultReport:
        """How the pages were put in place, and mapped by this process."""
        return prefault.report_of(self._opened)

    # Plain attributes of the original, filled when they are first used: until then the pages may be missing.

    @_WhileOpen
    def _mmap_obj(self) -> _core.Mapping | None:
        if not self._is_open:
            return None
        self._wait_until_ready()
        return self._mapping()

    @cached_property
    def _blocks_ptr(self) -> int:
        self._wait_until_ready()
        return self._opened.address

    @_WhileOpen
    def blocks(self) -> torch.Tensor:
        """The memory itself as a tensor: ``torch.int8``, shape ``(num_blocks, block_size_bytes)``, no copy.

        Made on first use, which is when torch is imported and, in a process that joined while the creator
        still prepares the region, when the end of that is waited for (up to ``timeout``). Views may outlive
        the region: the mapping stays until the last of them is gone. After :meth:`cleanup` the attribute does
        not exist. Do not call ``blocks.pin_memory()``, which copies: :meth:`pin_memory` of the region pins in
        place.
        """
        mapping = self._mmap_obj
        if mapping is None:
            raise AttributeError("blocks: the region is closed")
        import torch

        # A held memoryview, since torch.frombuffer gives a buffer back at once and keeps only the object.
        flat = torch.frombuffer(memoryview(mapping), dtype=torch.int8)
        return flat.view(self.num_blocks, self.block_size_bytes)

    @property
    def _is_pinned(self) -> bool:
        # The core knows, and changes it together with the registration. A subclass may register by other means and
        # say so, as it could with the original's plain attribute, and have an attribute `_registered` of its own.
        return (_core.Region._registered(self) or self._is_registered_elsewhere) and self._is_open

    @_is_pinned.setter
    def _is_pinned(self, value: bool) -> None:
        self._is_registered_elsewhere = value

    @property
    def path(self) -> str:
        """Path of the file, also after :meth:`cleanup`."""
        return self._mmap_path

    @property
    def _shown_path(self) -> str:
        return _core.shown(self._mmap_path)

    @property
    def is_creator(self) -> bool:
        """Did this process make the region? The creator's :meth:`cleanup` takes the name away."""
        return self._is_creator

    @property
    def is_pinned(self) -> bool:
        """Is the whole mapping registered with CUDA in this process?"""
        return self._is_pinned

    @property
    def is_ready(self) -> bool:
        """Is every byte known to be backed? Until then the first use of the bytes waits."""
        return self._ready()

    def wait_until_ready(self) -> None:
        """Waits until every byte is backed, up to ``timeout`` seconds: by the creator, or, where it is gone,
        by this process. ``blocks``, buffers and :meth:`pin_memory` do it by themselves.

        :raises TimeoutError: the creator is alive and not done.
        :raises OSError: the creator is gone, and there is no space.
        :raises ValueError: the region is closed.
        """
        self._must_be_open()
        self._wait_until_ready()

    @property
    def nbytes(self) -> int:
        """Bytes of the region: ``num_blocks * block_size_bytes``."""
        return self._blocks_nbytes

    def pin_memory(
        self, *, max_piece_bytes: int | None = None, device: int | None = None, strict: bool = False
    ) -> PinResult:
        """Registers the whole mapping with CUDA in this process (``cudaHostRegister``, portable).

        Each process that copies to or from a GPU must call it, and may do so in a thread while others use
        ``blocks``. Does nothing where CUDA is not available, where the region is pinned already, and where
        the environment variable ``EC_SHARED_REGION_PIN`` is ``0``. Either every byte is registered or none.
        A failure is a warning with the code, once for each code and id in this process, also if the
        region is opened again (a line at INFO from then on): transfers still work, but slower.

        :param max_piece_bytes: most bytes of one registration; a piece is a multiple of the least common
            multiple of page and block size. Default: ``EC_SHARED_REGION_MAX_PIECE_BYTES``, else 64 GiB.
        :param device: ordinal of the device that is current during the calls. Default: the calling thread's.
        :param strict: raise where a warning would be logged.
        :return: a :class:`PinResult`, true if the region is pinned now.
        :raises ValueError: the region is closed, or a piece size that is none.
        :raises PinError: with ``strict``, the registration failed.
        """
        self._must_be_open()
        if self._is_pinned:
            return self._pin_result or pin.already_pinned(self._blocks_nbytes)
        if max_piece_bytes is None:
            max_piece_bytes = pin.max_piece_from_environment()
        else:
            max_piece_bytes = _whole_number("max_piece_bytes", max_piece_bytes, smallest=1)
        if pin.is_switched_off():
            logger.info("%s stays unpinned: %s is off", self._shown_path, pin.PIN_SWITCH)
            _core.count_pin_skipped()
            return self._remember(pin.not_pinned(f"switched off by {pin.PIN_SWITCH}"))
        try:
            torch = pin.torch_with_cuda()
        except pin.NoCuda as reason:
            _core.count_pin_skipped()
            return self._remember(pin.not_pinned(str(reason)))
        torch_cudart = None if torch is None else pin.cudart_of(torch, device)
        self._wait_until_ready()
        outcome = self._pin(pin.package_roots(), max_piece_bytes, device, torch_cudart)
        result = pin.result_of(outcome, self._blocks_nbytes)
        if result and result.backend is None:
            return self._pin_result or result  # another thread was faster, and remembers more
        self._remember(result)
        if outcome.not_undone is not None:
            logger.warning("%s: %s", self._shown_path, outcome.not_undone)
        if result:
            logger.info(
                "pinned %s: %d bytes in %d pieces, %.3f s, through %s (%s)",
                self._shown_path,
                result.bytes,
                result.pieces,
                result.seconds,
                result.backend,
                result.library_path,
            )
        elif result.backend is None:
            logger.debug("%s stays unpinned: %s", self._shown_path, result.reason)
        else:
            failure = pin.failure_of(outcome, result, self._shown_path, self._blocks_nbytes)
            if strict:
                raise failure
            # Of threads that meet the same code at once, one is the first.
            is_first = _warned.setdefault((self._mmap_path, result.code), result) is result
            logger.log(logging.WARNING if is_first else logging.INFO, "%s", failure)
        return result

    def unpin_memory(self) -> None:
        """Takes the registration back; the region stays open and may be pinned again.

        Copies in flight must have ended before. Does nothing where the region is not pinned. If the driver
        refuses, a warning says so, and the mapping is kept for good, since the driver still uses its pages.
        """
        if not self._is_pinned:
            return
        self._is_registered_elsewhere = False
        self._pin_result = None
        problem = self._unpin()
        if problem is not None:
            logger.warning("%s: %s", self._shown_path, problem)
        logger.info("unpinned %s", self._shown_path)

    def scatter_blocks(self, ids: BlockIds, src: Memory, *, nbytes: int | None = None) -> None:
        """Copies ``src`` into the blocks ``ids``: the first ``block_size_bytes`` of it into the first block, and so on.

        One native call without the GIL for what a loop of ``blocks[i].copy_(src[i])`` does. Everything is
        checked before the first byte moves. Other processes see the bytes when the call returns, and some of
        them before: which blocks are ready is for the callers to tell each other. After Ctrl-C, which is
        looked for every 64 MiB, some of the blocks hold new bytes.

        :param ids: whole numbers from 0 to ``num_blocks - 1``, each once, in any order: a list, tuple or
            range of ints, or an int64 tensor on the CPU or array of one dimension. None of them is no work.
        :param src: contiguous CPU tensor of any dtype and shape, or any object with a contiguous buffer (numpy
            array, ``bytes``, ``memoryview``), of ``len(ids) * block_size_bytes`` bytes. It may be a view of
            other blocks of the region, and must keep its size and place during the call.
        :param nbytes: bytes of ``src``, where they end within the last block; the rest of that block is left
            as it is.
        :raises IndexError: an id that is no block's; it is a :class:`ValueError` too.
        :raises ValueError: the region is closed; an id twice; another number of bytes; ``src`` is not
            contiguous, or shares bytes with the blocks.
        :raises TypeError: ids or ``src`` of another type or dtype, or on another device.
        """
        self.wait_until_ready()
        copies.scatter(self, ids, src, nbytes)

    @overload
    def gather_blocks(self, ids: BlockIds, out: None = None, *, nbytes: int | None = None) -> torch.Tensor: ...
    @overload
    def gather_blocks(self, ids: BlockIds, out: Out, *, nbytes: int | None = None) -> Out: ...
    def gather_blocks(self, ids: BlockIds, out: Any = None, *, nbytes: int | None = None) -> Any:
        """Copies the blocks ``ids`` one behind the other into ``out``; the other way of :meth:`scatter_blocks`.

        :param ids: as for a scatter, and an id may repeat.
        :param out: what takes the bytes, like ``src`` of a scatter, but writable. Default: a new tensor; for large
            batches that takes longer than the copy, since the system has to find new memory, so keep one.
        :param nbytes: bytes that ``out`` takes, where they end within the last block.
        :return: ``out``; without one a ``torch.int8`` tensor of shape ``(len(ids), block_size_bytes)``, or
            ``(nbytes,)`` where ``nbytes`` is given.
        :raises IndexError: as a scatter.
        :raises ValueError: as a scatter, except that ids may repeat; ``out`` is read-only or requires grad.
        :raises TypeError: as a scatter.
        """
        self.wait_until_ready()
        return copies.gather(self, ids, out, nbytes)

    def _must_be_open(self) -> None:
        if not self._is_open:
            raise _argument_error(
                errors.RegionClosedError, "the region is closed", "open a new region: a closed one does not come back"
            )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        # numpy takes the buffer; it comes here only where there is none, and would go on without an error.
        self.wait_until_ready()
        raise BufferError("the region has no buffer")

    def _remember(self, result: PinResult) -> PinResult:
        self._pin_result = result
        return result

    def check(self) -> CheckResult:
        """Looks at the region from outside, without touching its memory: is the name still there and still
        this file, has the file its size and its backing, who else holds it.

        :return: a :class:`CheckResult`, true if there is no problem.
        :raises ValueError: the region is closed.
        :raises OSError: the file cannot be looked at.
        """
        return check.result_of(self._check(), self._shown_path)

    def identity(self) -> Identity:
        """Which creation of the region this is; equal in every process that shares the bytes.

        :return: device, inode and a nonce of the creation.
        :raises ValueError: the region is closed.
        :raises OSError: the system has no OFD locks, which carry the nonce.
        """
        return Identity(*self._identity())

    def stats(self) -> RegionStats:
        """Numbers for a log line or a metrics exporter: role, bytes, huge and pinned bytes, seconds of each step, and
        the counters of this process. Looks at no other process and touches no memory.

        :raises ValueError: the region is closed.
        :raises OSError: the file cannot be looked at.
        """
        self._must_be_open()
        return stats.stats_of(self._opened, self._blocks_nbytes, self._usage(), self._is_pinned, self._pin_result)

    def release_name(self) -> bool:
        """Takes the name away early and keeps the region, for a creator that knows that everybody is in (a barrier):
        the memory then comes back however the processes end.

        Those who have the region go on sharing it, also its forked children. A constructor of the id that comes
        later makes another region, which :meth:`cleanup` of this one leaves alone. A name that was given up does not
        come back.

        :return: the name was there and is gone. False, and nothing was changed, for a joiner, in a forked child, and
            where the name was gone already or stands for another file.
        :raises ValueError: the region is closed.
        :raises OSError: the name cannot be taken away.
        """
        self._must_be_open()
        is_released = self._release_name()
        if is_released:
            logger.info("released the name %s: late constructors make another region", self._mmap_path)
        return is_released

    def cleanup(self, *, synchronize: bool = False) -> None:
        """Lets go of the region: the creator takes the name away first, then the registration, the
        tensor, the mapping and the descriptor go.

        Never raises for secondary faults, and does nothing when called again. Processes that have the
        region mapped are not disturbed, and views keep the mapping until the last of them is gone. The
        last process to leave a region whose creator died takes the name away too. Copies in flight must
        have ended before: unregistering does not wait for them. In a forked child only the child's own
        mapping and descriptor go.

        :param synchronize: where the region is pinned and torch uses CUDA in this process, wait first for
            everything that was queued on every device (``torch.cuda.synchronize()``).
        """
        if synchronize and self._is_pinned:
            try:
                pin.synchronize()
            except Exception as error:  # an earlier fault of a kernel comes out here
                logger.warning("%s: torch.cuda.synchronize() failed: %s", self._shown_path, error)
        # One step: of several threads one closes. Before the others, see `_WhileOpen`.
        was_open = self.__dict__.pop("_is_open", False)
        self.__dict__.pop("_mmap_obj", None)
        self.__dict__.pop("blocks", None)
        self._fd = None
        _open_regions.pop(id(self), None)
        # Also where the attributes say "closed": Ctrl-C may have cut the constructor short behind the core's open.
        for problem in self._close():
            logger.warning("%s: %s", self._shown_path, problem)
        if was_open:
            views = self._views_left()
            logger.info(
                "closed %s%s",
                self._shown_path,
                f"; held by {views} {'view' if views == 1 else 'views'}, its memory stays until the last is gone"
                if views
                else "",
            )

    def __enter__(self) -> Self:
        self._must_be_open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cleanup()

    def __del__(self) -> None:
        if self._is_pinned:
            # No source=self: the warning would keep the region, and its registration, alive.
            warnings.warn(f"{self!r} was dropped while pinned: call cleanup()", ResourceWarning, stacklevel=2)
            self.cleanup()

    def __repr__(self) -> str:
        if not hasattr(self, "_mmap_path"):
            return f"<{type(self).__name__} not open>"
        role = "creator" if self._is_creator else "joiner"
        pin = "pinned" if self._is_pinned else "not pinned"
        state = pin if self._is_open else "closed"
        shape = f"{self.num_blocks} x {self.block_size_bytes} bytes"
        return f"<{type(self).__name__} {self.engine_id!r}: {shape}, {role}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot pickle {type(self).__name__}: open the region by its engine_id in the other process")


def _room_left(path: str) -> str:
    """What the filesystem has left, for the log; nothing where it has no limit."""
    try:
        room = os.statvfs(os.path.dirname(path))
    except OSError:
        return ""
    if not room.f_blocks:
        return ""
    free_bytes, total_bytes = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    return f"; {free_bytes} of {total_bytes} bytes are left in {os.path.dirname(path)}"


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise _argument_error(
            errors.ArgumentTypeError,
            f"invalid {what}: {value!r:.80}: it must be a str, not {type(value).__name__}",
            f'give {what} as text, for example "engine0_dp0"' if what == "engine_id" else "see help(ECSharedRegion)",
        )
    try:
        str.encode(value)
    except UnicodeEncodeError:
        raise _argument_error(
            errors.InvalidArgumentError,
            f"invalid {what}: {value!r:.80}: it is not valid Unicode text",
            "a lone surrogate cannot be a part of a file name",
        ) from None
    return str.__str__(value)  # a subclass may show itself as something else


def _callable(what: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise _argument_error(
            errors.ArgumentTypeError,
            f"invalid {what}: {value!r:.80}: it must be callable, not {type(value).__name__}",
            "give a function of two numbers: bytes done, bytes in all",
        )
    return value


def _whole_number(what: str, value: Any, smallest: int = 0) -> int:
    hint = "give a whole number above zero"
    if what == "num_blocks":
        hint += ", for example byte_budget // block_size_bytes"
    wrong_type = f"it must be an int, not {type(value).__name__}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _argument_error(errors.ArgumentTypeError, f"invalid {what}: {value!r:.80}: {wrong_type}", hint)
    try:
        number = operator.index(value)
    except TypeError:  # an array of several numbers has the method all the same
        raise _argument_error(errors.ArgumentTypeError, f"invalid {what}: {wrong_type}", hint) from None
    if number < smallest or number < 0:
        shown = str(number) if number.bit_length() < 1000 else f"a negative integer of {number.bit_length()} bits"
        text = f"invalid {what}: {shown}: it must be at least 1"
        raise _argument_error(errors.InvalidArgumentError, text, hint)
    if number >= 1 << 60:
        shown = f"{number:.3e}" if number < 1 << 1000 else f"an integer of {number.bit_length()} bits"
        raise _argument_error(
            errors.SizeOverflowError,
            f"invalid {what}: {shown}: a region has less than 2**60 bytes",
            "check the unit of the budget: it is in bytes",
        )
    return number


def _seconds(what: str, value: Any) -> float:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise _argument_error(
            errors.ArgumentTypeError,
            f"invalid {what}: {value!r:.80}: it must be a number of seconds, not {type(value).__name__}",
            "give seconds as a number, for example 30.0",
        )
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):  # an int beyond all floats, an array, a signalling NaN
        raise _argument_error(
            errors.InvalidArgumentError,
            f"invalid {what}: it must be a finite number of seconds, 0 or more",
            "give seconds as a number, for example 30.0",
        ) from None


@atexit.register
def _cleanup_at_exit() -> None:
    for reference in _open_regions.valuerefs():
        region = reference()
        if region is not None:
            region.cleanup()
    _core.begin_exit()
