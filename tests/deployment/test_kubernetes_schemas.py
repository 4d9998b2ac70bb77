"""Every manifest is one that Kubernetes, the Prometheus operator and Kubeflow take; a misspelt one is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.deployment.kubernetes_schemas import NEWEST, OLDEST, problem
from tests.deployment.manifests import ALL, only, rendered


@pytest.mark.parametrize("version", [pytest.param(OLDEST, marks=pytest.mark.slow), NEWEST])
@pytest.mark.parametrize("folder", ALL)
def test_every_manifest_is_valid(folder: str, version: str) -> None:
    problems = [(manifest["kind"], problem(manifest, version)) for manifest in rendered(folder)]
    assert [found for found in problems if found[1]] == []


def _misspell_a_probe(deployment: dict[str, Any]) -> None:
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["readinesProbe"] = container.pop("readinessProbe")


def _misspell_an_interval(monitor: dict[str, Any]) -> None:
    monitor["spec"]["endpoints"][0]["scrapeInterval"] = "15s"


def _misspell_the_nodes(job: dict[str, Any]) -> None:
    job["spec"]["trainer"]["nodes"] = 2


def _misspell_a_volume(runtime: dict[str, Any]) -> None:
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["volumes"][0]["persistentVolume"] = {"claimName": "distrinews-checkpoints"}


@pytest.mark.parametrize(
    ("folder", "kind", "misspell", "word"),
    [
        ("base", "Deployment", _misspell_a_probe, "readinesProbe"),
        ("base", "ServiceMonitor", _misspell_an_interval, "scrapeInterval"),
        ("training/kubeflow", "TrainJob", _misspell_the_nodes, "nodes"),
        ("training/kubeflow", "TrainingRuntime", _misspell_a_volume, "persistentVolume"),
    ],
)
def test_a_field_that_nobody_knows_is_refused_by_name(
    folder: str, kind: str, misspell: Callable[[dict[str, Any]], None], word: str
) -> None:
    manifest = copy.deepcopy(only(folder, kind))
    misspell(manifest)
    assert word in (problem(manifest, NEWEST) or "")


def test_a_value_of_the_wrong_type_is_refused() -> None:
    autoscaler = copy.deepcopy(only("base", "HorizontalPodAutoscaler"))
    autoscaler["spec"]["minReplicas"] = "two"
    assert "two" in (problem(autoscaler, NEWEST) or "")
