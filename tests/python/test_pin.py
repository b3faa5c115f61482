"""Registration with CUDA: a fake runtime in torch's place, and machines with a runtime but no driver."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import procs
from ec_shared_region import ECSharedRegion, logger

torch = pytest.importorskip("torch")

# Read before any test patches it.
HAS_DRIVER = torch.cuda.is_available()


class FakeRuntime:
    """Records every call in order and answers with the codes it was given, as ints or as torch's enum."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.register_code: Any = 0
        self.unregister_code: Any = 0

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> Any:
        self.calls.append(("register", pointer, size, flags))
        return self.register_code

    def cudaHostUnregister(self, pointer: int) -> Any:
        self.calls.append(("unregister", pointer))
        return self.unregister_code

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    if HAS_DRIVER:
        pytest.skip("a real CUDA driver answers here, the fake would not be asked")
    fake = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


@pytest.fixture
def region(runtime: FakeRuntime, open_region: Any, engine_id: str) -> Any:
    return open_region(engine_id, 9, 7168)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith(logger.name)]


def test_the_whole_mapping_is_registered(runtime: FakeRuntime, region: Any, caplog: Any) -> None:
    pointer = region._blocks_ptr
    region.pin_memory()
    assert region.is_pinned is True
    assert region._is_pinned is True
    assert "pinned" in repr(region)
    assert [call[1:3] for call in runtime.calls] == [(pointer, 9 * 7168)]
    region.cleanup()
    assert runtime.calls[1:] == [("unregister", pointer)]
    assert region.is_pinned is False
    assert warnings_of(caplog) == []


@pytest.mark.case("PI-23")
def test_the_constructor_registers_nothing(runtime: FakeRuntime, region: Any) -> None:
    assert runtime.calls == []
    assert region.is_pinned is False


@pytest.mark.case("PI-08")
def test_pinning_again_is_a_no_op(runtime: FakeRuntime, region: Any) -> None:
    for _ in range(3):
        region.pin_memory()
    assert len(runtime.of("register")) == 1


@pytest.mark.case("PI-16", "PI-22", "PI-46", "PI-17")
@pytest.mark.parametrize("code", [1, 2, 801, 304])
@pytest.mark.parametrize("wrap", [int, lambda code: SimpleNamespace(value=code)], ids=["int", "enum"])
@pytest.mark.case("FR-67")
def test_a_failure_is_a_warning_with_the_code(
    runtime: FakeRuntime, region: Any, caplog: Any, code: int, wrap: Any
) -> None:
    runtime.register_code = wrap(code)
    region.pin_memory()
    assert region.is_pinned is False
    (warning,) = warnings_of(caplog)
    assert str(code) in warning
    assert str(9 * 7168) in warning
    region.cleanup()
    assert runtime.of("unregister") == []


def test_after_a_failure_it_can_be_tried_again(runtime: FakeRuntime, region: Any) -> None:
    runtime.register_code = 2
    region.pin_memory()
    assert region.is_pinned is False
    runtime.register_code = 0
    region.pin_memory()
    assert region.is_pinned is True
    region.cleanup()
    assert len(runtime.of("unregister")) == 1


@pytest.mark.case("PI-26")
@pytest.mark.parametrize("ending", ["cleanup", "cleanup three times", "exit", "drop"])
def test_unregister_exactly_once_with_the_same_pointer(runtime: FakeRuntime, engine_id: str, ending: str) -> None:
    region = ECSharedRegion(engine_id, 9, 7168)
    pointer = region._blocks_ptr
    region.pin_memory()
    if ending == "exit":
        with region:
            pass
    elif ending != "drop":
        for _ in range(3 if "three" in ending else 1):
            region.cleanup()
    del region
    assert runtime.of("unregister") == [("unregister", pointer)]


@pytest.mark.case("PI-47")
@pytest.mark.parametrize("creator_first", [True, False])
def test_two_objects_register_and_unregister_their_own(
    runtime: FakeRuntime, engine_id: str, creator_first: bool
) -> None:
    one, two = ECSharedRegion(engine_id, 9, 7168), ECSharedRegion(engine_id, 9, 7168)
    pointers = [one._blocks_ptr, two._blocks_ptr]
    for region in (one, two):
        region.pin_memory()
    assert [call[1] for call in runtime.of("register")] == pointers
    for region in (one, two) if creator_first else (two, one):
        region.cleanup()
    expected = pointers if creator_first else pointers[::-1]
    assert [call[1] for call in runtime.of("unregister")] == expected


FAKED = """
import logging, torch
class Fake:
    unregister_code = 0
    unregistered = []
    def cudaHostRegister(self, pointer, size, flags): return 0
    def cudaHostUnregister(self, pointer):
        self.unregistered.append(pointer)
        self.name_was_there.append(os.path.exists(r._mmap_path))
        return self.unregister_code
    name_was_there = []
fake = Fake()
torch.cuda.is_available = lambda: True
torch.cuda.cudart = lambda: fake
records = []
class Keep(logging.Handler):
    def emit(self, record): records.append((record.levelname, record.getMessage()))
logging.getLogger("ec_shared_region").addHandler(Keep())
r = Region(id, 9, 7168)
address = r._blocks_ptr
r.pin_memory()
"""


@pytest.fixture
def faked(spawn: Any, engine_id: str) -> Any:
    if HAS_DRIVER:
        pytest.skip("a real CUDA driver answers here, the fake would not be asked")
    child = spawn()
    child.run(FAKED, id=engine_id)
    return child


@pytest.mark.case("PI-04", "PI-25")
def test_after_a_failed_unregister_the_mapping_is_kept(faked: Any, engine_id: str) -> None:
    """The driver may still know the pages: to unmap them would be worse than to keep them."""
    faked.run("Fake.unregister_code = 1; r.cleanup()")
    assert not procs.path_of(engine_id).exists()
    assert procs.is_mapped(faked.run("address"), faked.pid)
    warnings = [text for level, text in faked.run("records") if level == "WARNING"]
    assert len(warnings) == 1 and "1" in warnings[0]
    faked.run("r.cleanup()")
    assert faked.run("len(Fake.unregistered)") == 1
    assert faked.finish() == 0
    assert faked.stderr == ""


@pytest.mark.case("ST-19", "ST-07")
def test_the_name_goes_before_the_slow_part(faked: Any) -> None:
    """A second SIGTERM may end a slow teardown; by then the file has no name."""
    faked.run("r.cleanup()")
    assert faked.run("Fake.name_was_there") == [False]


@pytest.mark.case("LI-13")
def test_exit_without_cleanup_while_pinned(faked: Any, engine_id: str) -> None:
    assert faked.run("r.is_pinned") is True
    assert faked.finish() == 0
    assert faked.stderr == ""
    assert not procs.path_of(engine_id).exists()


@pytest.mark.parametrize("raised", [RuntimeError, AttributeError, OSError, ValueError])
def test_a_runtime_that_raises_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime, region: Any, caplog: Any, raised: type[Exception]
) -> None:
    """torch's own accessor raises where there is no driver, and transfers work all the same."""

    def no_driver() -> Any:
        raise raised("no driver")

    monkeypatch.setattr(torch.cuda, "cudart", no_driver)
    region.pin_memory()
    assert region.is_pinned is False
    assert len(warnings_of(caplog)) == 1
    region.cleanup()


INTERRUPTED = """
def interrupted(self, *a):
    raise KeyboardInterrupt
"""


def test_ctrl_c_during_register_is_the_users(faked: Any) -> None:
    """A registration takes seconds to minutes; what interrupts it is no failure of the runtime to be logged."""
    faked.run("r.cleanup(); r = Region(r.engine_id, 9, 7168)")
    faked.run(INTERRUPTED + "Fake.cudaHostRegister = interrupted")
    assert procs.error_of(faked, "r.pin_memory()").classes[0] == "KeyboardInterrupt"
    assert faked.run("r.is_pinned") is False
    faked.run("r.cleanup()")


def test_a_handler_that_cleans_up_during_register_is_no_deadlock(faked: Any) -> None:
    """SIGTERM's handler runs in the very thread that pins, and cleanup() must not wait for itself."""
    faked.run("r.cleanup(); r = Region(r.engine_id, 9, 7168)")
    faked.run(
        """
def register(self, *a):
    os.kill(os.getpid(), signal.SIGTERM)
    return 0
Fake.cudaHostRegister = register
signal.signal(signal.SIGTERM, lambda *a: r.cleanup())
"""
    )
    faked.run("try: r.pin_memory()\nexcept ValueError: pass\nr.cleanup()", timeout=10)
    assert faked.run("os.path.exists(r._mmap_path)") is False


def test_ctrl_c_during_unregister_leaves_no_name(faked: Any) -> None:
    """Whether it comes out of cleanup() or not: the name went first."""
    faked.run(INTERRUPTED + "Fake.cudaHostUnregister = interrupted")
    try:
        faked.run("r.cleanup()")
    except procs.ChildError as error:
        assert error.classes[0] == "KeyboardInterrupt"
    assert faked.run("os.path.exists(r._mmap_path)") is False
    faked.run("r.cleanup()")
    assert faked.finish() == 0


def test_without_cuda_nothing_is_asked(
    monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime, region: Any, caplog: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    region.pin_memory()
    assert region.is_pinned is False
    region.cleanup()
    assert runtime.calls == []
    assert warnings_of(caplog) == []


def test_pin_after_cleanup_registers_nothing(runtime: FakeRuntime, region: Any) -> None:
    region.cleanup()
    try:
        region.pin_memory()
    except Exception as error:
        assert isinstance(error, (ValueError, RuntimeError))
    assert runtime.calls == []
    assert region.is_pinned is False


CUDA_LIBRARIES = ("libcuda.so", "libcudart")


@pytest.mark.case("FO-07", "FO-08")
def test_import_construction_and_cleanup_open_no_cuda_library(spawn: Any, engine_id: str) -> None:
    child = spawn()
    child.run("r = Region(id, 9, 7168); view = memoryview(r); j = Region(id, 9, 7168); repr(r)", id=engine_id)
    maps = child.run("open('/proc/self/maps').read()")
    assert not [name for name in CUDA_LIBRARIES if name in maps]
    assert child.run("'torch' in sys.modules") is False
    child.run("j.cleanup(); view.release(); r.cleanup()")
    maps = child.run("open('/proc/self/maps').read()")
    assert not [name for name in CUDA_LIBRARIES if name in maps]


@pytest.mark.case("PK-01", "PK-02", "PK-10", "PK-11")
@pytest.mark.parametrize("believes", [True, False], ids=["torch says yes", "torch says no"])
def test_a_runtime_without_a_driver(spawn: Any, engine_id: str, believes: bool) -> None:
    """NVIDIA's own runtime library, and no driver below it: no exception of any kind, no panic's text."""
    if HAS_DRIVER:
        pytest.skip("this machine has a driver")
    child = spawn(imports=("torch",))
    if believes:
        child.run("torch.cuda.is_available = lambda: True")
    child.run("r = Region(id, 9, 7168); r.pin_memory()", id=engine_id)
    assert child.run("r.is_pinned") is False
    child.run("r.cleanup()")
    assert child.finish() == 0
    assert "panicked" not in child.stderr
    assert "Traceback" not in child.stderr


@pytest.mark.case("PK-01", "PI-13")
def test_pin_without_torch_is_a_no_op(spawn: Any, engine_id: str) -> None:
    child = spawn()
    child.run("sys.modules['torch'] = None; r = Region(id, 9, 7168); r.pin_memory()", id=engine_id)
    assert child.run("r.is_pinned") is False
    child.run("r.cleanup()")
    assert child.finish() == 0
    assert "panicked" not in child.stderr


@pytest.mark.gpu
@pytest.mark.case("PI-31", "PI-11", "PI-35")
def test_a_real_gpu_sees_pinned_blocks(open_region: Any, engine_id: str) -> None:
    if not HAS_DRIVER:
        pytest.skip("needs an NVIDIA GPU with a driver")
    region = open_region(engine_id, 64, 7168)
    region.pin_memory()
    assert region.is_pinned
    assert region.blocks[3].is_pinned()
    assert int(region.blocks[3].to("cuda", non_blocking=True).sum().item()) == 0
    region.cleanup()
    assert torch.empty(1, device="cuda").numel() == 1, "no pending error hits an innocent call"


@pytest.mark.case("PI-29")
def test_cleanup_waits_for_the_devices_where_it_is_asked_to(
    runtime: FakeRuntime, region: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Before it unregisters, for the devices that this process uses, and never as the first to initialise CUDA."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device != 1, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: runtime.calls.append(("synchronize", device)))
    region.pin_memory()
    region.cleanup(synchronize=True)
    assert [call[0] for call in runtime.calls] == ["register", "synchronize", "synchronize", "unregister"]
    assert runtime.of("synchronize") == [("synchronize", 0), ("synchronize", 2)]
    assert not warnings_of(caplog)


@pytest.mark.case("PI-29")
def test_a_device_that_cannot_be_waited_for_is_a_warning(
    runtime: FakeRuntime, region: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail(device: int) -> None:
        raise RuntimeError("an earlier kernel failed")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: True, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    region.pin_memory()
    region.cleanup(synchronize=True)
    assert runtime.of("unregister")
    assert any("an earlier kernel failed" in text for text in warnings_of(caplog))


@pytest.mark.parametrize("is_initialized", [True, False])
def test_a_region_that_is_not_pinned_waits_for_nobody(
    runtime: FakeRuntime, region: Any, monkeypatch: pytest.MonkeyPatch, is_initialized: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: runtime.calls.append(("synchronize", device)))
    if not is_initialized:
        region.pin_memory()
    region.cleanup(synchronize=True)
    assert not runtime.of("synchronize")
