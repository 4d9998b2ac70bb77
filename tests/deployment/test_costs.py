"""What a billion texts cost: the arithmetic, where its figures come from, and that none passes for a measured one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from huggingface_hub import JobHardware

from deployment import costs
from deployment.costs import Rate, simulate
from deployment.prices import HUB_FLAVORS, Machine
from tests.deployment.documented import REPOSITORY, documented
from tests.docs.pages import shown_after


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deployment.costs", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def test_hours_and_dollars_are_those_of_all_cores_of_all_machines() -> None:
    rate = Rate("model", texts_per_second=200.0, cores=2, source="")
    machine = Machine("mine", cores=10, gpus="", dollars_per_hour=3.0)

    assert simulate(rate, machine, texts=3_600_000) == (1000.0, 1.0, 3.0)
    assert simulate(rate, machine, texts=3_600_000, machines=4) == (4000.0, 0.25, 3.0)


def test_the_rates_are_medians_of_measured_rounds_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = REPOSITORY / "benchmarks" / "serving.json"
    (tmp_path / "serving.json").symlink_to(page)
    monkeypatch.setattr(costs, "BENCHMARKS", tmp_path)

    for rate, section in zip(costs.measured_rates(), json.loads(page.read_text()).values(), strict=True):
        rounds = [each["ours"]["64 clients"]["texts_per_second"] for each in section["rounds"]]
        assert (rate.texts_per_second, rate.cores) == (median(rounds), 2)
        assert section["facts"]["Measured"] in rate.source


def test_the_rates_of_bulk_scoring_are_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [
        {"engine": {"rows_per_second": 900.0}, "scoring": {"rows_per_second": rate}} for rate in (700.0, 800.0, 750.0)
    ]
    facts = {"Measured": "2026-11-23", "Machine": "Xeon, 4 cores; no GPU"}
    case = {"model": "minilm", "engine": "native int8 (native is the fastest)", "rounds": rounds}
    run = {"speed": {"facts": facts, "threads": 4, "cases": [case]}}
    (tmp_path / "bulk_scoring.json").write_text(json.dumps(run))
    monkeypatch.setattr(costs, "BENCHMARKS", tmp_path)

    [rate] = costs.measured_rates()

    assert (rate.texts_per_second, rate.cores) == (750.0, 4)
    assert rate.what == "minilm, native int8, texts of ag_news, from Parquet to Parquet"
    assert rate.source == "benchmarks/bulk_scoring.md, 2026-11-23, Xeon"


def test_every_computed_column_and_every_page_of_prices_is_named() -> None:
    printed = _run("--texts", "1e6").stdout

    header = next(line for line in printed.splitlines() if "machine" in line and "$/hour" in line)
    assert header.count("(simulated)") == 3
    assert "What is marked as simulated was not measured but computed" in printed
    assert "https://huggingface.co/docs/hub/jobs-pricing, 2026-08-22" in printed


def test_the_documented_command_prints_the_lines_that_are_shown() -> None:
    command = documented("docs/deployment.md", "costs")
    ended = subprocess.run(
        command.replace("python", sys.executable, 1), shell=True, cwd=REPOSITORY, capture_output=True, text=True
    )

    shown = [line for line in shown_after("docs/deployment.md", command).splitlines() if line != "…"]
    assert len(shown) == 3
    assert [line for line in ended.stdout.splitlines() if line in shown][:3] == shown


def test_a_rate_and_a_price_of_ones_own_take_the_place_of_ours() -> None:
    printed = _run(*documented("docs/deployment.md", "costs-own").split()[3:]).stdout

    assert "your rate: 1,800 texts/s measured on 16 cores" in printed
    # 1,800 / 16 x 64 x 8 = 57,600 texts per second: 4.8 hours at 8 x 2.50 dollars
    assert re.search(r"mine +64 +2\.50 +57,600 +4\.8 +96\.45$", printed, re.MULTILINE)
    assert "cpu-upgrade" not in printed
    assert "jobs-pricing" not in printed


def test_the_hubs_machines_have_the_names_that_its_library_knows() -> None:
    assert HUB_FLAVORS.keys() <= {flavor.value for flavor in JobHardware}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--texts", "1.5"), "1.5: must be a whole number, such as 1e9"),
        (("--texts", "0"), "0: must be a number greater than 0"),
        (("--cores", "2"), "--texts_per_second and --cores: a rate needs both"),
        (("--hire", "mine:64"), "mine:64: must be NAME:CORES:DOLLARS, such as mine:64:2.5"),
        (("--hire", "mine:64:free"), "free: must be a number greater than 0"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: tuple[str, ...], line: str) -> None:
    ended = _run(*arguments)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert line in ended.stderr
    assert ended.stderr.count("\n") == 1
