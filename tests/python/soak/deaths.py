"""Timers by which the kernel kills the calling process, with a microsecond's aim.

A signal that another process sends arrives when that process is scheduled; nearly all of those hit a sleeping
actor. A POSIX timer may send SIGKILL too, and hits the middle of a system call of the step that follows.
"""

from __future__ import annotations

import ctypes
import os
import signal

_CLOCK_MONOTONIC = 1
_PR_SET_PDEATHSIG = 1
_SIGEV_SIGNAL = 0


class _Event(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("padding", ctypes.c_byte * 48),
    )


class _Spec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


_libc = ctypes.CDLL(None, use_errno=True)
if not hasattr(_libc, "timer_create"):
    _libc = ctypes.CDLL("librt.so.1", use_errno=True)  # glibc before 2.34


class Timer:
    """Sends the signal to this process once, after `set`. A forked child does not inherit it."""

    def __init__(self, number: int) -> None:
        event = _Event(signal=number, notify=_SIGEV_SIGNAL)
        self._timer = ctypes.c_void_p()
        self._check(_libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)))

    def set(self, seconds: float) -> None:
        """0 takes the order back."""
        whole = int(seconds)
        spec = _Spec(value_s=whole, value_ns=int((seconds - whole) * 1e9))
        self._check(_libc.timer_settime(self._timer, 0, ctypes.byref(spec), None))

    @staticmethod
    def _check(result: int) -> None:
        if result != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


def die_with_the_referee() -> None:
    """Whatever ends the referee, its actors do not go on without it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
