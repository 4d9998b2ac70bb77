"""The commands that docs/deployment.md shows for Kubernetes, as far as no cluster is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deployment.documented import REPOSITORY, documented
from tests.deployment.kubernetes_schemas import NEWEST, problem
from tests.deployment.manifests import KUBERNETES, kubectl
from tests.inference.servers import serving


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A place that looks like the repository, as far as these commands look."""
    shutil.copytree(KUBERNETES, tmp_path / "deployment" / "kubernetes")
    (tmp_path / "deployment" / "prometheus").symlink_to(REPOSITORY / "deployment" / "prometheus")
    return tmp_path


def _run(commands: str, folder: Path) -> str:
    environment = {**os.environ, "PATH": f"{Path(kubectl()).parent}{os.pathsep}{os.environ['PATH']}"}
    run = subprocess.run(
        ["bash", "-e"], input=commands, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_an_overlay_of_ones_own_sets_image_namespace_and_settings(copy: Path) -> None:
    manifests = list(yaml.safe_load_all(_run(documented("docs/deployment.md", "kubernetes-overlay"), copy)))
    assert [problem(manifest, NEWEST) for manifest in manifests] == [None] * len(manifests)
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"news"}
    found = {manifest["kind"]: manifest for manifest in manifests}
    assert found["ConfigMap"]["data"].keys() == {"DRAIN_SECONDS", "GRACE_SECONDS", "RATE_LIMIT_PER_S"}
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith("registry.example.org/news/distrinews:")
    assert container["envFrom"][0]["configMapRef"]["name"] == found["ConfigMap"]["metadata"]["name"]


def test_the_alert_rules_become_a_prometheus_rule(copy: Path) -> None:
    _run(documented("docs/deployment.md", "kubernetes-alert-rules"), copy)
    manifest = yaml.safe_load((copy / "prometheus-rule.yaml").read_text())
    assert problem(manifest, NEWEST) is None
    assert manifest["spec"] == yaml.safe_load((REPOSITORY / "deployment" / "prometheus" / "alerts.yml").read_text())


def test_the_load_test_drives_any_server(copy: Path, model_folder: Path) -> None:
    commands = documented("docs/deployment.md", "kubernetes-load")
    assert "http://localhost:7860" in commands
    with serving(model_folder) as client:
        summary = json.loads(_run(commands.replace("http://localhost:7860", str(client.base_url)), copy))
    assert summary["errors"] == {}
