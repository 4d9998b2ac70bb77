"""Jobs on the hub's paid machines: the real command and the real client library, against a stand-in for the hub."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deployment.documented import documented
from tests.deployment.hub_contents import Hub
from tests.deployment.publishing import error_line, run_against, run_page
from tests.deployment.stand_in_hub import READER, running_hub

START = ("deployment/hub_jobs.py", "--model", "alice/news", "--image", "registry.example.org/distrinews-torch:0.1.0")
ONE = ("hf://datasets/alice/rows@v2/data/train.parquet", "hf://buckets/alice/scored/train.parquet")
TWO = ("hf://datasets/alice/rows/a.csv", "hf://buckets/alice/rows/b.csv", "hf://buckets/alice/scored/today")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub(Hub()) as hub:
        yield hub


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> Run:
    """`run(*arguments)`: the command, with a hub that answers."""
    return lambda *arguments, **settings: run_against(hub.address, tmp_path, *START, *arguments, **settings)


def test_the_documented_command_says_machine_and_price_and_starts_nothing(hub: Hub, tmp_path: Path) -> None:
    said = run_page(documented("docs/deployment.md", "hub-jobs"), hub.address, tmp_path, tmp_path, token=None)

    assert said.returncode == 0, said.stderr
    assert "on cpu-upgrade (8 virtual cores)" in said.stdout
    assert "Price: $0.03 per hour and Job (https://huggingface.co/docs/hub/jobs-pricing, 2026-08-22)." in said.stdout
    assert said.stdout.endswith("Nothing was started. The same command with --yes starts it.\n")
    assert hub.asked == []


def test_a_job_runs_the_scorer_on_what_it_mounts_without_the_token(run: Run, hub: Hub) -> None:
    said = run(*ONE, "--timeout", "2h", "--text_column", "title", "--yes")

    assert said.returncode == 0, said.stderr
    [job] = hub.jobs
    command = "python -m inference.score /in/data/train.parquet /out/train.parquet --model /model --text_column title"
    assert job["command"] == command.split()
    assert said.stdout.startswith(f"{command}\n")
    assert (job["account"], job["flavor"], job["timeoutSeconds"]) == ("alice", "cpu-upgrade", 7200)
    assert job["dockerImage"] == "registry.example.org/distrinews-torch:0.1.0"
    assert job["volumes"] == [
        {"type": "dataset", "source": "alice/rows", "mountPath": "/in", "revision": "v2", "readOnly": True},
        {"type": "bucket", "source": "alice/scored", "mountPath": "/out"},
        {"type": "model", "source": "alice/news", "mountPath": "/model"},
    ]
    assert "secrets" not in job
    assert job["environment"] == {}
    assert f"Started {hub.address}/jobs/alice/job0\n" in said.stdout


def test_each_input_is_a_job_of_its_own_and_all_are_in_the_price(run: Run, hub: Hub) -> None:
    said = run(*TWO, "--timeout", "90m", "--flavor", "cpu-xl", "--namespace", "alice", "--yes")

    assert said.returncode == 0, said.stderr
    assert "At most $3.00: after 1 h 30 min the hub ends what still runs" in said.stdout
    assert [job["command"][3:5] for job in hub.jobs] == [
        ["/in/a.csv", "/out/today/a.csv"],
        ["/in/b.csv", "/out/today/b.csv"],
    ]
    assert said.stdout.count("Started ") == 2


def test_the_most_that_a_short_job_can_cost_is_rounded_up(run: Run) -> None:
    assert "At most $0.01: after 5 min" in run(*ONE, "--flavor", "cpu-basic", "--timeout", "5m").stdout


def test_a_price_above_the_one_that_was_said_starts_nothing_until_it_is_agreed_to(run: Run, hub: Hub) -> None:
    hub.prices["cpu-upgrade"] = 1000

    assert error_line(run(*ONE, "--yes")).endswith(
        "the hub now asks $0.06 per hour, more than $0.03; if you agree, add --dollars_per_hour 0.06 [hub-jobs-price]"
    )
    assert hub.jobs == []

    agreed = run(*ONE, "--yes", "--dollars_per_hour", "0.06")
    assert agreed.returncode == 0, agreed.stderr
    assert "Price: $0.06 per hour and Job (--dollars_per_hour)." in agreed.stdout
    assert len(hub.jobs) == 1


def test_a_machine_that_the_hub_no_longer_has_is_refused(run: Run, hub: Hub) -> None:
    assert "--flavor h200: the hub does not offer it now; it has cpu-basic" in error_line(
        run(*ONE, "--flavor", "h200", "--yes")
    )
    assert hub.jobs == []


def test_an_account_without_credit_is_told_where_to_add_some(run: Run, hub: Hub) -> None:
    hub.has_plan = False
    assert "add to it at https://huggingface.co/settings/billing" in error_line(run(*ONE, "--yes"))


def test_a_token_that_may_not_start_jobs_is_refused(run: Run, hub: Hub) -> None:
    line = error_line(run(*ONE, "--yes", HF_TOKEN=READER))
    assert "the token may not start Jobs for this account" in line
    assert line.endswith("[hub-jobs-failed]")


def test_a_broken_connection_starts_no_job_twice_and_says_how_to_look(run: Run, hub: Hub) -> None:
    hub.breaks_after = 1

    line = error_line(run(*TWO, "--yes"))

    assert "check with hf jobs ps whether it has started before you start it again" in line
    assert len(hub.jobs) == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((ONE[0],), "IN and OUT: two addresses are needed"),
        (("rows.csv", ONE[1]), "rows.csv: not an address of the hub"),
        ((ONE[0], "hf://datasets/alice/scored/a.csv"), "a Job can only write to a bucket"),
        ((TWO[0], "hf://buckets/bob/rows/a.csv", TWO[2]), "a.csv: two inputs have this name"),
        ((*ONE, "--flavor", "h100"), "invalid choice: 'h100'"),
        ((*ONE, "--timeout", "0m"), "must be minutes, hours or days, such as 90m, 2h or 1d"),
        ((*ONE, "--dollars_per_hour", "-1"), "must be a number greater than 0"),
    ],
)
def test_a_wrong_argument_is_one_line(run: Run, hub: Hub, arguments: tuple[str, ...], line: str) -> None:
    assert line in error_line(run(*arguments, "--yes"))
    assert hub.asked == []
