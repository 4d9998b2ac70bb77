"""Every manifest is one that Kubernetes, or the product whose resource it is, takes; a misspelt one is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.deployment.kubernetes_schemas import NEWEST, OLDEST, problem
from tests.deployment.manifests import ALL, BESIDE, only, rendered


@pytest.mark.parametrize("version", [pytest.param(OLDEST, marks=pytest.mark.slow), NEWEST])
@pytest.mark.parametrize("folder", [*ALL, *BESIDE])
def test_every_manifest_is_valid(folder: str, version: str) -> None:
    problems = [(manifest["kind"], problem(manifest, version)) for manifest in rendered(folder)]
    assert [found for found in problems if found[1]] == []


_POD = "spec.template.spec.replicatedJobs.0.template.spec.template.spec"


@pytest.mark.parametrize(
    ("folder", "kind", "place", "misspelt", "word"),
    [
        ("gateway", "HTTPRoute", "spec.rules.0.backendRefs.0", {"weigth": 1}, "weigth"),
        ("ray", "RayService", "spec.rayClusterConfig.workerGroupSpecs.0.template.spec", {"volume": []}, "volume"),
        ("kserve", "ServingRuntime", "spec.containers.0.ports.0", {"containerport": 1}, "containerport"),
        ("kserve", "ServingRuntime", "spec", {"supportedModelFormat": []}, "supportedModelFormat"),
        ("kserve", "InferenceService", "spec.predictor.model", {"storageURI": "hf://alice/news"}, "storageURI"),
        ("kserve", "InferenceService", "spec.predictor.model", {"env": [{"name": "A", "valueform": {}}]}, "valueform"),
        ("base", "Deployment", "spec.template.spec.containers.0", {"readinesProbe": {}}, "readinesProbe"),
        ("base", "ServiceMonitor", "spec.endpoints.0", {"scrapeInterval": "15s"}, "scrapeInterval"),
        ("training/kubeflow", "TrainJob", "spec.trainer", {"nodes": 2}, "nodes"),
        ("training/kubeflow", "TrainingRuntime", f"{_POD}.volumes.0", {"persistentVolume": {}}, "persistentVolume"),
    ],
)
def test_a_field_that_nobody_knows_is_refused_by_name(
    folder: str, kind: str, place: str, misspelt: dict[str, Any], word: str
) -> None:
    manifest = copy.deepcopy(only(folder, kind))
    found: Any = manifest
    for part in place.split("."):
        found = found[int(part) if part.isdecimal() else part]
    found |= misspelt
    assert word in (problem(manifest, NEWEST) or "")


def test_a_value_of_the_wrong_type_is_refused() -> None:
    autoscaler = copy.deepcopy(only("base", "HorizontalPodAutoscaler"))
    autoscaler["spec"]["minReplicas"] = "two"
    assert "two" in (problem(autoscaler, NEWEST) or "")
