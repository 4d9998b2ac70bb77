"""Writes Grafana's dashboards: python deployment/grafana/make_dashboards.py."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
SCHEMA_VERSION = 41  # Grafana 11.6
COLUMNS = 24
TAG = "distrinews"  # by which Grafana links one dashboard to the other
STAT_COLUMNS = 3
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
Json = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One panel, as a file in `panels/` describes it.

    ``queries``: PromQL by legend, in which ``$here`` stands for what is selected. ``limits``: the
    values at which it turns yellow and red; falling ones mark a lower bound. ``width``: of 24
    columns.
    """

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    limits: tuple[float, float] | None = None
    width: int = 8
    stacked: bool = False
    description: str = ""


def make_dashboard(source: Path) -> str:
    described = yaml.safe_load(source.read_text(encoding="utf-8"))
    rows = {
        title: [Panel(**panel) for panel in panels] for title, panels in described["rows"].items()
    }
    made = _dashboard(described, rows)
    return json.dumps(made, indent=1) + "\n"


def _dashboard(described: Json, rows: dict[str, list[Panel]]) -> Json:
    """In ``described``, ``select`` names the labels of the metric ``instances_of`` by which a reader can select."""
    labels = described["select"]
    choices = [
        _choice(label, labels[:i], described["instances_of"]) for i, label in enumerate(labels)
    ]
    return {
        "uid": described["uid"],
        "title": described["title"],
        "tags": [TAG],
        "links": [{"type": "dashboards", "title": "DistriNews", "tags": [TAG]}],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), *choices]},
        "panels": _laid_out(rows, _selected(labels)),
    }


def _datasource() -> Json:
    return {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus"}


def _selected(labels: list[str]) -> str:
    return ", ".join(f'{label}=~"${label}"' for label in labels)


def _choice(label: str, before: list[str], metric: str) -> Json:
    """A choice among the values that a label has within what is selected ``before`` it."""
    # Without this, the choice of an instance would list those of all namespaces.
    within = f"{{{_selected(before)}}}" if before else ""
    return {
        "name": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": f"label_values({metric}{within}, {label})",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _laid_out(rows: dict[str, list[Panel]], selected: str) -> list[Json]:
    """Rows of panels from top to bottom, each with a position and a number."""
    made: list[Json] = []
    y = 0
    for title, panels in rows.items():
        position = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        made.append(
            {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": position}
        )
        x, y = 0, y + 1
        height = 4 if panels[0].kind == "stat" else 8
        # Tiles wrap into lines of equal length, rather than a full one and a rest.
        lines = math.ceil(len(panels) * STAT_COLUMNS / COLUMNS)
        stat_columns = COLUMNS // math.ceil(len(panels) / lines)
        for panel in panels:
            width = stat_columns if panel.kind == "stat" else panel.width
            # A row that is full goes on below, as words wrap in a text.
            if x + width > COLUMNS:
                x, y = 0, y + height
            made.append(
                {**_panel(panel, selected), "gridPos": {"x": x, "y": y, "w": width, "h": height}}
            )
            x += width
        y += height
    # Numbered at the end, because rows and panels share one series of numbers.
    return [{"id": number, **panel} for number, panel in enumerate(made, start=1)]


def _panel(panel: Panel, selected: str) -> Json:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "targets": [
            _target(panel, i, legend, query.replace("$here", selected))
            for i, (legend, query) in enumerate(panel.queries.items())
        ],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _options(panel.kind),
    }


def _target(panel: Panel, number: int, legend: str, query: str) -> Json:
    is_table = panel.kind == "table"
    return {
        "refId": "ABCDEFGH"[number],
        "datasource": DATASOURCE,
        "expr": query,
        "legendFormat": legend,
        # A table shows the present value. As a range, it would have a line for every point in time.
        "instant": is_table,
        "range": not is_table,
        "format": "table" if is_table else "time_series",
    }


def _field(panel: Panel) -> Json:
    field: Json = {"unit": panel.unit}
    if panel.limits:
        yellow, red = panel.limits
        colors = ("green", "yellow", "red") if red >= yellow else ("red", "yellow", "green")
        values = sorted(panel.limits)
        steps = [
            {"value": value, "color": color}
            for value, color in zip((None, *values), colors, strict=True)
        ]
        field["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind == "timeseries":
        field["custom"] = {
            "fillOpacity": 30 if panel.stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if panel.limits else "off"},
        }
    return field


def _options(kind: str) -> Json:
    if kind == "stat":
        reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": reduced, "colorMode": "value", "graphMode": "area"}
    if kind == "timeseries":
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    return {"showHeader": True}


def main() -> None:
    for source in sorted((FOLDER / "panels").glob("*.yaml")):
        target = FOLDER / "dashboards" / f"{source.stem}.json"
        target.write_text(make_dashboard(source), encoding="utf-8")
        print(target)


if __name__ == "__main__":
    main()
