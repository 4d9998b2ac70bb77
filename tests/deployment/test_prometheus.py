"""A real Prometheus beside a real server and a real run answers every panel, and evaluates every alert."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deployment.documented import REPOSITORY, documented
from tests.deployment.promql import ALERTS, alerts
from tests.deployment.test_dashboards import PANELS
from tests.inference.servers import free_port
from tests.inference.stand_in_model import text_of
from tests.processes import wait_until
from tests.training.conftest import Run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus: apt-get install prometheus"),
]
COMPOSED = yaml.safe_load((REPOSITORY / "deployment" / "compose.yaml").read_text())
# Nothing is dropped from the queue of a server that is well. The run is not told what a rank makes alone, and of ddp
# the passes are compared, not what lies between collectives.
MAY_BE_EMPTY = {"Texts dropped before the model", "Scaling efficiency", "Between collectives, over the median"}
STARTUP_SECONDS = 120


@contextmanager
def _running(command: list[str], folder: Path, **variables: str) -> Iterator[None]:
    run = Run(command, folder, {**os.environ, **variables}, folder)
    try:
        yield
    finally:
        run.kill()


@contextmanager
def _asked(client: httpx.Client) -> Iterator[None]:
    """Keep a server busy: a text it remembers and new ones, lists, and requests that are refused."""
    enough = threading.Event()

    def ask() -> None:
        for number in count():
            if enough.wait(0.05):
                return
            client.post("/predict", json={"text": "Oil prices rise again"})
            client.post("/predict/batch", json={"texts": [text_of(number), "Goal!"]})
            client.post("/predict", json={"text": " "})

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def _training(folder: Path, port: int) -> AbstractContextManager[None]:
    """The documented command with steps enough for the whole test, on a port that is free here."""
    commands = documented("docs/deployment.md", "training-metrics").replace("9400", str(port))
    fields = {"EPOCHS": "1000", "DEVICE": "cpu", "MAX_TRAIN_ROWS": "63", "CACHE_DIR": str(folder / "cache")}
    folder.mkdir()
    (folder / "training").symlink_to(REPOSITORY / "training")
    variables = {f"DISTRINEWS_{name}": value for name, value in fields.items()}
    return _running(["bash", "-ec", commands], folder, PYTHON=sys.executable, **variables)


def _prometheus(folder: Path, server: str, training_port: int, port: int) -> AbstractContextManager[None]:
    """Prometheus with the files and flags of the composition, but for addresses, and once a second."""
    folder.mkdir()
    config = (ALERTS.parent / "prometheus.yml").read_text().replace("15s", "1s").replace("server:7860", server)
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(ALERTS, folder)
    targets = (ALERTS.parent / "training_targets.yml").read_text().replace("host.docker.internal", "127.0.0.1")
    targets = targets.replace("9400", str(training_port)).replace("9401", str(training_port + 1))
    (folder / "training_targets.yml").write_text(targets)
    flags = [flag.replace("/etc/prometheus", str(folder)) for flag in COMPOSED["services"]["prometheus"]["command"]]
    flags = [flag.replace("=/prometheus", f"={folder}/data") for flag in flags]
    command = ["prometheus", *flags, f"--web.listen-address=127.0.0.1:{port}"]
    return _running(command, folder)


@pytest.fixture(scope="module")
def prometheus(
    start_server: Callable[..., AbstractContextManager[httpx.Client]],
    model_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[httpx.Client]:
    """A client of Prometheus, once it has seen a server at work, and two ranks that have saved twice."""
    folder = tmp_path_factory.mktemp("prometheus")
    training_port, port = free_port(), free_port()
    with (
        start_server(model_folder, CACHE_ENTRIES="10") as server,
        _asked(server),
        _training(folder / "training", training_port),
        _prometheus(folder / "prometheus", server.base_url.netloc.decode(), training_port, port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        saved = "count(rate(distrinews_training_checkpoint_seconds_count[30s]) > 0) == 2"
        compared = 'count(distrinews_training_slowness{phase="forward"} > 0) == 2'
        all_there = (saved, compared, "distrinews_model_ready == 1")
        wait_until(lambda: all(_ask(client, query) for query in all_there), STARTUP_SECONDS)
        yield client


def _ask(client: httpx.Client, query: str) -> list[dict[str, Any]]:
    """The series that Prometheus answers with; none while it starts."""
    with suppress(httpx.TransportError):
        answer = client.get("/api/v1/query", params={"query": query})
        if answer.status_code != 503:
            assert answer.status_code == 200, (query, answer.text)
            return answer.json()["data"]["result"]
    return []


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_shows_numbers(panel: dict[str, Any], prometheus: httpx.Client) -> None:
    for target in panel["targets"]:
        query = re.sub(r"\$(namespace|job|service|instance)", ".*", target["expr"]).replace("$__rate_interval", "30s")
        series = _ask(prometheus, query)
        # A route or a rank that did nothing in the last half minute has no quantile: NaN.
        known = [one for one in series if not math.isnan(float(one["value"][1]))]
        assert known or panel["title"] in MAY_BE_EMPTY, (query, series)


def test_every_alert_is_evaluated_and_none_fires_on_what_is_well(prometheus: httpx.Client) -> None:
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert rules.keys() == {rule["alert"] for rule in alerts(ALERTS)}
    assert {name: rule["lastError"] for name, rule in rules.items() if rule["health"] != "ok"} == {}
    assert [name for name, rule in rules.items() if rule["state"] == "firing"] == ["Watchdog"]
