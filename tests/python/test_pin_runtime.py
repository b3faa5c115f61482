"""pin_memory() through the real loading path, against a programmable runtime library."""

from __future__ import annotations

import os
import subprocess
import uuid
from pathlib import Path

import pytest

import fake_cudart


@pytest.fixture
def engine_id() -> str:
    return f"pin-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds libcudart.so.13."""
    folder = tmp_path_factory.mktemp("cudart")
    fake_cudart.build(folder)
    return folder


@pytest.fixture
def run(engine_id: str, tmp_path: Path, runtime: Path):
    """Runs a program with the runtime on the loader's path, or with other options."""

    def call(program: str, **options):
        options.setdefault("loader_path", runtime)
        variables = {"path": str(runtime / "libcudart.so.13")}
        return fake_cudart.run(program, variables, engine_id=engine_id, folder=tmp_path, **options)

    return call


@pytest.mark.case("PI-26", "PI-35", "PI-05", "PI-01")
def test_pieces_tile_the_region_and_exactly_they_are_unregistered(run) -> None:
    run(
        """
        r = region()
        result = r.pin_memory(max_piece_bytes=64 << 10)
        fake = Fake(path)
        assert result and r.is_pinned and result.backend == "cudart" and result.library_path == path, result
        calls = fake.calls()
        assert result.pieces == len(calls) > 3 and result.bytes == r.nbytes and result.code is None
        page = os.sysconf("SC_PAGESIZE")
        end = r._blocks_ptr
        for call in calls:
            assert call.address == end and call.flags & 1 and call.size % page == 0
            assert (call.address - r._blocks_ptr) % 7168 == 0
            end += call.size
        assert end - r._blocks_ptr == -(-r.nbytes // page) * page
        assert r.pin_memory() is result and len(fake.calls()) == len(calls)
        r.cleanup()
        assert not r.is_pinned
        undone = fake.calls("unregister")
        assert [c.address for c in undone] == [c.address for c in reversed(calls)]
        assert not warnings_logged()
        """
    )


@pytest.mark.case("PI-02", "PI-32", "PI-16", "PI-17", "PI-22")
def test_a_refusal_at_the_third_piece_undoes_the_first_two_and_can_be_repeated(run) -> None:
    run(
        """
        r = region()
        fake = Fake(path)
        fake.fail_register(3, 801, 1)
        result = r.pin_memory(max_piece_bytes=64 << 10)
        assert not result and not r.is_pinned and result.code == 801 and result.bytes == 0, result
        kinds = [(c.kind, c.address) for c in fake.calls()]
        assert [k for k, _ in kinds] == ["register"] * 3 + ["unregister"] * 2
        assert [a for _, a in kinds[3:]] == [kinds[1][1], kinds[0][1]]
        assert fake.pending() == 0, "the error would hit an innocent call"
        (text,) = warnings_logged()
        for part in (str(r.nbytes), "code=801", "cudaErrorFake801", "the fake runtime answered 801", "hint:",
                     "confidential computing", "3 to 5 times slower", "host memory"):
            assert part in text, (part, text)
        fake.fail_register(1, 801, 1)
        assert not r.pin_memory() and len(warnings_logged()) == 1, "warned twice"
        assert r.pin_memory(), "the failure had gone away"
        r.cleanup()
        """
    )


@pytest.mark.case("PI-01", "MN-07", "PI-07")
@pytest.mark.case("FR-68")
def test_pieces_are_halved_until_the_driver_takes_them(run) -> None:
    run(
        """
        r = region(2048, 7168)
        fake = Fake(path)
        for code in (1, 2):
            fake.limit(3 << 20, code)
            result = r.pin_memory()
            assert result and result.pieces >= 5, result
            taken = [c for c in fake.calls("register") if c.answer == 0]
            end = r._blocks_ptr
            for call in taken:
                assert call.address == end and call.size <= 3 << 20
                end += call.size
            assert end >= r._blocks_ptr + r.nbytes
            r.unpin_memory()
            assert not r.is_pinned
            fake.forget()
        fake.limit(1, 2)
        result = r.pin_memory()
        assert not result and result.code == 2
        assert min(c.size for c in fake.calls("register")) <= 1 << 20
        assert "ulimit" in warnings_logged()[0]
        r.cleanup()
        """
    )


@pytest.mark.case("PI-04", "PI-25")
def test_a_mapping_that_the_driver_does_not_let_go_is_kept(run) -> None:
    run(
        """
        r = region()
        r.pin_memory()
        fake = Fake(path)
        fake.fail_unregister(1)
        r.cleanup()
        assert not os.path.exists(r.path)
        assert r.path in open("/proc/self/maps").read(), "unmapped while registered"
        assert len(warnings_logged()) == 1 and "kept" in warnings_logged()[0]
        from ec_shared_region import _core
        assert _core.kept_mappings() == 1
        """
    )


@pytest.mark.case("PI-04")
def test_a_rollback_that_fails_keeps_the_mapping_too(run) -> None:
    run(
        """
        r = region()
        fake = Fake(path)
        fake.fail_register(2, 801, 1)
        fake.fail_unregister(1)
        assert not r.pin_memory(max_piece_bytes=64 << 10)
        fake.fail_unregister(0)
        r.cleanup()
        assert r.path in open("/proc/self/maps").read()
        assert any("kept" in text for text in warnings_logged())
        """
    )


@pytest.mark.case("PI-25", "PI-28")
@pytest.mark.parametrize("code", [4, 201, 709])
def test_a_runtime_that_is_going_is_silent(run, code: int) -> None:
    done = run(
        f"""
        r = region()
        r.pin_memory()
        Fake(path).fail_unregister({code})
        r.cleanup()
        assert not warnings_logged() and r.path not in open("/proc/self/maps").read()
        """
    )
    assert done.stderr == ""


@pytest.mark.case("PI-11", "PI-13", "PI-14")
def test_errors_of_others_are_neither_blamed_on_us_nor_swallowed(run) -> None:
    run(
        """
        fake = Fake(path)
        fake.set_pending(700)
        r = region()
        assert r.pin_memory(), "somebody else's error was read as ours"
        assert fake.pending() == 700 and not fake.calls("last_error")
        r.cleanup()
        assert fake.pending() == 700
        """
    )


@pytest.mark.case("PI-08")
def test_what_somebody_else_registered_is_not_ours_to_undo(run) -> None:
    run(
        """
        r = region()
        fake = Fake(path)
        fake.fail_register(1, 712, 1)
        result = r.pin_memory()
        assert result and result.pieces == 0 and "somebody else" in result.reason
        assert fake.pending() == 0
        r.cleanup()
        assert not fake.calls("unregister") and not warnings_logged()
        """
    )


@pytest.mark.case("PI-13")
@pytest.mark.parametrize("missing", ["WITHOUT_LAST_ERROR", "WITHOUT_ERROR_TEXT"])
def test_a_runtime_without_a_helper_symbol_still_fails_softly(run, tmp_path: Path, missing: str) -> None:
    folder = tmp_path / "half"
    path = fake_cudart.build(folder, defines=(missing,))
    run(
        f"""
        fake = Fake({str(path)!r})
        r = region()
        fake.fail_register(1, 801, 1)
        result = r.pin_memory()
        assert not result and result.code == 801 and len(warnings_logged()) == 1
        assert r.pin_memory()
        r.cleanup()
        """,
        loader_path=folder,
    )


@pytest.mark.case("PK-01", "PK-02")
def test_half_there_libraries_are_passed_over(run, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / "libcudart.so.13").write_bytes(b"this is no library")
    twelve = fake_cudart.build(folder, "libcudart.so.12", defines=("WITHOUT_REGISTER",))
    eleven = fake_cudart.build(folder, "libcudart.so.11.0")
    run(
        f"""
        r = region()
        result = r.pin_memory()
        assert result and result.library_path == {str(eleven)!r}, result
        r.cleanup()
        """,
        loader_path=folder,
    )
    eleven.unlink()
    assert twelve.exists()
    done = run(
        """
        r = region()
        result = r.pin_memory()
        assert not result and result.backend is None and "cudaHostRegister" in result.reason, result
        r.cleanup()
        assert not warnings_logged()
        """,
        loader_path=folder,
    )
    assert done.stderr == ""


@pytest.mark.case("PK-04", "PK-05", "PK-07", "PK-08")
@pytest.mark.parametrize("place", ["nvidia/cu13/lib/libcudart.so.13", "nvidia/cuda_runtime/lib/libcudart.so.12"])
def test_the_runtime_of_pip_packages_is_found(run, tmp_path: Path, place: str) -> None:
    root = tmp_path / "site"
    path = fake_cudart.build((root / place).parent, Path(place).name)
    run(
        f"""
        import site
        sys.path[:] = [p for p in sys.path if "site-packages" not in p]
        r = region()
        result = r.pin_memory()
        assert result and result.library_path == {str(path)!r}, result
        r.cleanup()
        """,
        loader_path=None,
        package_root=root,
    )


@pytest.mark.case("PI-11", "PK-04")
def test_the_copy_that_torch_is_bound_to_is_chosen_among_several(run, tmp_path: Path, runtime: Path) -> None:
    folder = tmp_path / "torch_lib"
    hashed = fake_cudart.build(folder, "libcudart-1f2e3d4c.so.12")
    # What stands for torch's library: linked to the copy with a hashed name, found by RPATH.
    torch_library = folder / "libc10_cuda.so"
    source = tmp_path / "user.c"
    source.write_text("int cudaGetDeviceCount(int *); int use(int *n) { return cudaGetDeviceCount(n); }\n")
    link = ["cc", "-shared", "-fPIC", "-o", str(torch_library), str(source), str(hashed), "-Wl,-rpath,$ORIGIN"]
    subprocess.run(link, check=True, capture_output=True)
    run(
        f"""
        ctypes.CDLL(path)  # another copy, loaded first
        ctypes.CDLL({str(torch_library)!r}, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        maps = open("/proc/self/maps").read()
        assert path in maps and {str(hashed)!r} in maps
        r = region()
        result = r.pin_memory()
        assert result and result.library_path == {str(hashed)!r}, result
        assert not Fake(path).calls() and len(Fake({str(hashed)!r}).calls()) == 1
        r.cleanup()
        """
    )


def test_a_copy_that_is_loaded_comes_before_names_on_the_loader_path(run, tmp_path: Path) -> None:
    loaded = fake_cudart.build(tmp_path / "own", "libcudart-abcd.so.12")
    run(
        f"""
        ctypes.CDLL({str(loaded)!r})
        r = region()
        assert r.pin_memory().library_path == {str(loaded)!r}
        r.cleanup()
        """
    )


@pytest.mark.case("PK-01", "PK-02")
def test_without_any_runtime_the_answer_is_a_value(run, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run(
        """
        r = region()
        result = r.pin_memory()
        assert not result and result.backend is None and result.code is None
        assert "no CUDA runtime library" in result.reason, result
        r.cleanup()
        assert not warnings_logged()
        """,
        loader_path=empty,
    )
    assert done.stderr == ""


@pytest.mark.parametrize(("count", "code"), [(0, 0), (0, 35), (0, 100)])
def test_without_a_device_and_without_torch_nothing_is_said(run, count: int, code: int) -> None:
    run(
        f"""
        fake = Fake(path)
        fake.devices({count}, {code})
        r = region()
        result = r.pin_memory()
        assert not result and result.code == {code or 100} and result.library_path == path, result
        assert not fake.calls() and not warnings_logged()
        r.cleanup()
        """
    )


def test_where_torch_says_there_is_no_cuda_nothing_is_loaded(run) -> None:
    run(
        """
        r = region()
        result = r.pin_memory()
        assert not result and result.reason == "CUDA is not available"
        assert "cudart" not in open("/proc/self/maps").read() and not warnings_logged()
        r.cleanup()
        """,
        torch_says=False,
    )


@pytest.mark.parametrize("code", [35, 100])
def test_torchs_own_binding_is_asked_where_the_runtime_has_no_device(run, code: int) -> None:
    run(
        f"""
        import torch
        fake = Fake(path)
        fake.devices(0, {code})
        class Answers:
            def __init__(self): self.registered, self.unregistered = [], []
            def cudaHostRegister(self, address, size, flags): self.registered.append((address, size, flags)); return 0
            def cudaHostUnregister(self, address): self.unregistered.append(address); return 0
        torch.cuda.answers = answers = Answers()
        r = region()
        result = r.pin_memory(max_piece_bytes=64 << 10)
        assert result and result.backend == "torch" and result.pieces == len(answers.registered) > 3, result
        assert all((address - r._blocks_ptr) % 28672 == 0 for address, _, _ in answers.registered)
        r.cleanup()
        assert answers.unregistered == [a for a, _, _ in reversed(answers.registered)]
        assert not fake.calls()
        torch.cuda.answers = None
        r = region()
        result = r.pin_memory()
        assert not result and result.backend == "torch" and "no NVIDIA driver" in result.reason
        assert len(warnings_logged()) == 1
        r.cleanup()
        """,
        torch_says=True,
    )


@pytest.mark.case("PI-37", "PI-38", "FO-10")
def test_python_runs_on_while_the_driver_works(run) -> None:
    run(
        """
        import threading, time
        fake = Fake(path)
        fake.delay(1_000_000)
        r = region()
        ticks, stop = [], threading.Event()
        def tick():
            while not stop.is_set():
                ticks.append(time.monotonic())
                time.sleep(0.01)
        thread = threading.Thread(target=tick)
        thread.start()
        assert r.pin_memory()
        stop.set()
        thread.join()
        # One call of the driver took a second; a held GIL would have given one tick or two.
        assert len(ticks) > 20, len(ticks)
        r.cleanup()
        """
    )


@pytest.mark.case("PI-52")
def test_cleanup_waits_for_a_pin_in_progress_and_undoes_it(run) -> None:
    run(
        """
        import threading
        fake = Fake(path)
        fake.delay(500_000)
        r = region()
        memory = memoryview(r)
        results = []
        thread = threading.Thread(target=lambda: results.append(r.pin_memory()))
        thread.start()
        while "libcudart" not in open("/proc/self/maps").read():
            pass
        memory[0, 0] = 1  # in use meanwhile
        memory.release()
        r.cleanup()
        thread.join()
        kinds = [c.kind for c in fake.calls()]
        assert kinds in (["register", "unregister"], []), kinds
        assert not r.is_pinned and not os.path.exists(r.path)
        assert r.path not in open("/proc/self/maps").read()
        """
    )


@pytest.mark.case("PI-47")
@pytest.mark.parametrize("order", ["first", "second"])
def test_two_regions_of_one_id_are_pinned_apart(run, order: str) -> None:
    run(
        f"""
        a, b = region(), region()
        assert a.pin_memory() and b.pin_memory() and a._blocks_ptr != b._blocks_ptr
        fake = Fake(path)
        one, other = (a, b) if {order!r} == "first" else (b, a)
        one.cleanup()
        assert [c.address for c in fake.calls("unregister")] == [one._blocks_ptr] and other.is_pinned
        other.cleanup()
        assert {{c.address for c in fake.calls("unregister")}} == {{a._blocks_ptr, b._blocks_ptr}}
        """
    )


@pytest.mark.case("PI-34")
def test_the_device_is_current_during_the_calls_only(run) -> None:
    run(
        """
        fake = Fake(path)
        r = region()
        r.pin_memory(device=3)
        assert [c.device for c in fake.calls("register")] == [3]
        assert fake.device() == 0, "the calling thread's device changed"
        r.unpin_memory()
        assert r.pin_memory() and fake.calls("register")[-1].device == 0
        assert {c.device for c in fake.calls("set_device")} == {3}, "a device was set that nobody asked for"
        assert [c.device for c in fake.calls("unregister")] == [3]
        r.cleanup()
        """
    )


@pytest.mark.case("PI-19", "PI-20", "PI-23")
def test_the_environment_turns_pinning_off_and_sizes_pieces(run) -> None:
    run(
        """
        r = region()
        result = r.pin_memory()
        assert not result and "EC_SHARED_REGION_PIN" in result.reason and not warnings_logged()
        assert any("EC_SHARED_REGION_PIN" in record.getMessage() for record in records)
        assert "cudart" not in open("/proc/self/maps").read()
        r.cleanup()
        """,
        env={"EC_SHARED_REGION_PIN": "0"},
    )
    run(
        """
        r = region()
        assert "cudart" not in open("/proc/self/maps").read(), "the constructor loaded CUDA"
        assert r.pin_memory().pieces == 8
        r.unpin_memory()
        os.environ["EC_SHARED_REGION_MAX_PIECE_BYTES"] = "64k"
        try:
            r.pin_memory()
        except ValueError as error:
            assert "64k" in str(error) and "hint:" in str(error)
        else:
            raise AssertionError("accepted")
        r.cleanup()
        """,
        env={"EC_SHARED_REGION_MAX_PIECE_BYTES": str(64 << 10)},
    )


def test_strict_raises_what_would_be_a_warning(run) -> None:
    run(
        """
        from ec_shared_region import PinError
        r = region()
        Fake(path).fail_register(1, 801, 1)
        try:
            r.pin_memory(strict=True)
        except PinError as error:
            assert error.result.code == 801 and not error.result and isinstance(error, RuntimeError)
        else:
            raise AssertionError("did not raise")
        assert not warnings_logged() and not r.is_pinned
        r.cleanup()
        try:
            r.pin_memory()
        except ValueError:
            pass
        else:
            raise AssertionError("pinned a closed region")
        """
    )


def test_a_pinned_region_that_is_dropped_warns_and_is_unregistered(run) -> None:
    run(
        """
        import warnings
        fake = Fake(path)
        r = region()
        r.pin_memory()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del r
        assert [w.category for w in caught] == [ResourceWarning], caught
        assert [c.kind for c in fake.calls()] == ["register", "unregister"]
        """
    )


def test_at_exit_the_region_is_unregistered_before_it_is_unmapped(run, engine_id: str) -> None:
    done = run("r = region(); assert r.pin_memory()")
    assert done.stderr == "" and not os.path.exists(f"/dev/shm/vllm_ec_{engine_id}.mmap")


@pytest.mark.case("FO-01")
def test_a_forked_child_does_not_unregister(run) -> None:
    run(
        """
        fake = Fake(path)
        r = region()
        r.pin_memory()
        pid = os.fork()
        if pid == 0:
            r.cleanup()
            os._exit(0 if not fake.calls("unregister") else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert r.is_pinned and os.path.exists(r.path)
        r.cleanup()
        """
    )


def test_nvidias_own_runtime_without_a_driver_answers_35(run) -> None:
    nvidia = pytest.importorskip("nvidia", reason="NVIDIA's runtime package is not installed")
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("this machine has a GPU")
    root = Path(next(iter(nvidia.__path__))).parent
    if not list(root.glob("nvidia/*/lib/libcudart.so.*")):
        pytest.skip("NVIDIA's runtime library is not installed")
    done = run(
        """
        r = region()
        result = r.pin_memory()
        assert not result and result.code in (35, 100, 34), result
        assert "/nvidia/" in result.library_path and result.reason
        r.cleanup()
        assert not warnings_logged()
        """,
        loader_path=None,
        package_root=root,
    )
    assert done.stderr == ""


@pytest.mark.case("PI-08")
def test_our_own_leftovers_are_not_taken_for_somebody_elses(run) -> None:
    run(
        """
        r = region()
        fake = Fake(path)
        assert r.pin_memory(max_piece_bytes=64 << 10)
        fake.fail_unregister(1)
        r.unpin_memory()
        assert not r.is_pinned and len(warnings_logged()) == 1
        result = r.pin_memory()
        assert not result and not r.is_pinned and "did not take back" in result.reason, result
        fake.fail_unregister(0)
        assert r.pin_memory() and r.is_pinned, "the driver had changed its mind"
        r.cleanup()
        from ec_shared_region import _core
        assert _core.kept_mappings() == 1
        """
    )


@pytest.mark.case("PI-02")
def test_pin_and_unpin_in_threads_never_leave_a_false_flag(run) -> None:
    run(
        """
        import threading
        fake = Fake(path)
        for _ in range(60):
            fake.forget()
            r = region()
            go = threading.Barrier(3)
            def work(step):
                go.wait()
                step()
            steps = [r.pin_memory, r.pin_memory, r.unpin_memory]
            threads = [threading.Thread(target=work, args=(step,)) for step in steps]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            live = len(fake.calls("register")) - len(fake.calls("unregister"))
            assert r.is_pinned == (live == 1), (r.is_pinned, live)
            r.cleanup()
            assert len(fake.calls("register")) == len(fake.calls("unregister"))
        """
    )


@pytest.mark.case("FO-01")
def test_a_forked_child_does_not_say_it_is_pinned(run) -> None:
    run(
        """
        r = region()
        assert r.pin_memory()
        pid = os.fork()
        if pid == 0:
            result = r.pin_memory()
            ok = not r.is_pinned and not result and "forked" in result.reason
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        r.cleanup()
        """
    )


def test_a_daemon_thread_that_pins_at_exit_is_no_abort(run) -> None:
    done = run(
        """
        import threading, time
        Fake(path).delay(300_000)
        r = region()
        threading.Thread(target=r.pin_memory, daemon=True).start()
        time.sleep(0.05)
        """
    )
    assert done.stderr == ""


@pytest.mark.case("PK-01")
def test_a_library_that_was_cut_off_is_passed_over(run, tmp_path: Path, runtime: Path) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    whole = (runtime / "libcudart.so.13").read_bytes()
    (folder / "libcudart.so.13").write_bytes(whole[:8192])
    os.mkfifo(folder / "libcudart.so.12")
    eleven = fake_cudart.build(folder, "libcudart.so.11.0")
    run(
        f"""
        r = region()
        assert r.pin_memory().library_path == {str(eleven)!r}
        r.cleanup()
        """,
        loader_path=folder,
    )


def test_a_mapped_file_with_an_odd_name_hides_no_runtime(run, tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/odd\xff"
    Path(os.fsdecode(odd)).write_bytes(b"x" * 4096)
    loaded = fake_cudart.build(tmp_path / "own", "libcudart-abcd.so.12")
    run(
        f"""
        import mmap
        with open({odd!r}, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        ctypes.CDLL({str(loaded)!r})
        r = region()
        assert r.pin_memory().library_path == {str(loaded)!r}
        r.cleanup()
        """
    )
