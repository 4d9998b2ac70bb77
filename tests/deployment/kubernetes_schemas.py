"""What the API server would say of a manifest: the schemas of Kubernetes and of the custom resources in use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The oldest version that knows every field in use, and the newest that the validator knows. The validators take three
# seconds to import: only the worker of pytest that runs these tests does it, not every one that collects them.
OLDEST, NEWEST = "1.29", "newest"
_SCHEMAS = Path(__file__).parent / "schemas"
_OPERATOR = json.loads((_SCHEMAS / "prometheus-operator.json").read_text())
_BESIDE = json.loads((_SCHEMAS / "beside-the-server.json").read_text())


def problem(manifest: dict[str, Any], version: str) -> str | None:
    """Why a manifest would be refused in strict validation; None if it would not."""
    group = manifest["apiVersion"].rpartition("/")[0]
    if group == "monitoring.coreos.com":
        return _schema_problem(manifest["spec"], _OPERATOR[manifest["kind"]])
    if group == "trainer.kubeflow.org":
        return _kubeflow_problem(manifest)
    if schema := _BESIDE.get(f"{manifest['apiVersion']} {manifest['kind']}"):
        pods = [
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod} for pod in _pods(manifest)
        ]
        found = [_schema_problem(manifest["spec"], schema), *(_kubernetes_problem(pod, version) for pod in pods)]
        return next(filter(None, found), None)
    return _kubernetes_problem(manifest, version)


def _kubernetes_problem(manifest: dict[str, Any], version: str) -> str | None:
    import kubernetes_validate

    known = kubernetes_validate.latest_version() if version == NEWEST else version
    try:
        kubernetes_validate.validate(manifest, known, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return None


def _schema_problem(spec: dict[str, Any], schema: dict[str, Any]) -> str | None:
    import jsonschema

    try:
        jsonschema.validate(spec, schema)
    except jsonschema.ValidationError as error:
        return f"spec.{'.'.join(map(str, error.path))}: {error.message}"
    return None


def _pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of a custom resource, whose fields its schema does not repeat."""
    spec = manifest["spec"]
    match manifest["kind"]:
        case "RayService":
            groups = [spec["rayClusterConfig"]["headGroupSpec"], *spec["rayClusterConfig"]["workerGroupSpecs"]]
            return [group["template"]["spec"] for group in groups]
        case "ServingRuntime":
            return [_own_to_a_pod(spec, _BESIDE["serving.kserve.io/v1alpha1 ServingRuntime"])]
        case "InferenceService":
            predictor = _BESIDE["serving.kserve.io/v1beta1 InferenceService"]["properties"]["predictor"]
            pod = _own_to_a_pod(spec["predictor"], predictor)
            container = _own_to_a_pod(spec["predictor"]["model"], predictor["properties"]["model"])
            return [{**pod, "containers": [{"name": "model", **container}]}]
    return []


def _own_to_a_pod(value: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    return {name: field for name, field in value.items() if schema["properties"].get(name) == {}}


def _kubeflow_problem(manifest: dict[str, Any]) -> str | None:
    from kubeflow_trainer_api import models

    model = getattr(models, f"TrainerV1alpha1{manifest['kind']}")
    # The models pass over what they do not know: it is missing from what they give back.
    return _lost(manifest, model.from_dict(manifest).to_dict(), manifest["kind"])


def _lost(given: Any, understood: Any, where: str) -> str | None:
    if isinstance(given, dict):
        unknown = given.keys() - understood.keys()
        if unknown:
            return f"{where}: no field {sorted(unknown)}"
        found = (_lost(value, understood[key], f"{where}.{key}") for key, value in given.items())
    elif isinstance(given, list):
        found = (_lost(one, other, where) for one, other in zip(given, understood, strict=True))
    else:
        return None if given == understood else f"{where}: {given!r} is read as {understood!r}"
    return next(filter(None, found), None)
