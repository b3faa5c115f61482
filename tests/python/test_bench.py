"""The table of `make bench`: its arithmetic, its JSON, its verdict. No time is asserted."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import procs
from table import family, measure, rows, text
from table.figures import LIMIT, OURS, SCHEMA, STOCK, Contest, Growth, Peers, Point, Row, Run, Spread, quantile

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"cores": 2, "processor": "a processor", "memory_gib": 24.0, "kernel": "6.18", "shm": "a tmpfs"}


def table(*options: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "table", *options],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'benches'}:{ROOT / 'tests' / 'python'}"},
        capture_output=True,
        text=True,
        timeout=150,
        check=check,
    )


def row(ours: list[float], floor: float | None = 2.0, **more: Any) -> Row:
    contest = Contest(seconds={STOCK: [4.0, 8.0, 6.0], OURS: ours, LIMIT: [1.0, 1.0, 1.0]})
    return Row("P2", "1 core", "create", 1 << 30, floor, "3x", "zeroing", contest, **more)


def run(*measured: Row) -> Run:
    peers = Peers("import", None, Contest({STOCK: [3.0], OURS: [0.1]}, absent={"iceoryx2": "`iceoryx2` is missing"}))
    growth = Growth("size", "create", "MiB", "s/GiB", [Point(at, Contest({OURS: [1 / at]})) for at in (1, 2, 4)])
    return Run(dict(MACHINE), {"rounds": 3, "quick": False}, list(measured), [peers], [growth])


def written(tmp_path: Path, figures: Run) -> Path:
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps(figures.as_data(), allow_nan=False))
    return path


def test_a_ratio_pairs_the_times_of_a_round() -> None:
    # The medians of each side are 6 and 2; their quotient is no round's ratio.
    assert row([1.0, 4.0, 2.0]).ratio == Spread(2.0, 3.0, 4.0)
    assert row([2.0, 2.0, 2.0]).share_of_limit == 0.5


def test_a_side_that_was_measured_once_is_compared_with_every_round() -> None:
    contest = Contest({STOCK: [30.0], OURS: [0.01, 0.02, 0.03]})
    ratio = contest.ratio()
    assert (ratio.min, ratio.median, ratio.max) == pytest.approx((1000.0, 1500.0, 3000.0))


def test_nothing_measured_is_no_number() -> None:
    assert math.isnan(Spread.of([]).median) and math.isnan(quantile([], 0.99))
    empty = Row("P3", "", "create", None, 4.0, "5x", not_measured="no such mount")
    assert math.isnan(empty.ratio.median) and math.isnan(empty.share_of_limit)
    assert not empty.is_under_floor


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100), (0.0, 1)])
def test_a_quantile_is_one_of_the_values(share: float, value: int) -> None:
    assert quantile(range(100, 0, -1), share) == value


@pytest.mark.parametrize(
    ("ours", "under"), [([3.0, 3.0, 3.1], True), ([2.0, 4.0, 3.0], False), ([], True), ([2.0, 2.0, 2.0], False)]
)
def test_the_floor_is_for_the_median(ours: list[float], under: bool) -> None:
    assert row(ours).is_under_floor is under
    assert not row(ours, floor=None).is_under_floor


def test_growth_compares_the_ends() -> None:
    growth = run().growth[0]
    assert growth.growth() == 0.25
    assert math.isnan(growth.growth(STOCK))


def test_json_holds_all_and_comes_back() -> None:
    figures = run(row([1.0, 4.0, 2.0], notes=["in huge pages"]), row([], not_measured="not in this build"))
    data = json.loads(json.dumps(figures.as_data(), allow_nan=False))
    assert data["schema"] == SCHEMA
    assert data["rows"][0]["ratio"] == {"min": 2.0, "median": 3.0, "max": 4.0}
    assert data["rows"][0]["contest"]["seconds"][OURS] == [1.0, 4.0, 2.0]
    assert data["rows"][1]["ratio"]["median"] is None
    assert data["growth"][0]["last_over_first"] == {STOCK: None, OURS: 0.25}
    again = Run.from_data(data)
    assert again == figures


def test_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="schema 0"):
        Run.from_data({**run().as_data(), "schema": 0})


def test_the_text_says_everything() -> None:
    shown = text.of_run(run(row([1.0, 4.0, 2.0]), row([3.0, 3.0, 3.1]), row([], not_measured="no such mount")))
    lines = [line for line in shown.splitlines() if line.startswith("| P2")]
    assert len({len(line) for line in lines}) == 1
    assert "3.00x" in lines[0] and "2.00x - 4.00x" in lines[0] and "50% of zeroing" in lines[0]
    assert "missed" in lines[1] and "missed" not in lines[0]
    assert "not measured" in lines[2] and "not measured: no such mount" in shown
    assert "iceoryx2: `iceoryx2` is missing" in shown and "0.25x" in shown


def test_a_document_takes_the_tables_between_its_marks(tmp_path: Path) -> None:
    begin, end = text.MARKS
    page = f"above\n{begin}\nold\n{end}\nbelow\n"
    once = text.into(page, "new\n")
    assert once == f"above\n{begin}\n\nnew\n\n{end}\nbelow\n" and text.into(once, "new\n") == once
    with pytest.raises(ValueError, match="it has no"):
        text.into("no marks", "new")
    document = tmp_path / "page.md"
    document.write_text(page)
    source = written(tmp_path, run(row([1.0, 4.0, 2.0])))
    assert table("--from", str(source), f"--png={tmp_path / 't.png'}", f"--readme={document}").returncode == 0
    assert "50% of zeroing" in document.read_text() and "old" not in document.read_text()


@pytest.mark.parametrize(
    ("seconds", "shown"), [(3.2, "3.20 s"), (0.0456, "45.6 ms"), (789e-6, "789 us"), (math.nan, "-"), (1e-7, "0.10 us")]
)
def test_durations_have_a_fitting_unit(seconds: float, shown: str) -> None:
    assert text.duration(seconds) == shown


def test_check_is_a_matter_of_floors(tmp_path: Path) -> None:
    good, bad = row([1.0, 4.0, 2.0]), row([3.0, 3.0, 3.1])
    absent = row([], not_measured="no such mount")
    picture = f"--png={tmp_path / 'table.png'}"
    for figures, status in ((run(good, absent), 0), (run(good, bad), 1)):
        source = written(tmp_path, figures)
        assert table("--from", str(source), picture).returncode == 0
        done = table("--from", str(source), "--check", picture)
        assert done.returncode == status, done.stderr
        assert ("under its floor: P2 1 core: 1.94x" in done.stderr) == bool(status)
    failed = run(row([], not_measured="failed: it broke", failed=True))
    assert table("--from", str(written(tmp_path, failed)), picture).returncode == 1


def test_what_is_asked_wrongly_is_explained(tmp_path: Path) -> None:
    done = table("--rows", "P2,P99")
    assert done.returncode == 2 and "p99" in done.stderr and "P6b" in done.stderr
    path = tmp_path / "other.json"
    path.write_text("{}")
    done = table("--from", str(path))
    assert done.returncode == 1 and "holds no figures" in done.stderr
    assert "Examples:" in table("--help", check=True).stdout


class _Watch:
    """A watch whose findings are given."""

    def __init__(self, findings: list[str | None]) -> None:
        self._findings = findings

    def begin(self) -> None:
        pass

    def disturbance(self) -> str | None:
        return self._findings.pop(0)


def _rounds(count: int, repeats: int, findings: list[str | None], left: int = 9) -> tuple[measure.Rounds, list[int]]:
    told: list[int] = []
    watch: Any = _Watch(findings)
    return measure.Rounds(count, left, repeats, watch, lambda number, _: told.append(number)), told


def test_rounds_take_turns_and_repeat_what_was_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "QUIET_PAUSE_SECONDS", 0.0)
    order: list[str] = []

    def side(name: str) -> measure.Side:
        def sample() -> family.Sample:
            order.append(name)
            return family.Sample(float(len(order)))

        return sample

    rounds, told = _rounds(2, 1, [None, "busy", "busy"])
    contest = rounds.play({STOCK: side(STOCK), OURS: side(OURS)})
    assert order == [STOCK, OURS, OURS, STOCK, STOCK, OURS]
    # The second round was thrown away once; the third counts although it was disturbed too.
    assert contest.seconds == {STOCK: [1.0, 5.0], OURS: [2.0, 6.0]}
    assert (contest.repeated, contest.disturbed, told) == (1, 1, [1, 2, 2])
    # A run has a number of repetitions too.
    rounds, told = _rounds(1, 5, ["busy", "busy"], left=1)
    contest = rounds.play({OURS: side(OURS)})
    assert (contest.repeated, contest.disturbed, told, rounds.repeats_left) == (1, 1, [1, 1], 0)


def test_a_peer_that_is_missing_is_left_out_and_the_stock_way_is_not() -> None:
    def missing() -> family.Sample:
        raise family.NotMeasured("not installed")

    def there() -> family.Sample:
        return family.Sample(1.0)

    rounds, _ = _rounds(2, 0, [None, None])
    contest = rounds.play({STOCK: there, OURS: there, "peer": missing})
    assert contest.absent == {"peer": "not installed"} and "peer" not in contest.seconds
    with pytest.raises(family.NotMeasured):
        rounds.play({STOCK: missing, OURS: there})


def test_a_sample_whose_process_dies_is_a_failure_and_leaves_nobody() -> None:
    def dies(_: family.Meet) -> family.Sample:
        os._exit(1)

    def waits(meet: family.Meet) -> family.Sample:
        meet()
        return family.Sample(0.0)

    def raises(_: family.Meet) -> family.Sample:
        raise RuntimeError("it broke")

    with pytest.raises(family.SampleFailed, match="died"):
        family.run(dies)
    # The one that waits for the other is told.
    with pytest.raises(family.SampleFailed, match="it broke"):
        family.run_together([waits, raises])
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_rows_have_names_of_their_own_and_cover_every_target() -> None:
    names = [plan.name for plan in rows.PLANS]
    assert len(names) == len(set(names))
    assert [*dict.fromkeys(plan.key for plan in rows.PLANS)] == [
        *["P1", "P2", "P3", "P4", "P5", "P6", "P6b", "P7", "P8", "P9", "P10", "P11", "P12"]
    ]


@pytest.mark.slow
def test_a_quick_run_of_two_rows(tmp_path: Path) -> None:
    figures, picture = tmp_path / "table.json", tmp_path / "table.png"
    before = set(os.listdir("/dev/shm"))
    done = table("--quick", "--rows=p1,P10", f"--json={figures}", f"--png={picture}")
    assert done.returncode == 0, done.stderr
    measured = Run.from_data(json.loads(figures.read_text()))
    assert [each.key for each in measured.rows] == ["P1", "P10"]
    for each in measured.rows:
        assert each.not_measured is None and each.ratio.median > 0
        assert len(each.contest.seconds[OURS]) == len(each.contest.seconds[STOCK]) == measured.settings["rounds"]
    assert "| P10 |" in done.stdout and "P10" in done.stderr
    assert set(os.listdir("/dev/shm")) == before


@pytest.mark.slow
def test_ctrl_c_shows_what_there_is_and_leaves_nothing() -> None:
    import signal

    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "table", "--rows=P10,P1", "--rounds=50"],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'benches'}:{ROOT / 'tests' / 'python'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "P1" in line, line
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in stderr
    assert set(os.listdir("/dev/shm")) == before
    # The kernel ends those of the samples when their parent is gone.
    procs.wait_until(lambda: not _has_members(process.pid), "every process of the bench has ended")


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
