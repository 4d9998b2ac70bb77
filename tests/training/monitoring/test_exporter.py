"""Each rank exports its metrics for Prometheus, or reports in one line why it cannot."""

import json
import math
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.errors import UserError
from tests.inference.servers import free_port
from tests.training.parallelism.cases import ALONE
from training.config import TrainConfig
from training.monitoring import EpochMetrics, Exporter
from training.monitoring.events import RunStarted
from training.monitoring.phases import Phases

Scrape = dict[str, float]


def _scrape(port: int) -> Scrape:
    """Values of a rank's page by name and label, buckets left out; nothing while it does not listen."""
    with suppress(URLError), urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        families = text_string_to_metric_families(page.read().decode())
        samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
        names = [" ".join([sample.name, *sample.labels.values()]) for sample in samples]
        values = (sample.value for sample in samples)
        return dict(zip((name.removeprefix("distrinews_training_") for name in names), values, strict=True))
    return {}


def _two_free_ports() -> int:
    """The first of two neighbouring ports that nobody listens on."""
    while True:
        port = free_port()
        with suppress(OSError), _taken(port + 1):
            return port


@contextmanager
def _taken(port: int) -> Iterator[None]:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", port))
        holder.listen()
        yield


def test_two_ranks_show_their_steps_and_shares_while_they_train(launch: Callable[..., Any], tmp_path: Path) -> None:
    port = _two_free_ports()
    flags = ("--epochs", 500, "--batch_size", 4, "--output_dir", tmp_path / "model", "--metrics_port", port)
    run = launch(2, *flags, wait=False)

    # An epoch has 8 steps of 8 rows, but for the last one, which has a single row.
    run.wait_until(lambda: all(_scrape(each).get("slowness forward", 0) >= 1 for each in (port, port + 1)))
    first, second = _scrape(port), _scrape(port + 1)
    run.wait_until(lambda: _scrape(port)["steps_total"] > first["steps_total"])

    for page in (first, second):
        assert page["steps_total"] >= 16
        assert page["step_seconds_count"] == pytest.approx(page["steps_total"], abs=1)
        assert page["total_steps"] == 500 * 8
        assert page["world_size"] == 2
        assert page["epoch"] >= 2
        assert 0 < page["loss"] < 2
        assert page["grad_norm"] > 0
        assert page["learning_rate"] > 0
        assert page["validation_loss"] > 0
        assert 0 <= page["validation_accuracy"] <= 1
        assert page["skipped_steps_total"] == 0
        assert page["last_step_timestamp_seconds"] >= page["last_checkpoint_timestamp_seconds"] - 1
        assert page["process_resident_memory_bytes"] > 0
        assert page["restarts"] == page["straggler forward"] == page["bad_steps_total"] == 0
        assert page["slowness forward"] >= 1
        assert page["replica_checks_total equal"] >= 2
        _assert_phases_add_up(page)
    assert first["samples_total"] / first["steps_total"] == pytest.approx(57 / 16, rel=0.2)
    assert second["tokens_total"] > second["samples_total"] > 0


def _assert_phases_add_up(page: Scrape) -> None:
    """Each step has all its phases, which together take as long as the steps; checkpoints take their own time."""
    phases = ("data", "forward", "backward", "optimizer", "step", "agree", "other")
    for phase in phases:
        assert page[f"phase_seconds_count {phase}"] == pytest.approx(page["steps_total"], abs=2)
    spent = sum(page[f"phase_seconds_sum {phase}"] for phase in phases)
    assert spent == pytest.approx(page["step_seconds_sum"], rel=0.5)
    assert page["phase_seconds_count save"] >= page["checkpoint_seconds_count"] > page["checkpoint_failures_total"] == 0
    assert page["checkpoint_blocked_seconds_sum"] <= page["checkpoint_seconds_sum"]
    # All gradients but those of the word embeddings, of which only the rows of a step's tokens are sent.
    assert page["collective_bytes_total all_reduce"] > page["collective_steps_total"] * 4 * 850_000


@pytest.mark.parametrize(("host", "others_see_it"), [(None, False), ("127.0.0.1", False), ("0.0.0.0", True)])
def test_metrics_are_for_this_machine_alone_unless_an_address_is_given(host: str | None, others_see_it: bool) -> None:
    port = free_port()
    given = {} if host is None else {"metrics_host": host}
    with closing(Exporter(TrainConfig(metrics_port=port, **given), ALONE, Phases())):
        assert _scrape(port)["steps_total"] == 0
        # Linux answers at all of 127.0.0.0/8, so this is another address of the machine.
        with socket.socket() as client:
            assert (client.connect_ex(("127.0.0.2", port)) == 0) is others_see_it


@pytest.mark.parametrize("host", ["192.0.2.7", "no.such.host.invalid", "a..b"])
def test_an_address_of_another_machine_is_refused_in_one_line(host: str) -> None:
    refused = pytest.raises(UserError, match=rf"^--metrics_host {host}: is no address of this machine \([^\n]+\)$")
    with refused, closing(Exporter(TrainConfig(metrics_port=free_port(), metrics_host=host), ALONE, Phases())):
        pass


def test_before_the_first_step_a_page_shows_the_steps_done_before_a_resume(
    epoch_metrics: Callable[..., EpochMetrics],
) -> None:
    port = free_port()
    with closing(Exporter(TrainConfig(metrics_port=port), ALONE, Phases())) as exporter:
        assert math.isnan(_scrape(port)["validation_accuracy"])
        exporter.receive(RunStarted(step=8, total_steps=16, epochs=[epoch_metrics(1, step=8)]))
        page = _scrape(port)

    assert (page["step"], page["total_steps"], page["steps_total"]) == (8, 16, 0)
    assert page["validation_accuracy"] == 0.9
    assert math.isnan(page["loss"])
    assert _scrape(port) == {}


@pytest.mark.parametrize(
    ("before", "since"),
    [
        ([("start", 100.0), ("failed", 150.0), ("start", 200.0)], 100.0),
        ([("start", 100.0), ("checkpoint", 150.0), ("start", 200.0), ("start", 300.0)], 200.0),
        ([("start", 100.0), ("checkpoint", 150.0), ("stopped", 151.0)], None),
        ([], None),
    ],
    ids=["no checkpoint yet", "none since", "a stop that saved", "a new run"],
)
def test_a_run_that_crashes_before_each_checkpoint_does_not_look_as_if_it_had_just_saved(
    tmp_path: Path, before: list[tuple[str, float]], since: float | None
) -> None:
    config = TrainConfig(output_dir=tmp_path / "model")
    config.run_dir.mkdir()
    lines = [json.dumps({"kind": kind, "time": when}) + "\n" for kind, when in before]
    (config.run_dir / "events.jsonl").write_text("".join(lines))
    now = time.time()
    with closing(Exporter(config, ALONE, Phases())) as exporter:
        exporter.receive(RunStarted(step=8, total_steps=16, epochs=[]))
        shown = exporter.registry.get_sample_value("distrinews_training_last_checkpoint_timestamp_seconds")

    assert shown == since if since else shown >= now


def test_a_taken_port_is_one_line_and_writes_nothing(
    train_here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    with _taken(port):
        code = train_here("--output_dir", tmp_path / "model", "--metrics_port", port)

    assert code == 2
    stderr = capfd.readouterr().err
    expected = rf"error: --metrics_port {port}: cannot listen on port {port} \(Address already in use\); choose"
    assert re.match(expected, stderr), stderr
    assert len(stderr.splitlines()) == 1
    assert list(tmp_path.glob("model*")) == []


@pytest.mark.slow
def test_a_port_that_the_second_rank_cannot_have_stops_both(launch: Callable[..., Any], tmp_path: Path) -> None:
    port = _two_free_ports()
    with _taken(port + 1):
        run = launch(2, "--output_dir", tmp_path / "model", "--metrics_port", port)

    assert run.process.returncode == 1
    [line] = run.error_lines
    assert line.startswith(f"error: rank 1: --metrics_port {port}: cannot listen on port {port + 1}")
    assert list(tmp_path.glob("model*")) == []
