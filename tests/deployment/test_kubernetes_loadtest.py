"""The load test's client tells what became of every request, and fails when one failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deployment.manifests import KUBERNETES, pod_templates
from tests.inference.servers import free_port, serving, stand_in_server

SCRIPT = KUBERNETES / "loadtest" / "drive_load.py"


def _drive(address: str, **variables: str) -> tuple[int, dict[str, object]]:
    (container,) = pod_templates("loadtest")[0]["spec"]["containers"]
    ours = {"TARGET": address, "CLIENTS": "4", "LOAD_SECONDS": "0.5", **variables}
    assert ours.keys() <= {entry["name"] for entry in container["env"]}
    run = subprocess.run(
        [sys.executable, SCRIPT], env={**os.environ, **ours}, capture_output=True, text=True, timeout=60
    )
    assert run.stderr == ""
    return run.returncode, json.loads(run.stdout)


def test_answers_are_counted_and_timed(model_folder: Path) -> None:
    with serving(model_folder) as client:
        code, summary = _drive(str(client.base_url))
    assert code == 0
    assert summary["errors"] == {}
    assert summary["answered"] > 4
    assert summary["texts_per_second"] > 0
    assert 0 < summary["p50_ms"] <= summary["p95_ms"] <= summary["p99_ms"]


@pytest.mark.slow
def test_the_answers_of_each_server_and_the_connections_are_counted(model_folder: Path, tmp_path: Path) -> None:
    with stand_in_server(model_folder, tmp_path, 0, WORKERS="2", MAX_CONNECTION_AGE_S="0.2") as server:
        _, summary = _drive(server.address, CLIENTS="8", LOAD_SECONDS="2")
    assert len(summary["servers"]) == 2
    refused = sum(count for outcome, count in summary["errors"].items() if outcome.isdigit())  # a busy server may
    assert sum(summary["servers"].values()) == summary["answered"] + refused
    assert summary["connections"] > 16

    with stand_in_server(model_folder, tmp_path, 0, MAX_CONNECTION_AGE_S="0") as server:
        _, summary = _drive(server.address)
    assert len(summary["servers"]) == 1
    assert summary["connections"] == 4


def test_the_key_is_sent_and_a_refusal_fails_the_job(model_folder: Path) -> None:
    with serving(model_folder, api_key="secret") as client:
        refused, summary = _drive(str(client.base_url), API_KEY="")
        answered, _ = _drive(str(client.base_url), API_KEY="secret")
    assert refused == 1
    assert summary["answered"] == 0
    assert list(summary["errors"]) == ["401"]
    assert answered == 0


def test_nobody_at_the_address_fails_the_job() -> None:
    code, summary = _drive(f"http://127.0.0.1:{free_port()}")
    assert code == 1
    assert list(summary["errors"]) == ["ConnectionRefusedError"]
