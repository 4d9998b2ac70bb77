"""Alerts ask for metrics that exist, lead to a page that says what to do, and fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
import yaml

from inference.settings import Settings
from tests.deployment.documented import REPOSITORY, documented
from tests.deployment.promql import ALERTS, KUBERNETES_ALERTS, Shown, alerts, shown_by_all, unknown_in
from tests.http_servers import JsonHandler, served_answers
from tests.inference.servers import free_port
from tests.processes import wait_until
from tests.training.conftest import Run

RULES = alerts(ALERTS, KUBERNETES_ALERTS)
NAMES = [rule["alert"] for rule in RULES]
ALERTMANAGER = shutil.which("prometheus-alertmanager")
needs_tools = pytest.mark.skipif(
    not (shutil.which("promtool") and ALERTMANAGER),
    reason="no promtool or no Alertmanager: apt-get install prometheus prometheus-alertmanager",
)


@pytest.fixture(scope="module")
def shown(model_folder: Path) -> Shown:
    return shown_by_all(model_folder)


@pytest.mark.parametrize("rule", alerts(ALERTS), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_metrics_and_labels_that_exist(rule: dict[str, str], shown: Shown) -> None:
    assert unknown_in(rule["expr"], shown) == []


@pytest.mark.parametrize(
    ("expression", "unknown"),
    [
        ('distrinews_request_total{route="/predict"}', ["distrinews_request_total"]),
        ("rate(distrinews_request_seconds[5m])", ["distrinews_request_seconds"]),
        ('distrinews_refusals_total{reason="queue_full"}', ["distrinews_refusals_total{reason}"]),
        ("sum by (stage) (rate(distrinews_requests_total[5m]))", ["by stage"]),
        ("sum by (stage, le) (rate(distrinews_stage_seconds_bucket[5m]))", []),
    ],
)
def test_what_does_not_exist_is_noticed(expression: str, unknown: list[str], shown: Shown) -> None:
    assert unknown_in(expression, shown) == unknown


def test_label_values_are_those_that_the_server_has(shown: Shown) -> None:
    guide = (REPOSITORY / "docs" / "serving.md").read_text()
    for rule in RULES:
        for label, values in re.findall(r'(code|status|stage|route|result)=~?"([^"]+)"', rule["expr"]):
            for value in values.split("|"):
                assert value in guide, f"{rule['alert']}: {label} {value}"


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_a_rule_never_adds_up_what_several_namespaces_have(rule: dict[str, str]) -> None:
    grouped = re.findall(r"\b(?:by|on) \(([^)]+)\)", rule["expr"])
    assert [labels for labels in grouped if "namespace" not in labels] == []


def test_the_queue_is_near_the_bound_that_the_server_has() -> None:
    [rule] = [rule for rule in RULES if rule["alert"] == "ServerQueueNearBound"]
    assert f"0.7 * {Settings.model_fields['max_wait_seconds'].default} " in rule["expr"] + " "


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_an_alert_says_what_it_means_and_leads_to_what_to_do(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"]["severity"] in (("none",) if rule["alert"] == "Watchdog" else ("warning", "critical"))
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (\w+)$", (REPOSITORY / page).read_text(), re.MULTILINE)
    assert anchor == str(rule["alert"]).lower()
    assert rule["alert"] in headings


def test_each_alert_has_one_rule_and_a_test_in_which_it_fires() -> None:
    tests = yaml.safe_load(ALERTS.with_name("alerts_test.yml").read_text())["tests"]
    expected = [
        sample["labels"]
        for test in tests
        for asked in test.get("promql_expr_test", ())
        for sample in asked["exp_samples"]
    ]
    assert len(set(NAMES)) == len(NAMES)
    assert {re.search(r'alertname="(\w+)"', labels)[1] for labels in expected} == set(NAMES)


@needs_tools
def test_configuration_and_rules_are_sound_and_each_alert_fires_where_it_should() -> None:
    commands = documented("docs/deployment.md", "alerts")
    ended = subprocess.run(["bash", "-ec", commands], cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@needs_tools
def test_the_alertmanager_sends_what_happened_and_what_to_do_to_the_address_in_its_secret(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    received: Queue[dict[str, Any]] = Queue()

    def webhook(request: JsonHandler) -> bytes:
        received.put(json.loads(request.body()))
        return b"ok"

    config = ALERTS.with_name("alertmanager.yml").read_text().replace("group_wait: 30s", "group_wait: 0s")
    (tmp_path / "alertmanager.yml").write_text(config.replace("/run/secrets/alert_webhook", f"{tmp_path}/secret"))
    composed = yaml.safe_load((REPOSITORY / "deployment" / "compose.yaml").read_text())["services"]["alertmanager"]
    flags = [flag.replace("/etc/prometheus", str(tmp_path)) for flag in composed["command"]]
    flags = [flag.replace("=/alertmanager", f"={tmp_path}/data") for flag in flags]
    port = free_port()
    with served_answers(webhook) as address, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        (tmp_path / "secret").write_text(f"{address}/hook\n")
        start([ALERTMANAGER, *flags, f"--web.listen-address=127.0.0.1:{port}"], wait=False)
        wait_until(lambda: _ready(client), 60)
        _raise_alerts(client, "Watchdog", "ServerGone")
        said = [received.get(timeout=60)]
        _raise_alerts(client, "ServerDown", "ServerSlow")
        said.append(received.get(timeout=60))
        seen = {one["labels"]["alertname"]: one for one in client.get("/api/v2/alerts").json()}
    shown = [(one["attachments"][0]["title"], one["attachments"][0]["text"]) for one in said]
    assert [re.search(r"Server\w+", title)[0] for title, _ in shown] == ["ServerGone", "ServerSlow"]
    assert "No server answers" in shown[0][1]
    assert "docs/OPERATIONS.md#servergone" in shown[0][1]
    assert seen["ServerDown"]["status"]["inhibitedBy"] == [seen["ServerGone"]["fingerprint"]]
    assert seen["Watchdog"]["receivers"] == [{"name": "watchdog"}]


def _raise_alerts(client: httpx.Client, *names: str) -> None:
    for rule in (rule for rule in RULES if rule["alert"] in names):
        labels = {"alertname": rule["alert"], "job": "distrinews", "namespace": "prod", **rule["labels"]}
        client.post("/api/v2/alerts", json=[{"labels": labels, "annotations": rule["annotations"]}])


def _ready(client: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return client.get("/-/ready").status_code == 200
    return False
