"""The manifests as Kustomize renders them."""

from __future__ import annotations

import os
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
ALL = (*SERVERS, *TRAINING, "training/network", "training/monitor", SCORING, "scoring/storage", "storage", "loadtest")

# The server beside other products, whose resources these are.
BESIDE = ("gateway", "ingress/tls", "ingress/oidc", "kserve", "ray")


def kubectl() -> str:
    """The kubectl that the development tools bring."""
    path = shutil.which("kubectl", path=str(Path(sys.executable).parent))
    assert path, "no kubectl beside python; install the dev extra: pip install -e '.[dev]'"
    return path


def run(commands: str, folder: Path) -> str:
    """Run a page's commands in a folder, with that kubectl on the path; returns what they print."""
    path = os.pathsep.join([str(Path(kubectl()).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        ["bash", "-e"], input=commands, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def rendered(folder: str) -> list[dict[str, Any]]:
    """All objects of a folder under deployment/kubernetes."""
    run = subprocess.run([kubectl(), "kustomize", str(KUBERNETES / folder)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return list(yaml.safe_load_all(run.stdout))


def selects(selector: dict[str, Any], labelled: dict[str, Any]) -> bool:
    """Whether a selector takes an object, or the pods of a template."""
    labels = selector.get("matchLabels", selector)
    assert labels, "an empty selector takes everything"
    return labels.items() <= labelled["metadata"]["labels"].items()


def pod_selectors(server: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every selector of pods among the objects of a server, by what it belongs to."""
    kinds = {manifest["kind"]: manifest["spec"] for manifest in server if "spec" in manifest}
    found = {kind: kinds[kind]["selector"] for kind in ("Deployment", "Service", "PodDisruptionBudget")}
    found["NetworkPolicy"] = kinds["NetworkPolicy"]["podSelector"]
    for constraint in kinds["Deployment"]["template"]["spec"]["topologySpreadConstraints"]:
        found[constraint["topologyKey"]] = constraint["labelSelector"]
    return found


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
