"""What lies at the path is not a region of ours, or /dev/shm is not what it should be."""

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

F_SETLEASE = 1024
MODES = pytest.mark.parametrize("mode", ["create_or_join", "create", "join"])


def refused(engine_id: str, mode: str) -> Any:
    """The constructor refuses, at once and by the right classes, and names the file."""
    with pytest.raises(ec.ForeignFileError) as caught:
        ECSharedRegion(engine_id, 8, 64, mode=mode, timeout=5)
    assert isinstance(caught.value, PermissionError)
    assert caught.value.errno is not None
    assert os.fspath(caught.value.filename) == str(path_of(engine_id))
    assert str(path_of(engine_id)) in str(caught.value)
    assert "\nhint: " in str(caught.value)
    return caught.value


@pytest.mark.case("CR-08", "PE-08")
@MODES
@pytest.mark.parametrize("target_exists", [True, False])
def test_a_symlink_is_not_followed(
    engine_id: str, mode: str, litter: Callable[[Path], Path], target_exists: bool, tmp_path: Path
) -> None:
    victim = litter(SHM / f"victim-{engine_id}")
    if target_exists:
        victim.write_bytes(b"v" * 512)
        victim.chmod(0o600)
    litter(path_of(engine_id)).symlink_to(victim)
    assert refused(engine_id, mode).errno == errno.ELOOP
    assert path_of(engine_id).is_symlink()
    assert victim.exists() is target_exists
    if target_exists:
        assert victim.read_bytes() == b"v" * 512


def test_the_file_name_of_an_error_is_a_str(engine_id: str, litter: Callable[[Path], Path]) -> None:
    """As `open` and the other built-in functions give it: callers compare it and log it."""
    litter(path_of(engine_id)).mkdir()
    with pytest.raises(OSError) as caught:
        ECSharedRegion(engine_id, 8, 64)
    assert caught.value.filename == str(path_of(engine_id))


@pytest.mark.case("CR-08")
@MODES
def test_a_directory(engine_id: str, mode: str, litter: Callable[[Path], Path]) -> None:
    litter(path_of(engine_id)).mkdir()
    assert refused(engine_id, mode).errno == errno.EISDIR
    assert path_of(engine_id).is_dir()


@pytest.mark.case("CR-08")
@MODES
def test_a_fifo_is_neither_opened_nor_waited_on(engine_id: str, mode: str, litter: Callable[[Path], Path]) -> None:
    """Opening a FIFO can block for ever; this ends at once or not at all."""
    os.mkfifo(litter(path_of(engine_id)), 0o600)
    refused(engine_id, mode)
    assert stat.S_ISFIFO(path_of(engine_id).stat().st_mode)


@pytest.mark.case("CR-08")
@MODES
@pytest.mark.parametrize("bits", [0o666, 0o660, 0o620, 0o644])
def test_a_live_file_that_others_may_use(engine_id: str, mode: str, litter: Callable[[Path], Path], bits: int) -> None:
    """Somebody made the predictable name first and keeps a descriptor on what would become our buffer."""
    path = litter(path_of(engine_id))
    with path.open("w+b") as holder:
        holder.write(b"v" * 512)
        holder.flush()
        path.chmod(bits)
        refused(engine_id, mode)
        assert path.read_bytes() == b"v" * 512
        assert stat.S_IMODE(path.stat().st_mode) == bits


@pytest.mark.case("CR-08")
@MODES
def test_a_live_file_with_a_second_name(engine_id: str, mode: str, litter: Callable[[Path], Path]) -> None:
    path, second = litter(path_of(engine_id)), litter(SHM / f"second-{engine_id}")
    path.write_bytes(b"v" * 512)
    path.chmod(0o600)
    os.link(path, second)
    with path.open("r+b"):
        refused(engine_id, mode)
        assert second.read_bytes() == b"v" * 512
        assert path.stat().st_nlink == 2


@pytest.mark.parametrize("bits", [0o666, 0o000, 0o400])
def test_a_dead_file_of_ours_with_another_mode_is_never_shown(
    engine_id: str, litter: Callable[[Path], Path], bits: int
) -> None:
    """Refused or replaced, the design may choose; but its bytes are never handed out as a region."""
    path = litter(path_of(engine_id))
    path.write_bytes(b"v" * 512)
    path.chmod(bits)
    try:
        region = ECSharedRegion(engine_id, 8, 64, timeout=5)
    except PermissionError as error:
        assert isinstance(error, ec.RegionError)
        assert stat.S_IMODE(path.stat().st_mode) == bits
    else:
        with region:
            assert region.is_creator
            assert bytes(memoryview(region).cast("B")) == bytes(512)


@pytest.mark.parametrize("shift", [0, -1, 1])
def test_a_dead_file_with_a_second_name_keeps_the_second_names_bytes(
    engine_id: str, litter: Callable[[Path], Path], shift: int
) -> None:
    path, second = litter(path_of(engine_id)), litter(SHM / f"second-{engine_id}")
    path.write_bytes(b"v" * (512 + shift))
    path.chmod(0o600)
    os.link(path, second)
    try:
        region = ECSharedRegion(engine_id, 8, 64, timeout=5)
    except ec.ForeignFileError:
        assert path.stat().st_nlink == 2
    else:
        with region:
            memoryview(region)[0, 0] = 1
            assert region.is_creator
    assert second.read_bytes() == b"v" * (512 + shift)


@pytest.mark.case("PE-05", "ST-17")
@MODES
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.case("FR-27")
def test_another_users_file_under_our_name_says_whose(
    as_root: None, spawn: Any, engine_id: str, mode: str, litter: Callable[[Path], Path], live: bool
) -> None:
    path = litter(path_of(engine_id))
    path.write_bytes(b"v" * 512)
    path.chmod(0o600)
    os.chown(path, 1234, 1234)
    child = spawn(uid=1000)
    with path.open("r+b") if live else contextlib.nullcontext():
        error = error_of(child, "Region(id, 8, 64, mode=mode, timeout=5)", id=engine_id, mode=mode)
    assert "PermissionError" in error.classes
    assert "RegionError" in error.classes
    assert error.filename == str(path)
    assert "1234" in error.text
    assert path.read_bytes() == b"v" * 512
    assert path.stat().st_uid == 1234


@pytest.mark.case("CR-08")
@MODES
def test_root_does_not_take_another_users_file_either(
    as_root: None, engine_id: str, mode: str, litter: Callable[[Path], Path]
) -> None:
    path = litter(path_of(engine_id))
    path.write_bytes(b"v" * 512)
    path.chmod(0o600)
    os.chown(path, 1234, 1234)
    error = refused(engine_id, mode)
    assert "1234" in str(error)
    assert path.read_bytes() == b"v" * 512


def test_a_dangling_name_is_no_reason_to_write_elsewhere(engine_id: str, litter: Callable[[Path], Path]) -> None:
    """A symlink to a directory: nothing appears inside."""
    directory = litter(SHM / f"directory-{engine_id}")
    directory.mkdir()
    litter(path_of(engine_id)).symlink_to(directory)
    refused(engine_id, "create_or_join")
    assert list(directory.iterdir()) == []


@pytest.mark.case("PE-10")
@pytest.mark.parametrize("mode", ["create_or_join", "create", "join"])
@pytest.mark.case("FR-15")
def test_no_dev_shm_at_all(small_shm: Any, engine_id: str, mode: str) -> None:
    child = small_shm(None).spawn()
    error = error_of(child, "Region(id, 8, 64, mode=mode, timeout=0.1)", id=engine_id, mode=mode)
    assert "FileNotFoundError" in error.classes
    assert "RegionError" in error.classes
    assert "/dev/shm" in error.text
    assert "hint:" in error.text


@pytest.mark.case("PE-10")
@pytest.mark.case("FR-40")
def test_a_read_only_dev_shm(small_shm: Any, engine_id: str) -> None:
    child = small_shm("size=1m", read_only=True).spawn()
    error = error_of(child, "Region(id, 8, 64)", id=engine_id)
    assert "OSError" in error.classes
    assert "RegionError" in error.classes
    assert error.errno == errno.EROFS
    assert "/dev/shm" in error.text


@pytest.mark.case("PE-10")
def test_out_of_inodes_says_inodes(small_shm: Any, engine_id: str) -> None:
    """The directory itself is the one inode; bytes are free, so "no space" alone would mislead."""
    child = small_shm("size=1m,nr_inodes=1").spawn()
    error = error_of(child, "Region(id, 8, 64)", id=engine_id)
    assert error.errno == errno.ENOSPC
    assert "NoSpaceError" in error.classes
    assert "inode" in error.text


@pytest.mark.case("FR-41")
def test_a_tmpfs_without_limit_reports_no_free_bytes_and_works(small_shm: Any, engine_id: str) -> None:
    shm = small_shm("size=0")
    assert shm.free_bytes() == 0
    child = shm.spawn()
    assert child.run("r = Region(id, 64, 7168); r.is_creator", id=engine_id) is True
    child.run("ctypes.memset(r._blocks_ptr, 1, r.nbytes); r.cleanup()")


@pytest.mark.parametrize("kind", ["uid", "mode"])
def test_a_directory_that_does_not_let_us(small_shm: Any, spawn: Any, engine_id: str, as_root: None, kind: str) -> None:
    """A sandbox's /dev/shm that only root may write."""
    shm = small_shm("size=1m")
    shm.anchor.run("os.chmod('/dev/shm', mode)", mode=0o755 if kind == "uid" else 0o700)
    error = error_of(shm.spawn(uid=1000), "Region(id, 8, 64)", id=engine_id)
    assert "PermissionError" in error.classes
    assert "RegionError" in error.classes
    assert error.errno == errno.EACCES
    assert "/dev/shm" in error.text


@pytest.mark.case("CA-23")
def test_a_joiner_needs_no_space(small_shm: Any, engine_id: str) -> None:
    shm = small_shm("size=64k")
    creator = shm.spawn()
    creator.run("r = Region(id, 16, 4096)", id=engine_id)
    assert shm.free_bytes() == 0
    joiner = shm.spawn()
    assert joiner.run("r = Region(id, 16, 4096); r.is_creator", id=engine_id) is False
    joiner.run("ctypes.memset(r._blocks_ptr, 1, r.nbytes)")
    assert creator.run("bytes(memoryview(r).cast('B'))") == b"\x01" * 65536
    joiner.run("r.cleanup()")
    creator.run("r.cleanup()")
    assert shm.names() == []


@pytest.mark.case("NU-04", "NU-05")
@pytest.mark.parametrize(
    "rules",
    [
        [{"call": "openat", "argument": 2, "bits": 0o20000000, "error": errno.EOPNOTSUPP}],
        [{"call": "openat", "argument": 2, "bits": 0o20000000, "error": errno.EISDIR}],
        [{"call": "fsetxattr", "error": errno.EOPNOTSUPP}, {"call": "fgetxattr", "error": errno.EOPNOTSUPP}],
        [{"call": "fsetxattr", "error": errno.EPERM}],
        [{"call": "mbind", "error": errno.EPERM}],
        [{"call": "fcntl", "argument": 1, "equals": F_SETLEASE, "error": errno.EINVAL}],
    ],
    ids=["no O_TMPFILE", "O_TMPFILE unknown", "no attributes", "attributes forbidden", "no mbind", "no leases"],
)
def test_sandboxes_and_old_kernels(spawn: Any, engine_id: str, rules: list[dict[str, Any]]) -> None:
    """Where a nicety is refused the region still is one: joined, of one geometry, and healed after a kill."""
    creator, joiner = spawn(refuse=rules), spawn(refuse=rules)
    assert creator.run("r = Region(id, 8, 64); r.is_creator", id=engine_id) is True
    assert joiner.run("r = Region(id, 8, 64); r.is_creator", id=engine_id) is False
    creator.run("memoryview(r)[7, 63] = 3")
    assert joiner.run("memoryview(r)[7, 63]") == 3
    error = error_of(spawn(refuse=rules), "Region(id, 4, 128, timeout=5)", id=engine_id)
    assert "GeometryMismatchError" in error.classes
    creator.kill()
    joiner.kill()
    heir = spawn(refuse=rules)
    assert heir.run("r = Region(id, 4, 128); r.is_creator, memoryview(r)[3, 127]", id=engine_id) == (True, 0)
    heir.run("r.cleanup()")


@pytest.mark.parametrize("call", ["linkat", "fallocate"])
def test_a_step_that_fails_leaves_nothing(spawn: Any, engine_id: str, call: str) -> None:
    """ST-07: whichever step is refused, no name, descriptor or mapping stays."""
    child = spawn(refuse=[{"call": call, "error": errno.EPERM}])
    try:
        child.run("r = Region(id, 8, 64)", id=engine_id)
    except Exception as error:
        assert "OSError" in error.classes and "RegionError" in error.classes  # type: ignore[attr-defined]
    else:
        child.run("r.cleanup()")  # a design that has another way is as good
    assert child.run("[n for n in os.listdir('/dev/shm') if id in n]", id=engine_id) == []
    assert (
        child.run(
            "[t for t in map(os.readlink, (f'/proc/self/fd/{n}' for n in os.listdir('/proc/self/fd')"
            " if os.path.exists(f'/proc/self/fd/{n}'))) if '/dev/shm' in t]"
        )
        == []
    )
    assert child.run("'/dev/shm/' in open('/proc/self/maps').read()") is False


@pytest.mark.case("FR-63")
def test_a_limit_on_file_size(spawn: Any, engine_id: str) -> None:
    """RLIMIT_FSIZE: the signal that comes with it must not end the process."""
    child = spawn()
    child.run("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))")
    error = error_of(child, "Region(id, 2, 7168)", id=engine_id)
    assert error.errno == errno.EFBIG
    assert "NoSpaceError" in error.classes
    assert "RLIMIT_FSIZE" in error.text or "limit" in error.text
    assert not path_of(engine_id).exists()


def test_out_of_descriptors(spawn: Any, engine_id: str) -> None:
    child = spawn()
    child.run("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))")
    error = error_of(child, "Region(id, 2, 64)", id=engine_id)
    assert error.errno == errno.EMFILE
    assert "RegionError" in error.classes
    assert not path_of(engine_id).exists()


def test_out_of_address_space(spawn: Any, engine_id: str) -> None:
    child = spawn()
    child.run(
        "import resource; used = int(open('/proc/self/statm').read().split()[0]) * mmap.PAGESIZE\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), used + (2 << 20)))"
    )
    error = error_of(child, "Region(id, 1024, 7168)", id=engine_id)
    assert error.errno == errno.ENOMEM
    assert "RegionError" in error.classes
    assert not path_of(engine_id).exists()
