"""What :meth:`ECSharedRegion.pin_memory` came to, and the words for it."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from . import _core

__all__ = ["PinResult"]

logger = logging.getLogger("ec_shared_region")

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


class NoCuda(Exception):
    """There is nothing to pin for, and nothing to warn of."""


def torch_with_cuda() -> Any:
    """torch, which says that CUDA is there; None in an environment that does without torch.

    :raises NoCuda: torch says that CUDA is not there.
    """
    try:
        import torch
    except ImportError:
        return None
    except Exception as error:
        # A broken installation raises anything; the runtime can be asked without it.
        logger.warning("torch cannot be imported, the CUDA runtime is asked without it: %s", error)
        return None
    try:
        is_available = torch.cuda.is_available()
    except Exception as error:
        logger.warning("torch.cuda.is_available() failed, the region stays unpinned: %s", error)
        raise NoCuda(f"torch.cuda.is_available() failed: {error}") from None
    if not is_available:
        raise NoCuda("CUDA is not available")
    return torch


class _CudartOnDevice:
    """torch's binding of the runtime, with a device current during each call."""

    def __init__(self, torch: Any, device: int) -> None:
        self._torch = torch
        self._device = device
        self._cudart = torch.cuda.cudart()

    def cudaHostRegister(self, *arguments: int) -> Any:
        with self._torch.cuda.device(self._device):
            return self._cudart.cudaHostRegister(*arguments)

    def cudaHostUnregister(self, *arguments: int) -> Any:
        with self._torch.cuda.device(self._device):
            return self._cudart.cudaHostUnregister(*arguments)

    def cudaGetErrorString(self, code: Any) -> Any:
        return self._cudart.cudaGetErrorString(code)


def cudart_of(torch: Any, device: int | None) -> Callable[[], Any]:
    """How to get torch's own binding of the runtime; called only where no runtime library has a device."""

    def cudart() -> Any:
        return torch.cuda.cudart() if device is None else _CudartOnDevice(torch, device)

    return cudart


def synchronize() -> None:
    """Waits for what torch queued on every device that this process uses; never the first to initialise CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    # Synchronising makes a context, which takes memory on a device that is not used.
    is_used = getattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device == torch.cuda.current_device())
    for device in range(torch.cuda.device_count()):
        if is_used(device):
            torch.cuda.synchronize(device)


def package_roots() -> list[str]:
    """Folders that may hold pip's ``nvidia`` packages."""
    roots = []
    for entry in sys.path:
        try:
            os.fsencode(entry)
        except (TypeError, UnicodeError):
            continue
        roots.append(entry)
    return roots


def already_pinned(nbytes: int) -> PinResult:
    """The result where a subclass registered the memory by other means."""
    return PinResult(True, None, None, 0, nbytes, 0.0, None, "pinned by other means")


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
        library_path=outcome.library_path,
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
        f"{outcome.call or 'cudaHostRegister'} failed for {nbytes} bytes of host memory of `{path}`{piece}: "
        f"{result.reason}; {CONSEQUENCE}"
    )
    error.result = result
    error.hint = _HINTS.get(result.code or 0, "set EC_SHARED_REGION_PIN=0 to run unpinned without this warning")
    return error


def is_switched_off() -> bool:
    """Does the environment turn pinning off? A word that is neither yes nor no is a warning, and a yes."""
    word = os.environ.get(PIN_SWITCH, "").strip().lower()
    if word in {"0", "off", "no", "false"}:
        return True
    if word not in {"", "1", "on", "yes", "true"}:
        logger.warning("%s=%r is not understood: use 0 or 1; pinning stays on", PIN_SWITCH, word)
    return False


def max_piece_from_environment() -> int | None:
    """The environment's ``max_piece_bytes``, if it is set.

    :raises ValueError: it is no whole number above zero.
    """
    text = os.environ.get(MAX_PIECE_SWITCH, "").strip()
    if not text:
        return None
    # More digits than the largest region has are no size either.
    if not text.isdecimal() or len(text) > 19 or int(text) == 0:
        error = errors.InvalidArgumentError(
            f"invalid {MAX_PIECE_SWITCH}: {text!r}: it must be a whole number above zero"
        )
        error.hint = "give bytes, for example 68719476736 for 64 GiB, or unset it"
        raise error
    return int(text)
