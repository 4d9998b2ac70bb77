"""Every manifest is one that Kubernetes, or the product whose resource it is, takes; a misspelt one is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.deployment.kubernetes_schemas import NEWEST, OLDEST, problem
from tests.deployment.manifests import ALL, BESIDE, only, rendered


@pytest.mark.parametrize("version", [pytest.param(OLDEST, marks=pytest.mark.slow), NEWEST])
@pytest.mark.parametrize("folder", [*ALL, *BESIDE])
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


def _misspell_a_weight(route: dict[str, Any]) -> None:
    route["spec"]["rules"][0]["backendRefs"][0]["weigth"] = 1


def _misspell_a_worker_s_volume(service: dict[str, Any]) -> None:
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["volume"] = []


def _misspell_a_port(runtime: dict[str, Any]) -> None:
    runtime["spec"]["containers"][0]["ports"][0]["containerport"] = 1


def _misspell_a_format(runtime: dict[str, Any]) -> None:
    runtime["spec"]["supportedModelFormat"] = []


def _misspell_an_address(service: dict[str, Any]) -> None:
    service["spec"]["predictor"]["model"]["storageURI"] = "hf://alice/news"


def _misspell_a_variable(service: dict[str, Any]) -> None:
    service["spec"]["predictor"]["model"]["env"] = [{"name": "ENGINE", "valueform": {}}]


@pytest.mark.parametrize(
    ("folder", "kind", "misspell", "word"),
    [
        ("gateway", "HTTPRoute", _misspell_a_weight, "weigth"),
        ("ray", "RayService", _misspell_a_worker_s_volume, "volume"),
        ("kserve", "ServingRuntime", _misspell_a_port, "containerport"),
        ("kserve", "ServingRuntime", _misspell_a_format, "supportedModelFormat"),
        ("kserve", "InferenceService", _misspell_an_address, "storageURI"),
        ("kserve", "InferenceService", _misspell_a_variable, "valueform"),
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
