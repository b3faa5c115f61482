"""Builds the programmable CUDA runtime of ``fake_cudart.c`` and runs programs that meet it.

A program runs in a process of its own, since a runtime stays loaded for good. It finds the runtime the way
the real one is found: by its versioned name on the loader's path, or where a test puts it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_cudart.c")

PRELUDE = '''
import ctypes, logging, os, sys
from collections import namedtuple
sys.dont_write_bytecode = True

class _Call(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("address", ctypes.c_size_t), ("size", ctypes.c_size_t),
                ("flags", ctypes.c_uint), ("device", ctypes.c_int), ("answer", ctypes.c_int)]

Call = namedtuple("Call", "kind address size flags device answer")
KINDS = {1: "register", 2: "unregister", 3: "set_device", 4: "last_error"}

class Fake:
    """The runtime's side: what it was asked, and what it is to answer."""
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.fake_call.restype = _Call
        self.lib.fake_limit.argtypes = [ctypes.c_size_t, ctypes.c_int]
    def __getattr__(self, name):
        return getattr(self.lib, "fake_" + name)
    def calls(self, *kinds):
        found = [self.lib.fake_call(i) for i in range(self.lib.fake_call_count())]
        calls = [Call(KINDS[c.kind], c.address, c.size, c.flags, c.device, c.answer) for c in found]
        return [c for c in calls if c.kind in (kinds or ("register", "unregister"))]

records = []
class _Keep(logging.Handler):
    def emit(self, record):
        records.append(record)
logging.getLogger("ec_shared_region").addHandler(_Keep())
logging.getLogger("ec_shared_region").setLevel(logging.INFO)
def warnings_logged():
    return [r.getMessage() for r in records if r.levelno >= logging.WARNING]

if os.environ.get("TEST_WITHOUT_TORCH"):
    sys.modules["torch"] = None  # `import torch` raises ImportError
import ec_shared_region
from ec_shared_region import ECSharedRegion

def region(blocks=64, size=7168, **options):
    return ECSharedRegion(os.environ["TEST_ENGINE_ID"], blocks, size, **options)
'''

# A stand-in for torch, for tests only: what a caller's test would replace in the real one.
TORCH = """
import os
class _Cuda:
    answers = None
    def is_available(self):
        return os.environ.get("TEST_TORCH_CUDA") == "1"
    def cudart(self):
        if self.answers is None:
            raise RuntimeError("Found no NVIDIA driver on your system.")
        return self.answers
    def device(self, ordinal):
        import contextlib
        return contextlib.nullcontext()
cuda = _Cuda()
"""


def build(
    folder: Path, name: str = "libcudart.so.13", *, soname: str | None = None, defines: tuple[str, ...] = ()
) -> Path:
    """Compiles a runtime into ``folder`` under the file name ``name``; skips where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler to build the fake CUDA runtime with")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", str(target), str(SOURCE)]
    command += [f"-Wl,-soname,{soname or name}", *(f"-D{define}" for define in defines)]
    subprocess.run(command, check=True, capture_output=True)
    return target


def run(
    program: str,
    variables: dict[str, str],
    *,
    engine_id: str,
    loader_path: Path | None = None,
    package_root: Path | None = None,
    torch_says: bool | None = None,
    folder: Path,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs ``program`` after the prelude, with ``variables`` set.

    ``torch_says`` None: without torch; else with a stand-in that says whether CUDA is available. Fails the test
    if the program fails, or if a panic shows on its stderr.
    """
    environment = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    environment["TEST_ENGINE_ID"] = engine_id
    environment["PYTHONFAULTHANDLER"] = "1"
    roots = []
    if torch_says is None:
        environment["TEST_WITHOUT_TORCH"] = "1"
    else:
        stand_in = folder / "torch_stand_in"
        stand_in.mkdir(exist_ok=True)
        (stand_in / "torch.py").write_text(TORCH)
        roots.append(str(stand_in))
        environment["TEST_TORCH_CUDA"] = str(int(torch_says))
    if package_root is not None:
        roots.append(str(package_root))
    if loader_path is not None:
        environment["LD_LIBRARY_PATH"] = str(loader_path)
    environment["PYTHONPATH"] = os.pathsep.join(roots)
    environment.update(env or {})
    # Without the environment's own site-packages a real runtime beside the package could be met.
    hide = "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n" if package_root is None else ""
    given = "".join(f"{name} = {value!r}\n" for name, value in variables.items())
    text = PRELUDE + hide + given + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "panicked" not in done.stderr, done.stderr
    return done
