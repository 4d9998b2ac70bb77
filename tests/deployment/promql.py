"""What PromQL asks for, and what the real server and the real exporter show; both as names with their labels."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families

from inference.metrics import ServerMetrics
from tests.deployment.documented import REPOSITORY
from tests.inference.servers import free_port, serving
from training.config import TrainConfig
from training.distributed.ranks import Ranks
from training.monitoring import Exporter
from training.monitoring.events import CollectivesRecorded, StepStarted
from training.monitoring.phases import Phases
from training.monitoring.records import CollectiveUse

ALERTS = REPOSITORY / "deployment" / "prometheus" / "alerts.yml"
KUBERNETES_ALERTS = ALERTS.with_name("kubernetes.yml")
DASHBOARDS = sorted((REPOSITORY / "deployment" / "grafana" / "dashboards").glob("*.json"))
# What Prometheus itself adds to every series, and its operator on Kubernetes.
OWN_LABELS = {"job", "instance", "namespace", "service"}

_SERIES = re.compile(r"(?<![\w$])((?:distrinews|process|python)_\w+)\s*(?:\{([^}]*)\})?")
_MATCHED = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_GROUPED = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
# Three texts of the model's full length, which are not answered in time: the later ones never leave the queue.
_LONG_TEXTS = ["markets games chips peace talks " * 10 + end for end in ("rose", "fell", "grew")]

Shown = dict[str, set[str]]


def alerts(*files: Path) -> list[dict[str, object]]:
    """All rules of these files."""
    return [rule for file in files for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]


def unknown_in(expression: str, shown: Shown) -> list[str]:
    """The names and labels of an expression that no page shows."""
    names = {match[1]: set(_MATCHED.findall(match[2] or "")) for match in _SERIES.finditer(expression)}
    unknown = [name for name in names if name not in shown]
    known = [(name, labels) for name, labels in names.items() if name in shown]
    unknown += [f"{name}{{{label}}}" for name, labels in known for label in labels - shown[name] - OWN_LABELS]
    grouped = {label.strip() for match in _GROUPED.finditer(expression) for label in match[1].split(",")} - {""}
    usable = OWN_LABELS.union(*(shown[name] for name, _ in known))
    return unknown + [f"by {label}" for label in grouped - usable]


def shown_by_all(model_folder: Path) -> Shown:
    """What a server that has seen every kind of request shows, one with several models, and a rank's exporter."""
    shown = _series(_server_page(model_folder)) | _series(_training_page())
    for name, labels in _series(_page_of_several_models()).items():
        shown.setdefault(name, set()).update(labels)
    return shown


def _series(page: str) -> Shown:
    samples: Iterable = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    shown: Shown = {}
    for sample in samples:
        shown.setdefault(sample.name, set()).update(sample.labels)
    return shown


def _server_page(model_folder: Path) -> str:
    settings = {"cache_entries": 10, "request_timeout_s": 0.3, "max_batch_tokens": 24}
    with serving(model_folder, seconds_per_token=0.02, **settings) as client:
        assert client.post("/predict", json={"text": "Goal!"}).status_code == 200
        assert client.post("/predict", json={"text": " "}).status_code == 422
        assert client.post("/predict/batch", json={"texts": _LONG_TEXTS}).status_code == 504
        return client.get("/metrics").text


def _page_of_several_models() -> str:
    metrics = ServerMetrics()
    news = metrics.of_model("news")
    news.serves("news", "0123456789ab", "native int8")
    news.predicted([("World", 0.9)], truncated=False)
    window = {"accuracy": 0.9, "low": 0.8, "high": 1.0}
    news.saw({"hour": window, "alarm": {"active": False, "by_score": {"short": 0.5}}})
    return metrics.render("")[0].decode()


def _training_page() -> str:
    port, phases = free_port(), Phases()
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")
    with closing(Exporter(TrainConfig(metrics_port=port), alone, phases)) as exporter:
        exporter.receive(StepStarted(1))
        exporter.receive(CollectivesRecorded(1, {"all_reduce": CollectiveUse(1, 4, (0.1,))}))
        with urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            return page.read().decode()
