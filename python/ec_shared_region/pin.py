"""What :meth:`ECSharedRegion.pin_memory` came to, and the words for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import errors

if TYPE_CHECKING:
    from . import _core

__all__ = ["PinResult"]

PIN_SWITCH = "EC_SHARED_REGION_PIN"
"""Environment variable: ``0``, ``off``, ``no`` or ``false`` turns pinning off."""

MAX_PIECE_SWITCH = "EC_SHARED_REGION_MAX_PIECE_BYTES"
"""Environment variable: the default of ``max_piece_bytes``, in bytes."""

CONSEQUENCE = "the region works, but copies to and from the GPU are staged by the driver, 3 to 5 times slower"

# By code of the CUDA runtime (CUDA Runtime API, "Error Handling").
_HINTS = {
    1: "the driver refused even small pieces of host memory: is another library registering the same range?",
    2: "host memory that can be registered is limited, on WSL and by `ulimit -l`: ask for fewer blocks",
    35: "no NVIDIA driver is installed, or it is older than the CUDA runtime",
    100: "no device is visible: see CUDA_VISIBLE_DEVICES and the container's device settings",
    801: "confidential computing does not permit registering host memory; set EC_SHARED_REGION_PIN=0 to say so",
}


@dataclass(frozen=True, slots=True)
class PinResult:
    """Is the region registered in this process, by what, and if not, why.

    True or false as a whole. Plain data: a group of ranks can send it around and agree.
    """

    ok: bool
    """Is the whole region registered?"""
    backend: str | None
    """``"cudart"`` (the runtime library), ``"torch"`` (``torch.cuda.cudart()``), None if nobody was asked."""
    library_path: str | None
    """The copy of the CUDA runtime that answered, where that is known."""
    pieces: int
    """Registrations that this call made."""
    bytes: int
    """Bytes that are registered: all of the region, or 0."""
    seconds: float
    """Time of the registration, in seconds."""
    code: int | None
    """The runtime's answer where it refused (a ``cudaError_t``)."""
    reason: str
    """In words: ``"pinned"``, or why not."""

    def __bool__(self) -> bool:
        return self.ok


def not_pinned(reason: str) -> PinResult:
    """The result where nobody was asked."""
    return PinResult(False, None, None, 0, 0, 0.0, None, reason)


def result_of(outcome: _core.PinOutcome, nbytes: int) -> PinResult:
    """The core's outcome in words."""
    if outcome.is_pinned:
        reason = "pinned"
        if outcome.foreign_pieces:
            reason += (
                f"; {outcome.foreign_pieces} pieces had been registered by somebody else, who must unregister them"
            )
    elif outcome.code is None:
        reason = outcome.text
    else:
        name = f" ({outcome.name})" if outcome.name else ""
        text = f": {outcome.text}" if outcome.text else ""
        reason = f"code={outcome.code}{name}{text}"
    return PinResult(
        ok=outcome.is_pinned,
        backend=outcome.backend,
        library_path=None if outcome.library_path is None else str(outcome.library_path),
        pieces=outcome.pieces,
        bytes=nbytes if outcome.is_pinned else 0,
        seconds=outcome.elapsed_seconds,
        code=outcome.code,
        reason=reason,
    )


def failure_of(outcome: _core.PinOutcome, result: PinResult, path: str, nbytes: int) -> errors.PinError:
    """The failure as an exception: raised if the caller asked for that, else its text is the warning."""
    refused = outcome.refused_bytes
    piece = f", refused at a piece of {refused} bytes" if refused not in (None, nbytes) else ""
    error = errors.PinError(
        f"cudaHostRegister failed for {nbytes} bytes of host memory of `{path}`{piece}: {result.reason}; {CONSEQUENCE}"
    )
    error.result = result
    error.hint = _HINTS.get(result.code or 0, "set EC_SHARED_REGION_PIN=0 to run unpinned without this warning")
    return error


def is_switched_off() -> bool:
    """Does the environment turn pinning off?"""
    return os.environ.get(PIN_SWITCH, "").strip().lower() in {"0", "off", "no", "false"}


def max_piece_from_environment() -> int | None:
    """The environment's ``max_piece_bytes``, if it is set.

    :raises ValueError: it is no whole number above zero.
    """
    text = os.environ.get(MAX_PIECE_SWITCH, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) == 0:
        error = errors.InvalidArgumentError(
            f"invalid {MAX_PIECE_SWITCH}: {text!r}: it must be a whole number above zero"
        )
        error.hint = "give bytes, for example 68719476736 for 64 GiB, or unset it"
        raise error
    return int(text)
