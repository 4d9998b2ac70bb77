"""Traces of a few steps of rank 0, their summary, and that a run continues without them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from tests.processes import made_once, run_on_ranks
from tests.training.monitoring.small_training import train_on_ranks
from training.config import TrainConfig
from training.distributed.ranks import Ranks
from training.monitoring.events import RunStarted
from training.monitoring.phases import Phases
from training.monitoring.profiler import Profiler, RankProfile, communication, merge_intervals, overlap, read_summary

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}
ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory, base_flags: tuple[str, ...]) -> Path:
    """The run folder of two ranks, profiled in three steps of 16."""

    def train(folder: Path) -> None:
        flags = [*base_flags, "--batch_size", "4", "--output_dir", str(folder / "model")]
        run_on_ranks(2, train_on_ranks, [*flags, "--profile", "3"])

    return made_once(tmp_path_factory, "profiled", train) / "model.run"


def _trace(run_dir: Path, profile: RankProfile) -> list[dict[str, Any]]:
    with gzip.open(run_dir / "profile" / profile.trace, "rt") as file:
        return json.load(file)["traceEvents"]


def test_rank_0_leaves_a_trace_of_the_steps_after_the_first_ten(profiled: Path) -> None:
    names = {path.name for path in (profiled / "profile").iterdir()}

    assert names == {"rank_0_step_11_13.json.gz", "summary.json"}


def test_a_trace_shows_operators_collectives_and_the_phases_of_each_step(profiled: Path) -> None:
    for profile in read_summary(profiled):
        names = [event["name"] for event in _trace(profiled, profile) if event.get("ph") == "X"]
        assert names.count("phase/data") == names.count("phase/backward") == names.count("phase/step") == 3
        assert names.count("aten::addmm") > 0
        assert names.count("gloo:all_reduce") >= 3


def test_the_summary_has_the_time_by_phase(profiled: Path) -> None:
    profiles = read_summary(profiled)

    assert [profile.rank for profile in profiles] == [0]
    for profile in profiles:
        assert (profile.first_step, profile.last_step) == (11, 13)
        assert sum(profile.phases.values()) == pytest.approx(1)
        assert {"data", "forward", "backward", "optimizer"} <= profile.phases.keys()
        assert all(0 < share <= 1 for share in profile.phases.values())
        assert 0 < profile.communication < profile.seconds
        assert 0 <= profile.hidden <= 1
        shares = [operator.share for operator in profile.operators]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 1
        assert PRODUCTS & {operator.name for operator in profile.operators[:5]}


def test_the_calls_of_an_operator_are_those_of_the_trace(profiled: Path) -> None:
    profile = read_summary(profiled)[0]
    names = [event["name"] for event in _trace(profiled, profile) if event.get("cat") == "cpu_op"]
    products = [operator for operator in profile.operators if operator.name in PRODUCTS]

    assert products
    assert all(product.calls == names.count(product.name) for product in products)


def test_the_report_shows_both_tables(profiled: Path) -> None:
    page = (profiled / "report.html").read_text()

    assert "Profile of steps 11 to 13" in page
    assert "rank_0_step_11_13.json.gz" in page
    assert f"<td>{read_summary(profiled)[0].operators[0].name}</td>" in page


@pytest.mark.slow
def test_a_profile_that_cannot_be_written_prints_one_line_and_does_not_end_the_run(
    train_here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.run").mkdir()
    (tmp_path / "model.run" / "profile").write_text("in the way")
    flags = ("--batch_size", 8, "--epochs", 1, "--profile", 2, "--output_dir", tmp_path / "model")

    assert train_here(*flags) == 0
    [line] = [line for line in capfd.readouterr().out.splitlines() if "no profile" in line]
    assert line.startswith("rank 0: no profile ([Errno 17] File exists")
    assert line.endswith("; the run continues")
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, range(11, 16)),
        (100, range(111, 116)),
        (990, range(996, 1001)),  # no ten steps are left before them
    ],
)
def test_the_steps_that_are_recorded(step: int, expected: range) -> None:
    profiler = Profiler(TrainConfig(profile=5), ALONE, Phases(), None)
    profiler.receive(RunStarted(step, 1000, []))

    assert profiler.steps == expected


def test_overlap_of_intervals() -> None:
    talks = merge_intervals([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0)])
    works = merge_intervals([(2.5, 6.0), (6.5, 6.75), (9.0, 10.0)])

    assert talks == [(0.0, 4.0), (5.0, 7.0)]
    assert overlap(talks, works) == overlap(works, talks) == 1.5 + 1.0 + 0.25
    assert overlap(talks, []) == 0


def test_an_operator_that_waits_for_a_collective_does_not_count_as_computing() -> None:
    def event(name: str, start: float, end: float, children: tuple = (), *, marked: bool = False) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(
            name=name, time_range=span, cpu_children=children, is_user_annotation=marked, device_type=DeviceType.CPU
        )

    detail = event("aten::resolve_conj", 2e6, 3e6)
    product = event("aten::mm", 1e6, 6e6, (detail,))
    ask = event("c10d::allreduce_", 8e6, 9e6)
    node = event("MmBackward0", 0.0, 9e6, (product, ask))
    sent = event("gloo:all_reduce", 0.0, 10e6, marked=True)

    found = communication([node, product, detail, ask, sent], on_gpu=False)

    assert found == {"communication": 10.0, "hidden": 0.5}
