"""Fixtures of every test: ids of one's own, children that end with the test, and nothing left behind.

`--private-shm=SIZE` (default `50%`) gives the whole run a tmpfs of its own over /dev/shm where the
machine permits it to root, so that "nothing is left" is exact whatever else runs here; `off` uses the host's. With
`--private-shm=64m` it is the /dev/shm of a container that nobody configured.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import kernel
import procs

# No folder of examples beside the sources, and no verdict by a clock on a machine that does something else.
settings.register_profile(
    "suite", database=None, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("suite")

_RUN = f"t{os.getpid():x}"
_numbers = itertools.count()
_shm_note = pytest.StashKey[str]()
_shm_is_private = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--private-shm", default="50%", help="size of a tmpfs of the run's own over /dev/shm, or `off`")


def pytest_configure(config: pytest.Config) -> None:
    size = config.getoption("--private-shm")
    note, is_private = "the host's", False
    if size != "off" and os.geteuid() == 0:
        try:
            kernel.private_shm(f"size={size}")
            note, is_private = f"a tmpfs of this run's own, size={size}", True
        except kernel.NotPermitted as error:
            note = f"the host's ({error})"
    config.stash[_shm_note], config.stash[_shm_is_private] = note, is_private


def pytest_report_header(config: pytest.Config) -> str:
    return f"/dev/shm: {config.stash[_shm_note]}"


def _new_id() -> str:
    return f"{_RUN}-{next(_numbers)}_dp0"


@pytest.fixture
def new_id() -> Callable[[], str]:
    """Makes engine ids that no other test and no other run uses."""
    return _new_id


@pytest.fixture
def engine_id() -> str:
    return _new_id()


def _mine(name: str, private: bool) -> bool:
    # On the host's /dev/shm other processes come and go; there only names of this run count.
    return private or _RUN in name


def _leftovers(private: bool) -> tuple[set[str], dict[int, str], set[str]]:
    names = {name for name in os.listdir(procs.SHM) if _mine(name, private)} if procs.SHM.is_dir() else set()
    return names, procs.descriptors(), set(procs.shm_mappings())


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No name in /dev/shm, no descriptor and no mapping outlives a test."""
    private = request.config.stash[_shm_is_private]
    gc.collect()
    names, table, mappings = _leftovers(private)
    yield
    gc.collect()
    names_after, table_after, mappings_after = _leftovers(private)
    new_descriptors = {
        number: target
        for number, target in table_after.items()
        if table.get(number) != target and not target.startswith(("/dev/nvidia", "/dev/null"))
    }
    for name in names_after - names:
        (procs.SHM / name).unlink(missing_ok=True)  # so that one leak fails one test
    assert not names_after - names, "left in /dev/shm"
    assert not new_descriptors, "descriptors left open"
    assert not mappings_after - mappings, "mappings left"


@pytest.fixture
def litter() -> Iterator[Callable[[Path], Path]]:
    """Paths that a test expects to stay behind; they are removed here, after its assertions."""
    paths: list[Path] = []

    def add(path: Path) -> Path:
        paths.append(path)
        return path

    yield add
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


@pytest.fixture
def spawn(nothing_is_left: None) -> Iterator[Callable[..., procs.Child]]:
    """Spawns child interpreters that end with the test, whatever happens in it."""
    children: list[procs.Child] = []

    def start(*args: Any, **options: Any) -> procs.Child:
        child = procs.Child(*args, **options)
        children.append(child)
        return child

    yield start
    for child in children:
        child.close()


@pytest.fixture
def small_shm(nothing_is_left: None) -> Iterator[Callable[..., procs.SmallShm]]:
    """A small /dev/shm in a mount namespace; skips with the reason where that is not permitted."""
    mounts: list[procs.SmallShm] = []

    def mount(options: str | None, **more: Any) -> procs.SmallShm:
        mounts.append(procs.SmallShm(options, **more))
        mounts[-1].anchor.ready()
        return mounts[-1]

    yield mount
    for shm in mounts:
        shm.close()


def _memory_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.fixture
def large_shm(small_shm: Callable[..., procs.SmallShm]) -> procs.SmallShm:
    """Room for half a GiB, in a namespace of its own, on a machine that can spare it."""
    if _memory_available_bytes() < 2 << 30:
        pytest.skip("needs 2 GiB of free memory for a preparation that lasts")
    return small_shm("size=640m")


@pytest.fixture
def roomy_shm(small_shm: Callable[..., procs.SmallShm]) -> procs.SmallShm:
    """Room for 4 GiB, likewise."""
    if _memory_available_bytes() < 6 << 30:
        pytest.skip("needs 6 GiB of free memory for a preparation of 4 GiB")
    return small_shm("size=4400m")


@pytest.fixture
def open_region(nothing_is_left: None) -> Iterator[Callable[..., Any]]:
    """Constructs regions in this process and cleans them up, joiners first, when the test is over."""
    opened: list[Any] = []

    def construct(*args: Any, **options: Any) -> Any:
        from ec_shared_region import ECSharedRegion

        opened.append(ECSharedRegion(*args, **options))
        return opened[-1]

    yield construct
    while opened:
        opened.pop().cleanup()


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make files of another user")
