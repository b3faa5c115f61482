"""The installed package: what it exports, what its import loads, and what its errors are."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import subprocess
import sys

import pytest

import ec_shared_region as ec

PUBLIC = {
    "ECSharedRegion",
    "build_info",
    "logger",
    "RegionError",
    "InvalidArgumentError",
    "SizeOverflowError",
    "ArgumentTypeError",
    "GeometryMismatchError",
    "NoSpaceError",
    "ForeignFileError",
    "RegionExistsError",
    "RegionTimeoutError",
    "RegionNotFoundError",
    "SystemCallError",
}

BASES = {
    "InvalidArgumentError": (ValueError,),
    "SizeOverflowError": (ec.InvalidArgumentError, ValueError, OverflowError),
    "ArgumentTypeError": (TypeError,),
    "GeometryMismatchError": (ValueError,),
    "NoSpaceError": (OSError,),
    "ForeignFileError": (PermissionError, OSError),
    "RegionExistsError": (FileExistsError, OSError),
    "RegionTimeoutError": (TimeoutError, OSError),
    "RegionNotFoundError": (ec.RegionTimeoutError, TimeoutError, FileNotFoundError),
    "SystemCallError": (OSError,),
    "DirectoryMissingError": (ec.SystemCallError, FileNotFoundError),
    "AccessDeniedError": (ec.SystemCallError, PermissionError),
}


def test_what_is_public() -> None:
    assert set(ec.__all__) >= PUBLIC
    assert all(hasattr(ec, name) for name in ec.__all__)
    assert callable(ec._wait_for_file_size)
    assert ec.ECSharedRegion.__name__ == "ECSharedRegion"
    assert ec.ECSharedRegion.__doc__


def test_the_errors_are_one_family_and_built_in_too() -> None:
    assert issubclass(ec.RegionError, Exception)
    assert not issubclass(ec.RegionError, OSError)
    for name, bases in BASES.items():
        kind = getattr(ec, name)
        assert issubclass(kind, ec.RegionError), name
        assert issubclass(kind, bases), name
        assert kind.__module__.startswith("ec_shared_region"), name


def test_an_error_can_cross_a_process_pool() -> None:
    """Exceptions are pickled by executors; ours come back whole."""
    import pickle

    with pytest.raises(ec.InvalidArgumentError) as caught:
        ec.ECSharedRegion("x", 0, 64)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is type(caught.value)
    assert str(copy) == str(caught.value)
    assert copy.hint == caught.value.hint

    with pytest.raises(ec.RegionNotFoundError) as missing:
        ec.ECSharedRegion("no such region", 1, 64, mode="join", timeout=0.0)
    copy = pickle.loads(pickle.dumps(missing.value))
    assert type(copy) is type(missing.value)
    assert (str(copy), copy.errno, copy.filename) == (str(missing.value), missing.value.errno, missing.value.filename)


@pytest.mark.case("FO-07", "PK-01")
def test_import_loads_neither_torch_nor_cuda_nor_numpy() -> None:
    code = (
        "import sys, ec_shared_region\n"
        "maps = open('/proc/self/maps').read()\n"
        "print([n for n in ('torch', 'numpy', 'multiprocessing.shared_memory') if n in sys.modules],"
        " [n for n in ('libcuda', 'libcudart', 'libtorch') if n in maps])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"
    assert done.stderr == ""


def test_it_warns_of_nothing(engine_id: str) -> None:
    """In Python's development mode, where a leaked file or a deprecated call is an error."""
    code = f"import ec_shared_region as e; r = e.ECSharedRegion({engine_id!r}, 1, 64); r.cleanup()"
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_typing_information_is_installed() -> None:
    files = importlib.resources.files("ec_shared_region")
    assert (files / "py.typed").is_file()
    assert any(entry.name.endswith(".pyi") for entry in files.iterdir()) or (files / "__init__.py").is_file()


def test_build_info_and_version_agree() -> None:
    info = ec.build_info()
    assert info["version"] == ec.__version__ == importlib.metadata.version("ec-shared-region")
    assert info["target"] and info["profile"]
    assert isinstance(info["features"], list)
    assert "python" in info["features"]


def test_the_wheel_serves_later_pythons_too() -> None:
    """One wheel by the stable ABI, from 3.11 on: buffers are not in it before."""
    wheel = importlib.metadata.distribution("ec-shared-region").read_text("WHEEL")
    assert wheel is not None
    if "abi3" not in wheel:
        pytest.skip("not installed from a wheel of the stable ABI")
    assert "cp311-abi3" in wheel
    assert importlib.metadata.metadata("ec-shared-region")["Requires-Python"] == ">=3.11"


def test_the_logger_is_a_librarys() -> None:
    """A library logs and prints nothing by itself, whatever the application did not configure."""
    assert ec.logger.name == "ec_shared_region"
    assert ec.logger.level == 0
    assert ec.logger.propagate


def test_threads_may_import_it_at_once() -> None:
    code = (
        "import threading\n"
        "def work():\n    import ec_shared_region\n"
        "threads = [threading.Thread(target=work) for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
