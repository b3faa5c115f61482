"""Neighbours in the same directory: what another user can do (deny service), and what the same user can do (more)."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ec_shared_region as ec
from ec_shared_region import ECSharedRegion
from procs import SHM, error_of, path_of

NOBODY = 1234
# Where fs.protected_regular is set, Linux refuses O_CREAT on another user's file in a sticky directory, to root too.
PROTECTED = {"call": "openat", "argument": 2, "bits": os.O_CREAT, "error": errno.EACCES}


def is_protected(what: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/sys/fs/protected_{what}").read_text()) > 0
    return False


@pytest.mark.case("PE-02", "PE-04")
def test_no_open_of_ours_needs_o_creat(spawn: Any, engine_id: str) -> None:
    """Made without a name and linked, joined by a plain open: a kernel that forbids O_CREAT forbids nothing."""
    creator, joiner = spawn(refuse=[PROTECTED]), spawn(refuse=[PROTECTED])
    assert creator.run("r = Region(id, 2, 64); r.is_creator", id=engine_id) is True
    assert joiner.run("r = Region(id, 2, 64); r.is_creator", id=engine_id) is False
    joiner.run("r.cleanup()")
    creator.run("r.cleanup()")
    assert not path_of(engine_id).exists()


@pytest.mark.case("PE-02", "PE-04", "PE-05")
@pytest.mark.parametrize("mode", ["create_or_join", "create", "join"])
def test_another_users_file_is_our_refusal_and_not_the_kernels(
    as_root: None, small_shm: Any, engine_id: str, mode: str
) -> None:
    """In a sticky directory that all may write to, as /dev/shm is: EPERM with the owner's uid, never a bare EACCES."""
    shm = small_shm("size=1m")
    shm.anchor.run(
        "path = f'/dev/shm/vllm_ec_{id}.mmap'; open(path, 'wb').write(bytes(512)); os.chmod(path, 0o666)"
        "; os.chown(path, uid, uid)",
        id=engine_id,
        uid=NOBODY,
    )
    rules = [] if is_protected("regular") else [PROTECTED]
    child = shm.spawn(refuse=rules)
    error = error_of(child, "Region(id, 8, 64, mode=mode, timeout=5)", id=engine_id, mode=mode)
    assert "ForeignFileError" in error.classes and "PermissionError" in error.classes
    assert error.errno == errno.EPERM
    assert str(NOBODY) in error.text
    assert shm.anchor.run("s = os.stat(path); s.st_uid, s.st_size, s.st_mode & 0o777") == (NOBODY, 512, 0o666)


@pytest.mark.case("CR-08", "PE-01")
def test_another_user_can_neither_open_nor_rename_nor_remove_a_live_region(
    as_root: None, small_shm: Any, engine_id: str
) -> None:
    shm = small_shm("size=1m")
    owner, stranger = shm.spawn(), shm.spawn(None, uid=NOBODY)
    owner.run("r = Region(id, 2, 64); memoryview(r)[0, 0] = 7", id=engine_id)
    stranger.run("path = f'/dev/shm/vllm_ec_{id}.mmap'; open('/dev/shm/theirs', 'w').close()", id=engine_id)
    for attempt in (
        *(["os.link(path, path + '.second')"] if is_protected("hardlinks") else []),
        "os.open(path, os.O_RDONLY)",
        "os.open(path, os.O_RDWR)",
        "os.truncate(path, 0)",
        "os.unlink(path)",
        "os.rename(path, path + '.gone')",
        "os.rename('/dev/shm/theirs', path)",
        "os.chmod(path, 0o666)",
    ):
        error = error_of(stranger, attempt)
        assert "PermissionError" in error.classes, attempt
    assert owner.run("memoryview(r)[0, 0], os.fstat(r._fd).st_nlink") == (7, 1)
    owner.run("r.cleanup()")
    assert shm.names() == ["theirs"]


@pytest.mark.case("PE-05", "ST-17")
def test_a_name_that_another_user_sits_on_denies_that_id_only(
    as_root: None, small_shm: Any, engine_id: str, new_id: Callable[[], str]
) -> None:
    shm = small_shm("size=1m")
    stranger, child = shm.spawn(None, uid=NOBODY), shm.spawn()
    stranger.run(
        "held = os.open(f'/dev/shm/vllm_ec_{id}.mmap', os.O_CREAT | os.O_RDWR, 0o600); os.ftruncate(held, 128)",
        id=engine_id,
    )
    error = error_of(child, "Region(id, 2, 64)", id=engine_id)
    assert "ForeignFileError" in error.classes and str(NOBODY) in error.text
    assert child.run("r = Region(id, 2, 64); r.is_creator", id=new_id()) is True
    child.run("r.cleanup()")
    assert stranger.run("os.fstat(held).st_nlink, os.fstat(held).st_size") == (1, 128)


def test_a_lock_that_another_user_holds_on_the_directory_delays_and_no_more(
    as_root: None, small_shm: Any, engine_id: str, new_id: Callable[[], str]
) -> None:
    shm = small_shm("size=1m")
    owner, child, stranger = shm.spawn(), shm.spawn(), shm.spawn(None, uid=NOBODY)
    owner.run("r = Region(id, 2, 64); memoryview(r)[0, 0] = 7", id=engine_id)
    stranger.run("import fcntl; held = os.open('/dev/shm', os.O_RDONLY); fcntl.flock(held, fcntl.LOCK_EX)")
    for wanted in (engine_id, new_id()):
        error = error_of(child, "Region(id, 2, 64, timeout=0.2)", id=wanted)
        assert "RegionTimeoutError" in error.classes and "lslocks" in error.text
    assert owner.run("memoryview(r)[0, 0]") == 7
    owner.run("r.cleanup()")
    assert shm.names() == []
    stranger.run("os.close(held)")
    assert child.run("r = Region(id, 2, 64); r.is_creator", id=engine_id) is True
    child.run("r.cleanup()")


def test_a_false_sign_that_space_is_coming_delays_the_error_and_no_more(
    as_root: None, small_shm: Any, engine_id: str
) -> None:
    """The sign is a lock that anybody who may read the directory can take."""
    shm = small_shm("size=1m")
    child, stranger, neighbour = shm.spawn(), shm.spawn(None, uid=NOBODY), shm.spawn(None)
    neighbour.run("open('/dev/shm/neighbour', 'wb').write(bytes(1 << 19))")
    stranger.run(
        """
import fcntl, struct
held = os.open('/dev/shm', os.O_RDONLY)
F_OFD_SETLK = 37
fcntl.fcntl(held, F_OFD_SETLK, struct.pack('hhqqi4x', fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
"""
    )
    child.start("Region(id, 1, 1 << 20, timeout=0.5)", id=engine_id)
    assert not child.answered(0.05), "it does not wait for the space that was announced"
    with pytest.raises(Exception) as caught:
        child.result()
    assert "NoSpaceError" in caught.value.classes  # type: ignore[attr-defined]
    assert child.run("r = Region(id, 1, 1 << 18); r.is_creator", id=engine_id) is True
    child.run("r.cleanup()")


@pytest.mark.case("PE-01", "PE-05")
def test_two_users_of_one_id_get_an_error_and_never_a_shared_region(
    as_root: None, small_shm: Any, engine_id: str
) -> None:
    shm = small_shm("size=1m")
    first, second = shm.spawn(uid=NOBODY), shm.spawn(uid=NOBODY + 1)
    assert first.run("r = Region(id, 2, 64); r.is_creator", id=engine_id) is True
    error = error_of(second, "Region(id, 2, 64)", id=engine_id)
    assert "ForeignFileError" in error.classes and str(NOBODY) in error.text
    first.run("r.cleanup()")
    assert second.run("r = Region(id, 2, 64); r.is_creator", id=engine_id) is True
    second.run("r.cleanup()")


def test_a_mode_that_was_opened_later_shuts_newcomers_out(open_region: Any, engine_id: str) -> None:
    """chmod by hand: whoever may have opened the file meanwhile is not to be shared with."""
    region = open_region(engine_id, 2, 64)
    os.chmod(region.path, 0o660)
    with pytest.raises(ec.ForeignFileError) as caught:
        ECSharedRegion(engine_id, 2, 64)
    assert "0660" in str(caught.value)
    memoryview(region)[0, 0] = 1
    assert stat.S_IMODE(os.stat(region.path).st_mode) == 0o660


@pytest.mark.case("LI-11", "AT-13")
@pytest.mark.parametrize("size", [0, 1, 4096, 2 * 7168 * 4])
@pytest.mark.case("FR-47")
def test_a_file_that_somebody_resized_is_not_mapped_and_not_put_right(
    open_region: Any, engine_id: str, size: int
) -> None:
    """The same user can shrink or grow a named file at any time; whoever comes later must not step into the hole."""
    region = open_region(engine_id, 4, 7168)
    os.truncate(region.path, size)
    for mode in ("create_or_join", "join"):
        with pytest.raises(ec.GeometryMismatchError) as caught:
            ECSharedRegion(engine_id, 4, 7168, mode=mode, timeout=0.2)
        assert str(size) in str(caught.value)
    with pytest.raises(ec.RegionExistsError):
        ECSharedRegion(engine_id, 4, 7168, mode="create")
    assert os.fstat(region._fd).st_size == size
    region.cleanup()
    assert not path_of(engine_id).exists()
    assert open_region(engine_id, 4, 7168).is_creator


@pytest.mark.case("LI-11", "AT-02")
def test_a_name_that_was_taken_away_strands_newcomers_and_nobody_else(
    spawn: Any, open_region: Any, engine_id: str
) -> None:
    """What RemoveIPC does at a log-out: the holders go on with each other, and a late joiner finds no region."""
    one = spawn()
    one.run("r = Region(id, 2, 64)", id=engine_id)
    two = open_region(engine_id, 2, 64)
    path_of(engine_id).unlink()
    one.run("memoryview(r)[1, 1] = 5")
    assert memoryview(two)[1, 1] == 5
    with pytest.raises(FileNotFoundError):
        ECSharedRegion(engine_id, 2, 64, mode="join", timeout=0.05)
    assert not path_of(engine_id).exists(), "nothing is put in its place"
    one.run("r.cleanup()")


@pytest.mark.parametrize("made", ["a file", "a symlink", "a directory"])
def test_a_sweep_passes_over_what_others_put_under_our_prefix(
    as_root: None, small_shm: Any, engine_id: str, new_id: Callable[[], str], made: str
) -> None:
    """Nobody's constructor fails because of a trap beside it, and nothing behind the trap is touched."""
    shm = small_shm("size=1m")
    shm.anchor.run("open('/dev/shm/victim', 'wb').write(b'victim'); os.chmod('/dev/shm/victim', 0o600)")
    trap = f"/dev/shm/vllm_ec_{new_id()}.mmap"
    stranger = shm.spawn(None, uid=NOBODY)
    stranger.run(
        {
            "a file": "open(trap, 'wb').write(b'trap')",
            "a symlink": "os.symlink('/dev/shm/victim', trap)",
            "a directory": "os.mkdir(trap)",
        }[made],
        trap=trap,
    )
    child = shm.spawn()
    assert child.run("r = Region(id, 2, 64); r.is_creator", id=engine_id) is True
    child.run("r.cleanup()")
    assert shm.anchor.run("os.path.lexists(trap), open('/dev/shm/victim', 'rb').read()", trap=trap) == (True, b"victim")
    assert SHM.is_dir()
