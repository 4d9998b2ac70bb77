"""The server's manifests agree with the server, and with each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from inference.app import create_app
from inference.engines.base import CPU_BATCH_TOKENS
from inference.settings import Settings
from tests.deployment.documented import REPOSITORY
from tests.deployment.manifests import (
    ALL,
    KUBERNETES,
    SCORING,
    SERVERS,
    TRAINING,
    only,
    pod_selectors,
    pod_templates,
    rendered,
    selects,
)

VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]


def _server(folder: str) -> dict[str, Any]:
    (template,) = pod_templates(folder)
    return template


def _container(folder: str) -> dict[str, Any]:
    (container,) = _server(folder)["spec"]["containers"]
    return container


def _settings(folder: str) -> Settings:
    values = only(folder, "ConfigMap")["data"]
    assert {name.lower() for name in values} <= Settings.model_fields.keys()
    return Settings(**{name.lower(): value for name, value in values.items()})


@pytest.mark.parametrize("folder", SERVERS)
def test_every_selector_takes_the_servers_pods_and_no_others(folder: str) -> None:
    others = [template for other in (*TRAINING, SCORING, "loadtest") for template in pod_templates(other)]
    for owner, selector in pod_selectors(rendered(folder)).items():
        assert selects(selector, _server(folder)), owner
        assert not any(selects(selector, template) for template in others), owner


@pytest.mark.parametrize("folder", SERVERS)
def test_probes_ask_routes_that_exist_on_the_port_that_the_server_listens_on(folder: str) -> None:
    container = _container(folder)
    routes = create_app(_settings(folder)).openapi()["paths"]
    (port,) = container["ports"]
    assert port["containerPort"] == _settings(folder).port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in routes
        assert container[probe]["httpGet"]["port"] == port["name"]
    assert only(folder, "Service")["spec"]["ports"][0]["targetPort"] == port["name"]
    assert only(folder, "NetworkPolicy")["spec"]["ingress"][0]["ports"] == [{"port": port["name"]}]


@pytest.mark.parametrize("folder", SERVERS)
def test_the_server_has_time_to_drain_and_finish_before_it_is_killed(folder: str) -> None:
    settings = _settings(folder)
    assert _server(folder)["spec"]["terminationGracePeriodSeconds"] > settings.drain_seconds + settings.grace_seconds


@pytest.mark.parametrize("folder", SERVERS)
def test_the_server_gets_whole_cores_that_it_can_count(folder: str) -> None:
    resources = _container(folder)["resources"]
    assert resources["limits"] == resources["requests"]
    assert int(resources["limits"]["cpu"]) >= 1


@pytest.mark.parametrize("folder", ALL)
def test_every_pod_keeps_to_the_restricted_pod_security_standard(folder: str) -> None:
    for template in pod_templates(folder):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.parametrize("folder", ALL)
def test_every_image_is_of_this_version(folder: str) -> None:
    images = {container["image"] for template in pod_templates(folder) for container in template["spec"]["containers"]}
    assert images <= {f"distrinews:{VERSION}", f"distrinews-torch:{VERSION}"}


@pytest.mark.parametrize("folder", ALL)
def test_every_mount_names_a_volume_of_its_pod(folder: str) -> None:
    for template in pod_templates(folder):
        volumes = [volume["name"] for volume in template["spec"].get("volumes", [])]
        mounts = [mount["name"] for one in template["spec"]["containers"] for mount in one.get("volumeMounts", [])]
        assert sorted(mounts) == sorted(volumes)


@pytest.mark.parametrize("folder", SERVERS)
def test_the_autoscaler_scales_the_server_and_leaves_the_number_of_replicas_to_itself(folder: str) -> None:
    autoscaler, deployment = only(folder, "HorizontalPodAutoscaler")["spec"], only(folder, "Deployment")
    assert autoscaler["scaleTargetRef"] == {
        "apiVersion": deployment["apiVersion"],
        "kind": "Deployment",
        "name": deployment["metadata"]["name"],
    }
    assert "replicas" not in deployment["spec"]
    assert autoscaler["minReplicas"] > only(folder, "PodDisruptionBudget")["spec"]["maxUnavailable"]


def test_the_autoscaler_asks_for_the_queue_and_the_processor_as_far_as_the_cluster_knows_them() -> None:
    asked = {folder: only(folder, "HorizontalPodAutoscaler")["spec"]["metrics"] for folder in SERVERS}
    kinds = {folder: [metric["type"] for metric in metrics] for folder, metrics in asked.items()}
    assert kinds == {"base": ["Pods", "Resource"], "overlays/gpu": ["Pods"], "overlays/plain": ["Resource"]}
    for folder, batch_tokens in (("base", CPU_BATCH_TOKENS), ("overlays/gpu", 8192)):
        assert int(asked[folder][0]["pods"]["target"]["averageValue"]) == 4 * batch_tokens


def test_a_gpu_pod_refuses_to_serve_on_its_processor_goes_to_tainted_nodes_and_takes_few_of_them() -> None:
    assert _settings("overlays/gpu").device == "cuda"
    (toleration,) = _server("overlays/gpu")["spec"]["tolerations"]
    assert toleration["key"] in _container("overlays/gpu")["resources"]["limits"]
    assert only("overlays/gpu", "HorizontalPodAutoscaler")["spec"]["maxReplicas"] <= 3
    waits = [only(folder, "Deployment")["spec"]["progressDeadlineSeconds"] for folder in ("base", "overlays/gpu")]
    assert waits[1] >= 4 * waits[0]


def test_what_was_not_measured_on_a_gpu_says_so_where_it_is_read() -> None:
    page = " ".join((REPOSITORY / "docs" / "deployment.md").read_text().split())
    assert "not measured on a gpu" in (KUBERNETES / "overlays/gpu/kustomization.yaml").read_text().lower()
    assert "**measured on a GPU** yet" in page


def test_the_page_names_the_driver_that_the_locked_cuda_needs() -> None:
    lock = (REPOSITORY / "deployment" / "requirements-torch-cuda.txt").read_text()
    cuda = re.search(r"^cuda-toolkit==(\d+)\.", lock, re.MULTILINE)[1]
    least_driver = {"12": "525", "13": "580"}[cuda]  # NVIDIA's table of minor version compatibility
    page = " ".join((REPOSITORY / "docs" / "deployment.md").read_text().split())
    assert f"CUDA {cuda}, which needs [NVIDIA's driver {least_driver} or newer]" in page


def test_the_base_believes_no_client_about_its_address() -> None:
    for folder in SERVERS:
        assert _settings(folder).forwarded_allow_ips == "127.0.0.1"


def test_the_metric_of_the_autoscaler_is_made_by_the_adapter_from_one_that_the_server_has(tmp_path: Path) -> None:
    (rule,) = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    series = re.match(r"\w+", rule["seriesQuery"])
    page = TestClient(create_app(Settings(model_checkpoint=tmp_path))).get("/metrics").text
    assert only("base", "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]["metric"]["name"] == series[0]
    assert f"# TYPE {series[0]} gauge\n" in page


def test_the_monitors_find_the_server_through_its_service_and_every_pod_of_training() -> None:
    service, found = only("base", "Service"), only("base", "ServiceMonitor")["spec"]
    assert selects(found["selector"], service)
    assert found["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]
    pods = only("training/monitor", "PodMonitor")["spec"]
    keep, _ = pods["podMetricsEndpoints"][0]["relabelings"]
    for template in [template for folder in TRAINING for template in pod_templates(folder)]:
        assert selects(pods["selector"], template)
        ports = [port["name"] for container in template["spec"]["containers"] for port in container["ports"]]
        assert [port for port in ports if re.fullmatch(keep["regex"], port)] == ["metrics"]
    assert not selects(pods["selector"], _server("base"))


def test_what_is_scraped_bears_the_names_that_alerts_and_dashboards_know_whatever_it_is_called_in_the_cluster() -> None:
    prometheus = yaml.safe_load((REPOSITORY / "deployment" / "prometheus" / "prometheus.yml").read_text())
    endpoints = [
        only("base", "ServiceMonitor")["spec"]["endpoints"][0],
        only("training/monitor", "PodMonitor")["spec"]["podMetricsEndpoints"][0],
    ]
    relabelings = [endpoint["relabelings"][-1] for endpoint in endpoints]
    assert [relabeling["targetLabel"] for relabeling in relabelings] == ["job", "job"]
    assert [relabeling["replacement"] for relabeling in relabelings] == [
        job["job_name"] for job in prometheus["scrape_configs"]
    ]


def test_a_cluster_without_the_operator_is_asked_for_nothing_of_it() -> None:
    assert not [one for one in rendered("overlays/plain") if one["apiVersion"].startswith("monitoring.coreos.com")]


def test_the_gpu_server_reads_the_model_where_training_wrote_it() -> None:
    (mount, _), (volume, _) = (
        _container("overlays/gpu")["volumeMounts"],
        _server("overlays/gpu")["spec"]["volumes"],
    )
    settings = _settings("overlays/gpu")
    (trainer,) = pod_templates("training/indexed-job")[0]["spec"]["containers"]
    (output,) = [Path(flag.partition("=")[2]) for flag in trainer["args"] if flag.startswith("--output_dir=")]
    assert settings.engine == "torch"
    assert mount["readOnly"] is True
    assert settings.model_checkpoint == Path(mount["mountPath"], output.name)
    claim = only("storage", "PersistentVolumeClaim")["metadata"]["name"]
    assert volume["persistentVolumeClaim"] == {"claimName": claim, "readOnly": True}


def test_the_load_test_asks_the_servers_service_with_the_servers_key() -> None:
    (container,) = pod_templates("loadtest")[0]["spec"]["containers"]
    environment = {entry["name"]: entry for entry in container["env"]}
    assert environment["TARGET"]["value"] == f"http://{only('base', 'Service')['metadata']['name']}"
    assert only("base", "Service")["spec"]["ports"][0]["port"] == 80
    key = environment["API_KEY"]["valueFrom"]["secretKeyRef"]
    assert key["key"].lower() in Settings.model_fields
    secrets = [source["secretRef"]["name"] for source in _container("base")["envFrom"] if "secretRef" in source]
    assert secrets == [key["name"]]
