"""The demo: an engine in miniature. What it says is true, it notices what is wrong, and nothing outlives it."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from PIL import Image

from ec_shared_region.demo import leftovers, photos, report
from ec_shared_region.demo.encoder import PatchEmbedding
from ec_shared_region.demo.leftovers import Leftover
from ec_shared_region.demo.messages import DemoError, JobKind, Plan
from ec_shared_region.demo.photos import PATCH_PIXELS, Photograph
from ec_shared_region.demo.scheduler import BlockPool, _Scheduler
from ec_shared_region.demo.supervisor import Outcome
from procs import PATIENCE, path_of, wait_until

# An import of torch for each process, on a machine that may be busy.
LONG = 2 * PATIENCE
# Small rows; the photographs and the processes are the same.
SMALL = ("--workers", "2", "--hidden-size", "64")


class Demo:
    """The command in a session of its own, as a shell would start it."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ec_shared_region", "demo", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._children: set[psutil.Process] = set()

    def children(self) -> dict[str, psutil.Process]:
        """The engine's processes; the supervisor starts the workers first and the scheduler last."""
        try:
            running = psutil.Process(self.process.pid).children(recursive=True)
            self._children.update(running)
            engine = sorted((c for c in running if "spawn_main" in " ".join(c.cmdline())), key=lambda c: c.pid)
        except psutil.NoSuchProcess:
            return {}
        return dict(zip(("worker 0", "worker 1", "scheduler"), engine, strict=False))

    def when_saving(self, engine_id: str) -> dict[str, psutil.Process]:
        """Waits until the first rows lie in the region."""
        path = path_of(engine_id)

        def is_saving() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            try:
                return any(path.read_bytes())
            except FileNotFoundError:
                return False

        wait_until(is_saving, "rows in the region")
        return self.children()

    def end(self) -> tuple[int, str, str]:
        """Exit status, stdout, stderr; nobody whom it started is running then."""
        stdout, stderr = self.process.communicate(timeout=LONG)
        _, running = psutil.wait_procs(self._children, timeout=PATIENCE)
        assert running == []
        return self.process.returncode, stdout, stderr

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        psutil.wait_procs(self._children, timeout=PATIENCE)


@pytest.fixture
def demo(nothing_is_left: None) -> Iterator[Callable[..., Demo]]:
    demos: list[Demo] = []

    def start(*arguments: str) -> Demo:
        demos.append(Demo(*arguments))
        return demos[-1]

    yield start
    for each in demos:
        each.close()


def data_of(ended: tuple[int, str, str]) -> dict[str, Any]:
    status, stdout, stderr = ended
    assert stderr == ""
    data = json.loads(stdout)
    assert status == 0, data["verdict"]
    assert data["ok"]
    return data


@pytest.mark.slow
def test_every_row_is_loaded_and_compared_by_every_other_worker(demo: Callable[..., Demo]) -> None:
    data = data_of(demo("--workers", "3", "--json").end())
    assert data["block_size_bytes"] == 7168
    row_counts = [photograph["rows"] for photograph in data["photographs"]]
    assert len(row_counts) > 10
    all_bytes = sum(row_counts) * 7168
    assert data["region_bytes"] == data["num_blocks"] * 7168 < all_bytes

    (engine,) = data["engines"]
    scheduler, saver, *loaders = engine["processes"]
    assert [p["role"] for p in engine["processes"]] == ["scheduler", "worker 0", "worker 1", "worker 2"]
    assert len({p["pid"] for p in engine["processes"]}) == 4
    assert len({p["inode"] for p in engine["processes"]}) == 1
    assert [p["is_creator"] for p in engine["processes"]].count(True) == 1
    assert not scheduler["is_creator"]
    assert all(p["open_seconds"] > 0 for p in engine["processes"])

    assert engine["verified_requests"] == len(row_counts) + engine["cache_hits"]
    assert engine["cache_hits"] > 0
    assert engine["evicted_photographs"] > 0
    assert engine["reused_blocks"] == sum(row_counts) - data["num_blocks"]
    assert saver["saved_bytes"] == all_bytes
    # What is still in the cache at the end is loaded once more, by the saver too.
    assert saver["loaded_bytes"] > 0
    assert [p["loaded_bytes"] for p in loaders] == [all_bytes + saver["loaded_bytes"]] * 2
    assert scheduler["saved_bytes"] == scheduler["loaded_bytes"] == 0
    assert all(p["differing_bytes"] == 0 for p in engine["processes"])
    assert saver["save_gib_per_second"] > 0
    for worker in (saver, *loaders):
        assert worker["is_pinned"] or worker["pin_note"]
    assert data["left"] == data["removed"] == data["problems"] == []


def test_a_folder_of_photographs_and_one_worker_that_reads_back(demo: Callable[..., Demo], tmp_path: Path) -> None:
    """Any mode, any size, turned by its camera; what is no image by its name is passed over."""
    pixels = Image.effect_noise((100, 30), 80)
    pixels.save(tmp_path / "grey.png")
    Image.merge("CMYK", [pixels] * 4).save(tmp_path / "cmyk.tif")
    turned = Image.Exif()
    turned[0x0112] = 6
    pixels.convert("RGB").save(tmp_path / "turned.JPEG", exif=turned)
    Image.new("RGB", (3, 5)).save(tmp_path / "tiny.webp")
    (tmp_path / "notes.txt").write_text("no photograph")
    (tmp_path / "folder.png").mkdir()
    status, stdout, stderr = demo("--images", str(tmp_path), "--workers", "1", "--hidden-size", "33").end()
    assert (status, stderr) == (0, "")
    assert "4 photographs, 43 rows of 66 bytes" in stdout  # 7 x 2 + 7 x 2 + 2 x 7 + 1 x 1
    assert "ok: 4 photographs" in stdout
    assert stdout.endswith("left in /dev/shm: nothing\n")
    (row,) = [line for line in stdout.splitlines() if "worker 0" in line]
    assert "creator" in row


@pytest.mark.slow
def test_a_killed_creator_is_healed_by_the_restart(demo: Callable[..., Demo], engine_id: str) -> None:
    data = data_of(demo(*SMALL, "--kill", "creator", "--engine-id", engine_id, "--json").end())
    killed, healed = data["engines"]
    creators = [[p for p in engine["processes"] if p["is_creator"]] for engine in (killed, healed)]
    (dead,), (fresh,) = creators
    assert killed["killed"] == f"{dead['role']} (pid {dead['pid']})"
    assert {p["ended"] for p in killed["processes"]} == {"was killed by SIGKILL"}
    assert killed["verified_requests"] >= len(data["photographs"]) // 2
    (file,) = killed["left_behind"]
    assert file["path"] == str(path_of(engine_id))
    assert file["size_bytes"] == data["region_bytes"]
    assert file["nonzero_bytes"] > 0

    assert fresh["pid"] != dead["pid"]
    assert {p["ended"] for p in healed["processes"]} == {"by itself"}
    assert [p["nonzero_fresh_bytes"] for p in healed["processes"]] == [0, 0, 0]
    assert healed["verified_requests"] == len(data["photographs"]) + healed["cache_hits"]
    assert healed["left_behind"] == data["left"] == data["removed"] == []


def test_a_wrong_byte_is_noticed(demo: Callable[..., Demo], engine_id: str) -> None:
    running = demo(*SMALL, "--engine-id", engine_id, "--json", "--rounds", "4")
    running.when_saving(engine_id)
    with path_of(engine_id).open("r+b") as file, mmap.mmap(file.fileno(), 0) as vandal:
        scratch = b"\x55" * len(vandal)
        while running.process.poll() is None and path_of(engine_id).exists():
            vandal[:] = scratch
    status, stdout, _ = running.end()
    data = json.loads(stdout)
    assert status == 1
    assert not data["ok"]
    differing = {p["role"]: p["differing_bytes"] for p in data["engines"][0]["processes"]}
    assert differing["worker 1"] > 0
    assert any(f"worker 1 loaded {differing['worker 1']} bytes" in problem for problem in data["problems"])
    assert data["left"] == []


def test_a_file_that_is_left_is_noticed(demo: Callable[..., Demo], engine_id: str) -> None:
    """One that others may read is not a region's file: nobody removes it."""
    running = demo(*SMALL, "--engine-id", engine_id, "--json")
    running.when_saving(engine_id)
    path = path_of(engine_id)

    def put_back() -> None:
        while path.exists():
            time.sleep(0.0005)
        path.write_bytes(b"left")
        path.chmod(0o644)

    thread = threading.Thread(target=put_back)
    thread.start()
    status, stdout, _ = running.end()
    thread.join()
    path.unlink()
    data = json.loads(stdout)
    assert status == 1
    assert data["problems"] == [f"`{path}` is left: 4 bytes"]
    assert data["left"] == [{"path": str(path), "size_bytes": 4, "nonzero_bytes": 4}]


def test_a_file_that_had_to_be_removed_is_a_finding_where_nobody_failed() -> None:
    outcome = Outcome(plan(Photograph("one.png", 1, 1)), removed=[Leftover("/dev/shm/name", 4, 0)])
    assert (outcome.exit_code, len(outcome.problems)) == (1, 1)
    outcome.error = DemoError("a worker was killed")
    assert (outcome.exit_code, outcome.problems) == (3, [])


@pytest.mark.parametrize(
    ("whom", "number", "status", "said"),
    [
        ("worker 0", signal.SIGKILL, 3, "worker 0 (pid {pid}) was killed by SIGKILL"),
        ("worker 1", signal.SIGKILL, 3, "worker 1 (pid {pid}) was killed by SIGKILL"),
        ("scheduler", signal.SIGKILL, 3, "scheduler (pid {pid}) was killed by SIGKILL"),
        ("supervisor", signal.SIGKILL, -signal.SIGKILL, ""),
        ("everybody", signal.SIGINT, 130, "stopped by SIGINT; left in /dev/shm: nothing"),
        ("everybody", signal.SIGTERM, 143, "stopped by SIGTERM; left in /dev/shm: nothing"),
    ],
    ids=["worker 0", "worker 1", "scheduler", "supervisor", "Ctrl-C", "SIGTERM"],
)
def test_nothing_outlives_a_killed_process(
    demo: Callable[..., Demo], engine_id: str, whom: str, number: int, status: int, said: str
) -> None:
    """In the middle of the copies. `Demo.end` and the fixtures see to it that no process and no file is left."""
    running = demo(*SMALL, "--engine-id", engine_id, "--rounds", "1000")
    children = running.when_saving(engine_id)
    assert set(children) == {"worker 0", "worker 1", "scheduler"}
    pid = children[whom].pid if whom in children else running.process.pid
    if whom == "everybody":
        os.killpg(pid, number)
    else:
        os.kill(pid, number)
    ended = running.end()
    assert (ended[0], ended[1]) == (status, "")
    assert said.format(pid=pid) in ended[2]
    assert not path_of(engine_id).exists()


def test_ctrl_c_while_the_processes_are_starting(demo: Callable[..., Demo], engine_id: str) -> None:
    running = demo(*SMALL, "--engine-id", engine_id)
    wait_until(running.children, "the first process of the engine")
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.end() == (130, "", "stopped by SIGINT; left in /dev/shm: nothing\n")


def test_too_little_space_is_told_and_nothing_is_left(small_shm: Callable[..., Any], tmp_path: Path) -> None:
    shm = small_shm("size=1m")
    command = [sys.executable, "-m", "ec_shared_region", "demo", "--workers", "2"]
    status, stdout, stderr = shm.spawn(None).run(
        "d = subprocess.run(command, capture_output=True, text=True); (d.returncode, d.stdout, d.stderr)",
        command=command,
        timeout=LONG,
    )
    assert (status, stdout) == (3, "")
    assert "NoSpaceError: not enough space" in stderr
    assert "\nhint: " in stderr
    assert "Traceback" not in stderr
    assert shm.names() == []


def test_a_live_region_is_not_touched(
    demo: Callable[..., Demo], open_region: Callable[..., Any], engine_id: str
) -> None:
    region = open_region(engine_id, 4, 64)
    memoryview(region).cast("B")[:] = b"\x07" * 256
    status, stdout, stderr = demo(*SMALL, "--engine-id", engine_id).end()
    assert (status, stdout) == (3, "")
    assert f"a live region bears the engine id `{engine_id}`" in stderr
    assert bytes(memoryview(region).cast("B")) == b"\x07" * 256
    assert path_of(engine_id).exists()


def plan(*photographs: Photograph, timeout_seconds: float = 0.05) -> Plan:
    return Plan("unused", 8, 8, 4, 0, 1, 1, photographs, timeout_seconds)


def test_a_worker_that_does_not_answer_is_named() -> None:
    (supervisor, _supervisor), (worker, _worker) = Pipe(), Pipe()
    with supervisor, _supervisor, worker, _worker:
        scheduler = _Scheduler(plan(Photograph("one.png", 1, 1)), supervisor, [worker])
        with pytest.raises(DemoError, match=r"worker 0 did not save `one\.png` within 0\.05 s"):
            scheduler._order([worker], JobKind.SAVE, 0, (3,))


def test_blocks_are_given_out_once_and_lie_scattered_after_reuse() -> None:
    pool = BlockPool(100, seed=0)
    held: dict[int, tuple[int, ...]] = {}
    for photograph in range(50):
        rows = 7 + photograph % 30
        block_ids = pool.allocate(photograph, rows)
        assert len(set(block_ids)) == rows
        held = {key: ids for key, ids in held.items() if key in pool.cached}
        assert not set(block_ids) & {block_id for ids in held.values() for block_id in ids}
        held[photograph] = block_ids
        assert {key: pool.lookup(key) for key in pool.cached} == held
        assert list(pool.cached) == sorted(pool.cached)
    assert pool.reused_blocks == sum(7 + photograph % 30 for photograph in range(50)) - 100
    assert sorted(block_ids) != list(range(min(block_ids), min(block_ids) + rows))
    assert list(block_ids) != sorted(block_ids)


def test_the_patch_embedding_is_exact(tmp_path: Path) -> None:
    """float32 sums equal a convolution in float64, which cannot round, so no process can differ from another."""
    path = tmp_path / "noise.png"
    Image.merge("RGB", [Image.effect_noise((60, 45), 200) for _ in range(3)]).save(path)
    (photograph,) = photos.survey([path], 1000, lambda done, total: None)
    assert (photograph.grid_rows, photograph.grid_columns) == (3, 4)
    encoder = PatchEmbedding(hidden_size=40, seed=7, grid_side=4)
    kernel = encoder.weight.view(40, PATCH_PIXELS, PATCH_PIXELS, 3).permute(0, 3, 1, 2).double()
    height, width = 3 * PATCH_PIXELS, 4 * PATCH_PIXELS
    image = torch.frombuffer(photos.pixels(photograph), dtype=torch.uint8).view(height, width, 3)
    sums = torch.nn.functional.conv2d(image.permute(2, 0, 1).double() - 128, kernel, stride=PATCH_PIXELS)
    expected = sums.permute(1, 2, 0).float() * encoder.scale
    expected = expected + encoder.row_positions[:3, None] + encoder.column_positions[None, :4]
    outputs = encoder.encode(photograph)
    assert outputs.dtype is torch.bfloat16
    assert torch.equal(outputs, expected.reshape(12, 40).to(torch.bfloat16))
    assert 0.1 < outputs.float().std() < 10
    assert torch.equal(PatchEmbedding(40, 7, 4).encode(photograph), outputs)
    assert not torch.equal(PatchEmbedding(40, 8, 4).encode(photograph), outputs)


@pytest.mark.parametrize("size", [(1, 1), (14, 14), (1411, 1411), (1, 100_000), (100_000, 3), (8000, 6000), (451, 300)])
@pytest.mark.parametrize("max_patches", [1, 2, 50, 4096])
def test_a_grid_keeps_within_its_limit(size: tuple[int, int], max_patches: int) -> None:
    rows, columns = photos.patch_grid(*size, max_patches)
    assert rows >= 1
    assert columns >= 1
    assert rows * columns <= max_patches
    width, height = size
    if width * height >= 14 * 14 * max_patches and max_patches == 4096:
        assert rows * columns > 0.5 * max_patches  # made smaller, not thrown away


@pytest.mark.slow
def test_two_demos_of_one_id_that_start_together(new_id: Callable[[], str]) -> None:
    """One has the region; the other says whose it is, leaves it alone, and blames no leftover."""
    engine_id = new_id()
    demos = [Demo(*SMALL, "--engine-id", engine_id, "--json") for _ in range(2)]
    ends = sorted((demo.end() for demo in demos), key=lambda end: end[0])
    assert ends[0][0] == 0, ends
    # The second may have come when the first was through; else it could not do its work.
    assert ends[1][0] in {0, 3}, ends
    found = json.loads(ends[1][1])
    assert (found["problems"], found["left"]) == ([], [])
    assert not path_of(engine_id).exists()


@pytest.mark.parametrize("is_live", [True, False])
def test_another_engines_file_is_no_leftover(
    is_live: bool, new_id: Callable[[], str], open_region: Callable[..., Any], litter: Callable[[Path], Path]
) -> None:
    engine_id = new_id()
    if is_live:
        open_region(engine_id, 4, 64)
    else:
        litter(path_of(engine_id)).touch(0o600)
    assert leftovers.reclaim(engine_id) is is_live
    assert path_of(engine_id).exists() is is_live


def test_one_is_singular() -> None:
    assert (report._photographs(1), report._photographs(2000)) == ("1 photograph", "2,000 photographs")
