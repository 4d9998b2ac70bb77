"""What the API server would say of a manifest: the schemas of Kubernetes and of the custom resources in use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The oldest version that knows every field in use, and the newest that the validator knows. The validators take three
# seconds to import: only the worker of pytest that runs these tests does it, not every one that collects them.
OLDEST, NEWEST = "1.29", "newest"
_OPERATOR = json.loads((Path(__file__).parent / "schemas" / "prometheus-operator.json").read_text())


def problem(manifest: dict[str, Any], version: str) -> str | None:
    """Why a manifest would be refused in strict validation; None if it would not."""
    group = manifest["apiVersion"].rpartition("/")[0]
    check = {"monitoring.coreos.com": _operator_problem, "trainer.kubeflow.org": _kubeflow_problem}.get(group)
    return check(manifest) if check else _kubernetes_problem(manifest, version)


def _kubernetes_problem(manifest: dict[str, Any], version: str) -> str | None:
    import kubernetes_validate

    known = kubernetes_validate.latest_version() if version == NEWEST else version
    try:
        kubernetes_validate.validate(manifest, known, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return None


def _operator_problem(manifest: dict[str, Any]) -> str | None:
    import jsonschema

    try:
        jsonschema.validate(manifest["spec"], _OPERATOR[manifest["kind"]])
    except jsonschema.ValidationError as error:
        return f"spec.{'.'.join(map(str, error.path))}: {error.message}"
    return None


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
