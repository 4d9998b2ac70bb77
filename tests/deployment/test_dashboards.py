"""Dashboards are made from their descriptions, are what Grafana reads, and ask for metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from inference.settings import Settings
from tests.deployment.documented import REPOSITORY, documented
from tests.deployment.promql import DASHBOARDS, OWN_LABELS, Shown, shown_by_all, unknown_in

GRAFANA = REPOSITORY / "deployment" / "grafana"
MADE = {path.stem: json.loads(path.read_text()) for path in DASHBOARDS}
PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']}")
    for name, made in MADE.items()
    for panel in made["panels"]
    if panel["type"] != "row"
]
register_default_plugins()


@pytest.fixture(scope="module")
def shown(model_folder: Path) -> Shown:
    return shown_by_all(model_folder)


def test_the_json_is_what_the_documented_command_writes(tmp_path: Path) -> None:
    shutil.copytree(GRAFANA, tmp_path / "deployment" / "grafana")
    commands = documented("docs/deployment.md", "dashboards").replace("python ", f"{sys.executable} ")
    subprocess.run(["bash", "-ec", commands], cwd=tmp_path, check=True, capture_output=True)
    for path in DASHBOARDS:
        written = tmp_path / path.relative_to(REPOSITORY)
        assert written.read_text() == path.read_text(), "run python deployment/grafana/make_dashboards.py"


def _lost(given: Any, kept: Any, place: str = "") -> Iterator[str]:
    """What Grafana's own model of a dashboard does not keep."""
    if isinstance(given, dict):
        for name, value in given.items():
            yield from _lost(value, kept.get(name, ...) if isinstance(kept, dict) else ..., f"{place}/{name}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from _lost(one, other, f"{place}/{number}")
    elif given != kept:
        yield place


def _read_by_grafana(made: dict[str, Any]) -> dict[str, Any]:
    return json.loads(JSONEncoder().encode(Dashboard.from_json(made)))


@pytest.mark.parametrize("name", MADE)
def test_grafana_knows_every_field(name: str) -> None:
    assert list(_lost(MADE[name], _read_by_grafana(MADE[name]))) == []


def test_a_misspelt_field_is_noticed() -> None:
    made = json.loads(json.dumps(MADE["serving"]))
    panel = next(panel for panel in made["panels"] if panel["type"] == "timeseries")
    panel["fieldConfig"]["defaults"]["custom"]["showPoint"] = "never"
    [place] = _lost(made, _read_by_grafana(made))
    assert place.endswith("/fieldConfig/defaults/custom/showPoint")


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_for_metrics_and_labels_that_exist(panel: dict[str, Any], shown: Shown) -> None:
    for target in panel["targets"]:
        assert unknown_in(target["expr"], shown) == []
        legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        grouped = re.search(r"\bby \(([\w, ]+)\)", target["expr"])
        assert legend <= (set(re.split(", ?", grouped[1])) if grouped else OWN_LABELS)


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_follows_the_chosen_namespaces_and_jobs_and_says_its_unit(panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        selected = re.findall(r"\{([^{}]*)\}", target["expr"])
        assert all('namespace=~"$namespace", job=~"$job"' in labels for labels in selected), target["expr"]
        assert selected


@pytest.mark.parametrize("name", MADE)
def test_a_choice_offers_what_is_there_within_the_choices_before_it_and_all_also_without_the_label(name: str) -> None:
    choices = [one for one in MADE[name]["templating"]["list"] if one["type"] == "query"]
    assert [one["name"] for one in choices][:2] == ["namespace", "job"]
    for number, choice in enumerate(choices):
        assert re.findall(r"\$(\w+)", choice["query"]) == [before["name"] for before in choices[:number]]
        assert choice["allValue"] == ".*"


@pytest.mark.parametrize("name", MADE)
def test_panels_have_a_place_of_their_own(name: str) -> None:
    panels = MADE[name]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        for at in (panel["gridPos"] for panel in panels)
    ]
    assert all(0 <= x < 24 for cell in cells for x, _ in cell)
    assert not any(one & other for one, other in combinations(cells, 2))


def test_the_queue_turns_yellow_and_red_where_the_alert_would() -> None:
    bound = Settings.model_fields["max_wait_seconds"].default
    panels = [panel for panel in MADE["serving"]["panels"] if panel["title"] == "Wait in the queue"]
    for panel in panels:
        _, yellow, red = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert (yellow["value"], red["value"]) == (0.5 * bound, 0.7 * bound)
    assert len(panels) == 2


def test_grafana_finds_prometheus_and_the_dashboards_where_compose_puts_them() -> None:
    services = yaml.safe_load((REPOSITORY / "deployment" / "compose.yaml").read_text())["services"]
    [source] = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    [provider] = yaml.safe_load((GRAFANA / "provisioning/dashboards/distrinews.yml").read_text())["providers"]
    mounted = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert source["url"] == "http://prometheus:9090"
    assert services["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]
    assert provider["options"]["path"] == mounted["./grafana/dashboards"]
    assert mounted["./grafana/provisioning"] == "/etc/grafana/provisioning"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/serving.json"
