"""What tests ask of the kernel: a small /dev/shm of their own, a refused system call, another user.

Everything goes through libc by ctypes, in the calling process only. `NotPermitted` says that this
machine does not allow it; tests turn it into a skip with that reason.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_RDONLY = 1
MS_REMOUNT = 32
MS_REC = 16384
MS_PRIVATE = 1 << 18

PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2


class NotPermitted(Exception):
    """This machine does not let the test do that."""


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise NotPermitted(f"{what}: {os.strerror(error)}")


def private_shm(options: str | None, read_only: bool = False) -> None:
    """Gives this process a mount namespace and mounts a tmpfs over /dev/shm there (`None`: hides it)."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        _check(_libc.unshare(CLONE_NEWNS), "unshare of the mount namespace")
    else:
        _check(_libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare of a user namespace")
        try:
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        except OSError as error:
            raise NotPermitted(f"mapping of a user namespace: {error}") from None
    _check(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "making mounts private")
    if options is None:
        # A /dev without shm: an empty file system over it.
        _check(_libc.mount(b"none", b"/dev", b"tmpfs", 0, b"size=64k"), "mounting an empty /dev")
        return
    data = f"mode=1777{',' if options else ''}{options}".encode()
    _check(_libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, data), "mounting a tmpfs")
    if read_only:
        remount_read_only()


def remount_read_only() -> None:
    _check(_libc.mount(b"none", b"/dev/shm", None, MS_REMOUNT | MS_RDONLY, None), "remounting read-only")


def enter_namespace(pid: int, with_user: bool) -> None:
    """Joins the mount namespace of `pid` (a process that `private_shm` was called in)."""
    kinds = (("user", CLONE_NEWUSER), ("mnt", CLONE_NEWNS)) if with_user else (("mnt", CLONE_NEWNS),)
    for name, flag in kinds:
        descriptor = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.setns(descriptor, flag), f"entering the {name} namespace")
        finally:
            os.close(descriptor)


def become(uid: int) -> None:
    """Drops to another user, as a service manager would, with /proc/self still readable."""
    try:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    except PermissionError as error:
        raise NotPermitted(f"becoming uid {uid}: {error}") from None
    _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


_X86_64 = {
    "open": 2,
    "fstat": 5,
    "mmap": 9,
    "ioctl": 16,
    "madvise": 28,
    "fcntl": 72,
    "ftruncate": 77,
    "flock": 73,
    "link": 86,
    "unlink": 87,
    "fsetxattr": 190,
    "fgetxattr": 193,
    "mbind": 237,
    "openat": 257,
    "unlinkat": 263,
    "linkat": 265,
    "fallocate": 285,
}
_AARCH64 = {
    "fsetxattr": 7,
    "fgetxattr": 10,
    "fcntl": 25,
    "ioctl": 29,
    "flock": 32,
    "unlinkat": 35,
    "linkat": 37,
    "ftruncate": 46,
    "fallocate": 47,
    "openat": 56,
    "fstat": 80,
    "mmap": 222,
    "madvise": 233,
    "mbind": 235,
}
_MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}


def refuse(
    call: str, error: int, argument: int | None = None, equals: int | None = None, bits: int | None = None
) -> None:
    """Makes a system call fail with `error`: always, or where one argument equals a value or has bits set.

    A seccomp filter: it holds for this thread and all that it starts from now on, for good.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise NotPermitted(f"no system call numbers known for {platform.machine()}")
    arch, numbers = machine
    if call not in numbers:
        return  # the machine has no such call, so it cannot be made
    load, jump_equal, jump_set, give = 0x20, 0x15, 0x45, 0x06

    tests: list[tuple[int, int, int]] = []
    if argument is not None:
        tests.append((load, 16 + 8 * argument, 0))  # low half of the argument: both machines are little-endian
        if equals is not None:
            tests.append((jump_equal, equals & 0xFFFFFFFF, 1))
        else:
            assert bits is not None
            tests.append((jump_set, bits, 1))  # any of the bits, so pass one bit or a mask that means one thing
    body: list[bytes] = []

    def add(code: int, when_true: int, when_false: int, value: int) -> None:
        body.append(struct.pack("HBBI", code, when_true, when_false, value))

    to_allow = 2 + len(tests)
    add(load, 0, 0, 4)
    add(jump_equal, 0, to_allow + 1, arch)
    add(load, 0, 0, 0)
    add(jump_equal, 0, len(tests) + 1, numbers[call])
    for position, (code, value, is_jump) in enumerate(tests):
        left = len(tests) - position - 1
        add(code, 0, left + 1 if is_jump else 0, value)
    add(give, 0, 0, 0x00050000 | error)
    add(give, 0, 0, 0x7FFF0000)

    program = ctypes.create_string_buffer(b"".join(body), 8 * len(body))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(body), ctypes.addressof(program)))
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no-new-privileges")
    _check(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0), "installing a seccomp filter")
