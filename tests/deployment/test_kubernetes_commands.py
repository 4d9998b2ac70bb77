"""The commands that docs/deployment.md shows for Kubernetes, as far as no cluster is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deployment.documented import REPOSITORY, documented
from tests.deployment.kubernetes_schemas import NEWEST, problem
from tests.deployment.manifests import KUBERNETES, only, pod_selectors, run, selects
from tests.inference.servers import serving


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A place that looks like the repository, as far as these commands look."""
    shutil.copytree(KUBERNETES, tmp_path / "deployment" / "kubernetes")
    (tmp_path / "deployment" / "prometheus").symlink_to(REPOSITORY / "deployment" / "prometheus")
    return tmp_path


def test_an_overlay_of_ones_own_sets_image_namespace_and_settings(copy: Path) -> None:
    manifests = list(yaml.safe_load_all(run(documented("docs/deployment.md", "kubernetes-overlay"), copy)))
    assert [problem(manifest, NEWEST) for manifest in manifests] == [None] * len(manifests)
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"news"}
    found = {manifest["kind"]: manifest for manifest in manifests}
    settings = found["ConfigMap"]["data"]
    assert settings.keys() == only("base", "ConfigMap")["data"].keys() | {"RATE_LIMIT_PER_S", "REQUIRE_API_KEY"}
    assert settings["FORWARDED_ALLOW_IPS"].endswith("/24")
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith("registry.example.org/news/distrinews:")
    assert container["envFrom"][0]["configMapRef"]["name"] == found["ConfigMap"]["metadata"]["name"]


def test_an_overlay_of_ones_own_trains_on_more_nodes_with_more_gpus(copy: Path) -> None:
    manifests = list(yaml.safe_load_all(run(documented("docs/deployment.md", "kubernetes-training-overlay"), copy)))
    assert [problem(manifest, NEWEST) for manifest in manifests] == [None] * len(manifests)
    found = {manifest["kind"]: manifest for manifest in manifests}
    assert found.keys() == {"Job", "Service", "NetworkPolicy"}
    job = found["Job"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    ports = [port["containerPort"] for port in container["ports"] if port["name"].startswith("metrics")]
    assert variables["PET_NNODES"] == str(job["completions"]) == str(job["parallelism"]) == "8"
    assert variables["PET_NPROC_PER_NODE"] == container["resources"]["requests"]["nvidia.com/gpu"] == "2"
    assert sorted(ports) == [9400, 9401]
    assert container["image"].startswith("registry.example.org/news/distrinews-torch:")


def test_the_alert_rules_become_a_prometheus_rule(copy: Path) -> None:
    run(documented("docs/deployment.md", "kubernetes-alert-rules"), copy)
    manifests = [one for one in yaml.safe_load_all((copy / "prometheus-rules.yaml").read_text()) if one]
    assert [problem(manifest, NEWEST) for manifest in manifests] == [None, None]
    files = (REPOSITORY / "deployment" / "prometheus" / name for name in ("alerts.yml", "kubernetes.yml"))
    assert [manifest["spec"] for manifest in manifests] == [yaml.safe_load(file.read_text()) for file in files]
    assert len({manifest["metadata"]["name"] for manifest in manifests}) == 2


def test_with_the_key_component_no_pod_starts_without_the_secret_and_no_server_without_a_key_in_it(
    copy: Path, model_folder: Path
) -> None:
    manifests = list(yaml.safe_load_all(run(documented("docs/deployment.md", "kubernetes-overlay"), copy)))
    found = {manifest["kind"]: manifest for manifest in manifests}
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"][1]["secretRef"] == {"name": "distrinews-api-key", "optional": False}

    environment = {**os.environ, **found["ConfigMap"]["data"], "MODEL_CHECKPOINT": str(model_folder), "PORT": "0"}
    command = [sys.executable, "-m", "inference.serve"]
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "API_KEY" in ended.stdout + ended.stderr


def test_two_installations_in_one_namespace_share_no_name_and_select_nothing_of_each_other(copy: Path) -> None:
    first = list(yaml.safe_load_all(run(documented("docs/deployment.md", "kubernetes-overlay"), copy)))
    second = list(yaml.safe_load_all(run(documented("docs/deployment.md", "kubernetes-second-overlay"), copy)))
    names = [
        {(one["kind"], one["metadata"]["namespace"], one["metadata"]["name"]) for one in x} for x in (first, second)
    ]
    assert len(names[0]) == len(names[1]) == len(first) == len(second)
    assert not names[0] & names[1]
    for ours, others in ((first, second), (second, first)):
        mine, theirs = ({one["kind"]: one for one in manifests} for manifests in (ours, others))
        for owner, selector in pod_selectors(ours).items():
            assert selects(selector, mine["Deployment"]["spec"]["template"]), owner
            assert not selects(selector, theirs["Deployment"]["spec"]["template"]), owner
        assert selects(mine["ServiceMonitor"]["spec"]["selector"], mine["Service"])
        assert not selects(mine["ServiceMonitor"]["spec"]["selector"], theirs["Service"])
        scaled = mine["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"]
        assert scaled == mine["Deployment"]["metadata"]["name"] != theirs["Deployment"]["metadata"]["name"]
    assert [problem(manifest, NEWEST) for manifest in second] == [None] * len(second)


def test_the_component_for_vnni_asks_for_nodes_that_have_it(copy: Path) -> None:
    overlay = copy / "deployment" / "kubernetes" / "overlays" / "vnni"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text("resources: [../../base]\ncomponents: [../../components/vnni]\n")
    manifests = list(yaml.safe_load_all(run(f"kubectl kustomize {overlay}", copy)))
    (deployment,) = [manifest for manifest in manifests if manifest["kind"] == "Deployment"]
    assert problem(deployment, NEWEST) is None
    affinity = deployment["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["key"].endswith(".AVX512VNNI")


def test_the_load_test_drives_any_server(copy: Path, model_folder: Path) -> None:
    commands = documented("docs/deployment.md", "kubernetes-load")
    assert "http://localhost:7860" in commands
    with serving(model_folder) as client:
        summary = json.loads(run(commands.replace("http://localhost:7860", str(client.base_url)), copy))
    assert summary["errors"] == {}
