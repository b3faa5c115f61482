"""Block copies: what the core cannot see of a caller's objects, which is what makes a tensor a tensor.

A tensor has no buffer protocol, so it is looked at here and handed to the core as address and size. torch is
imported only where a gather has to make a tensor: whoever passes one has imported it.
"""

from __future__ import annotations

import operator
import sys
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from . import _core, errors

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer, TypeIs

    BlockIds: TypeAlias = list[int] | tuple[int, ...] | range | torch.Tensor | Buffer
    Memory: TypeAlias = torch.Tensor | Buffer
    Out = TypeVar("Out", bound=Memory)


def scatter(region: _core.Region, ids: BlockIds, src: Memory, nbytes: int | None) -> None:
    """See :meth:`ECSharedRegion.scatter_blocks`."""
    plan = _plan(region, ids, nbytes, is_scatter=True)
    _copy(region, plan, "src", src)


def gather(region: _core.Region, ids: BlockIds, out: Any, nbytes: int | None) -> Any:
    """See :meth:`ECSharedRegion.gather_blocks`."""
    plan = _plan(region, ids, nbytes, is_scatter=False)
    if out is None:
        import torch

        shape = (plan.count, plan.block_size_bytes) if nbytes is None else (plan.nbytes,)
        # Not on a default device that somebody set: the copy writes to this memory.
        out = torch.empty(shape, dtype=torch.int8, device="cpu")
    _copy(region, plan, "out", out)
    return out


def _plan(region: _core.Region, ids: BlockIds, nbytes: int | None, is_scatter: bool) -> _core.CopyPlan:
    if nbytes is not None:
        nbytes = _byte_count(nbytes)
    if not _is_tensor(ids):
        return _core.plan_copy(region, ids, nbytes, is_scatter)
    torch = sys.modules["torch"]
    if ids.dtype != torch.int64 or ids.dim() != 1 or ids.device.type != "cpu" or ids.layout != torch.strided:
        raise errors.argument_error(
            errors.ArgumentTypeError,
            f"invalid ids: a tensor of {ids.dtype} with {ids.dim()} dimensions on {ids.device}",
            "as a tensor, ids are of torch.int64, with one dimension, on the CPU",
        )
    ids = ids.contiguous()  # kept by this name while the core reads it
    return _core.plan_copy(region, _core.Span(ids.data_ptr(), ids.nbytes), nbytes, is_scatter)


def _copy(region: _core.Region, plan: _core.CopyPlan, what: str, memory: Any) -> None:
    if _is_tensor(memory):
        _refuse_unfit(what, memory)
        # The caller's frame keeps the tensor.
        memory = _core.Span(memory.data_ptr(), memory.nbytes)
    _core.copy_blocks(region, plan, memory)


def _is_tensor(value: object) -> TypeIs[torch.Tensor]:
    # Half of torch is there while another thread imports it.
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def _refuse_unfit(what: str, tensor: torch.Tensor) -> None:
    """Bytes of a tensor are its values only where it is on the CPU, dense, in order and not marked for a change."""
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise errors.argument_error(
            errors.ArgumentTypeError,
            f"`{what}` is on {tensor.device}: wanted memory of the CPU",
            "copy it to the CPU first, or between the device and `blocks` directly: `region.blocks[i].copy_(tensor)`"
            if what == "src"
            else "give a CPU tensor, or copy from `blocks` to the device directly: `tensor.copy_(region.blocks[i])`",
        )
    if tensor.layout != torch.strided:
        raise errors.argument_error(
            errors.ArgumentTypeError, f"`{what}` has layout {tensor.layout}: wanted torch.strided", "use `.to_dense()`"
        )
    if not tensor.is_contiguous():
        raise errors.argument_error(
            errors.InvalidArgumentError,
            f"`{what}` is not contiguous: shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            "copy it with `.contiguous()`" if what == "src" else "give a contiguous one, and copy from that",
        )
    if tensor.is_conj() or tensor.is_neg():
        raise errors.argument_error(
            errors.InvalidArgumentError,
            f"`{what}` is a lazy conjugate or negative: its memory does not hold its values",
            "use `.resolve_conj().resolve_neg()`",
        )
    if what == "out" and tensor.requires_grad:
        raise errors.argument_error(
            errors.InvalidArgumentError,
            "`out` requires grad: it would change behind autograd's back",
            "pass `out.detach()`",
        )


def _byte_count(nbytes: Any) -> int:
    if isinstance(nbytes, bool) or not hasattr(nbytes, "__index__"):
        raise errors.argument_error(
            errors.ArgumentTypeError,
            f"invalid nbytes: {nbytes!r:.80}: it must be an int, not {type(nbytes).__name__}",
            "give the bytes that move in all, for example src.nbytes",
        )
    number = operator.index(nbytes)
    if not 0 <= number < 1 << 60:
        shown = str(number) if number.bit_length() < 1000 else f"an integer of {number.bit_length()} bits"
        raise errors.argument_error(
            errors.InvalidArgumentError,
            f"invalid nbytes: {shown}: it must be from 0 to 2**60 - 1",
            "give the bytes that move in all, for example src.nbytes",
        )
    return number
