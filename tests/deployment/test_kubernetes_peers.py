"""The server beside KServe, KubeRay, a gateway, sign-in and KEDA: the manifests agree with it and with each other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from inference.app import create_app
from inference.settings import Settings
from tests.deployment.documented import REPOSITORY, documented
from tests.deployment.kubernetes_schemas import NEWEST, problem
from tests.deployment.manifests import BESIDE, KUBERNETES, only, pod_templates, rendered, run, selects
from tests.inference.conftest import StartServer

NEWS = REPOSITORY / "checkpoints" / "news"
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A place that looks like the repository, as far as these commands look."""
    shutil.copytree(KUBERNETES, tmp_path / "deployment" / "kubernetes")
    (tmp_path / "inference").symlink_to(REPOSITORY / "inference")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "sample").symlink_to(NEWS)
    return tmp_path


def by_kind(output: str) -> dict[str, dict[str, Any]]:
    """What was rendered, each valid; of several of a kind the last."""
    manifests = list(yaml.safe_load_all(output))
    assert [found for one in manifests if (found := problem(one, NEWEST))] == []
    return {manifest["kind"]: manifest for manifest in manifests}


def renamed(checkout: Path, overlay: str) -> dict[str, dict[str, Any]]:
    """A documented overlay as the base of another installation, with its own suffix, image and instance."""
    folder = checkout / "deployment" / "kubernetes" / "overlays" / "other"
    folder.mkdir()
    own = {"nameSuffix": "-b", "namespace": "desk", "resources": [f"../{overlay}"]}
    own["images"] = [{"name": "distrinews", "newName": "registry.example.org/distrinews", "newTag": "7"}]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(own))
    return by_kind(run(f"kubectl kustomize {folder}", checkout))


def test_the_documented_commands_render_what_each_product_takes(checkout: Path) -> None:
    for line in documented("docs/deployment.md", "kubernetes-peers").splitlines():
        assert by_kind(run(line, checkout))


@pytest.mark.parametrize("folder", ["ingress/oidc", "ray"])
def test_their_pods_keep_to_the_restricted_pod_security_standard(folder: str) -> None:
    templates = pod_templates(folder)
    assert templates
    for template in templates:
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"] + pod.get("initContainers", []):
            assert container["securityContext"] == RESTRICTED
            assert container["resources"]["limits"]


def test_their_images_are_of_this_version_or_named_by_theirs() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    found = {
        image for folder in BESIDE for one in rendered(folder) for image in re.findall(r"'image': '([^']+)'", str(one))
    }
    assert found == {
        f"distrinews:{version}",
        f"distrinews-torch:{version}",
        "quay.io/oauth2-proxy/oauth2-proxy:v7.15.3",
    }


def test_the_documented_command_fetches_a_model(checkout: Path) -> None:
    said = run(documented("docs/deployment.md", "fetch"), checkout)

    assert "MB in" in said
    assert (checkout / "models" / "sample" / "manifest.json").read_bytes() == (NEWS / "manifest.json").read_bytes()


def test_the_init_container_leaves_the_model_where_the_server_looks_for_it(checkout: Path, tmp_path: Path) -> None:
    found = by_kind(run(documented("docs/deployment.md", "kubernetes-fetch"), checkout))
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (fetch,), (server,) = pod["initContainers"], pod["containers"]
    assert fetch["image"] == server["image"]
    assert fetch["securityContext"] == RESTRICTED
    assert fetch["envFrom"][0]["configMapRef"]["name"] in [
        one["metadata"]["name"]
        for one in yaml.safe_load_all(run("kubectl kustomize deployment/kubernetes/overlays/fetched", checkout))
    ]
    (writes,), (reads,) = fetch["volumeMounts"], server["volumeMounts"]
    assert writes["name"] == reads["name"] == pod["volumes"][0]["name"]
    dockerfile = (REPOSITORY / "deployment" / "Dockerfile").read_text()
    assert f"MODEL_CHECKPOINT={reads['mountPath']} " in dockerfile

    # The command itself, with the volume and the address on this machine.
    words = [word.replace("$(MODEL_ADDRESS)", str(NEWS)) for word in fetch["command"]]
    words = [sys.executable, *(re.sub(f"^{writes['mountPath']}", str(tmp_path / "volume"), word) for word in words[1:])]
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "volume" / reads["subPath"] / "manifest.json").exists()


def test_a_pinned_manifest_is_the_environment_s_word_for_the_init_container(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "inference.fetch", str(NEWS), str(tmp_path / "model")]
    environment = {**os.environ, "MANIFEST_SHA256": "0" * 64}
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment, timeout=60)

    assert done.returncode == 2
    assert "its SHA-256 is" in done.stderr


def test_the_init_container_may_connect_to_https_and_name_servers_only(checkout: Path) -> None:
    found = by_kind(run(documented("docs/deployment.md", "kubernetes-fetch"), checkout))
    (rule,) = found["NetworkPolicy"]["spec"]["egress"]
    assert {(port["port"], port["protocol"]) for port in rule["ports"]} == {(53, "UDP"), (53, "TCP"), (443, "TCP")}


def test_the_init_container_has_the_server_s_image_in_every_installation(checkout: Path) -> None:
    run(documented("docs/deployment.md", "kubernetes-fetch"), checkout)
    pod = renamed(checkout, "fetched")["Deployment"]["spec"]["template"]["spec"]
    assert pod["initContainers"][0]["image"] == pod["containers"][0]["image"] == "registry.example.org/distrinews:7"


def test_keda_scales_the_server_in_place_of_the_autoscaler(checkout: Path) -> None:
    found = by_kind(run(documented("docs/deployment.md", "kubernetes-scale-to-zero"), checkout))
    scaled, route = found["ScaledObject"]["spec"], found["InterceptorRoute"]
    assert "HorizontalPodAutoscaler" not in found
    assert "replicas" not in found["Deployment"]["spec"]
    assert scaled["minReplicaCount"] == 0
    assert scaled["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    held, queue = scaled["triggers"]
    assert held["metadata"]["interceptorRoute"] == route["metadata"]["name"]
    assert route["spec"]["target"]["service"] == found["Service"]["metadata"]["name"]
    assert route["spec"]["target"]["port"] == found["Service"]["spec"]["ports"][0]["port"]
    service, namespace = found["Service"]["metadata"]["name"], found["Service"]["metadata"]["namespace"]
    assert f'namespace="{namespace}", service="{service}"' in queue["metadata"]["query"]
    assert 0 < float(queue["metadata"]["threshold"]) < Settings().max_wait_seconds


def test_keda_asks_for_a_gauge_that_the_server_has(checkout: Path, tmp_path: Path) -> None:
    found = by_kind(run(documented("docs/deployment.md", "kubernetes-scale-to-zero"), checkout))
    name = re.search(r"distrinews_\w+", found["ScaledObject"]["spec"]["triggers"][1]["metadata"]["query"])[0]
    page = TestClient(create_app(Settings(model_checkpoint=tmp_path))).get("/metrics").text
    assert f"# TYPE {name} gauge\n" in page


def test_what_keda_scales_follows_the_names_of_the_installation(checkout: Path) -> None:
    run(documented("docs/deployment.md", "kubernetes-scale-to-zero"), checkout)
    found = renamed(checkout, "zero")
    assert found["Deployment"]["metadata"]["name"] == "distrinews-b"
    assert found["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == "distrinews-b"
    assert found["ScaledObject"]["spec"]["triggers"][0]["metadata"]["interceptorRoute"] == "distrinews-b"
    assert found["InterceptorRoute"]["spec"]["target"]["service"] == "distrinews-b"


def test_the_interceptor_may_reach_the_server(checkout: Path) -> None:
    found = by_kind(run(documented("docs/deployment.md", "kubernetes-scale-to-zero"), checkout))
    (rule,) = found["NetworkPolicy"]["spec"]["ingress"]
    selected = [one["namespaceSelector"]["matchLabels"] for one in rule["from"] if "namespaceSelector" in one]
    namespace = found["ScaledObject"]["spec"]["triggers"][0]["metadata"]["scalerAddress"].split(":")[0].split(".")[1]
    assert {"kubernetes.io/metadata.name": namespace} in selected


def test_kserve_starts_the_server_with_settings_and_probes_that_it_has() -> None:
    (container,) = only("kserve", "ServingRuntime")["spec"]["containers"]
    values = {entry["name"].lower(): entry["value"].replace("{{.Name}}", "news") for entry in container["env"]}
    assert values.keys() <= Settings.model_fields.keys()
    settings = Settings(**values)
    assert settings.drain_seconds + settings.grace_seconds < 30  # Kubernetes' default, which KServe leaves
    routes = create_app(settings).openapi()["paths"]
    (port,) = container["ports"]
    assert port["containerPort"] == settings.port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": container[probe]["httpGet"]["path"], "port": settings.port}
        assert container[probe]["httpGet"]["path"] in routes
    annotations = only("kserve", "ServingRuntime")["spec"]["annotations"]
    assert annotations == {"prometheus.kserve.io/port": str(settings.port), "prometheus.kserve.io/path": "/metrics"}


def test_kserve_finds_the_runtime_for_the_model_s_format() -> None:
    runtime, model = only("kserve", "ServingRuntime"), only("kserve", "InferenceService")["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in [one["name"] for one in runtime["spec"]["supportedModelFormats"]]
    assert runtime["spec"]["protocolVersions"] == ["v2"]


def test_kserve_s_clients_find_the_model_by_the_name_of_the_inference_service(
    tmp_path: Path, start_server: StartServer
) -> None:
    name = "news-canary"  # not what the model itself is called
    (container,) = only("kserve", "ServingRuntime")["spec"]["containers"]
    (given,) = [one["value"] for one in container["env"] if one["name"] == "MODEL_NAME"]
    place = Path(shutil.copytree(NEWS, tmp_path / "mnt" / "models"))
    texts = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["Oil prices climb to a record"]}
    with start_server(place, MODEL_NAME=given.replace("{{.Name}}", name)) as client:
        assert client.get(f"/v2/models/{name}/ready").status_code == 200
        answer = client.post(f"/v2/models/{name}/infer", json={"inputs": [texts]})
    assert answer.status_code == 200, answer.text


def _ray() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What Ray Serve reads, and the pods of the head and of a worker."""
    spec = only("ray", "RayService")["spec"]
    cluster = spec["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    return (
        yaml.safe_load(spec["serveConfigV2"]),
        cluster["headGroupSpec"]["template"]["spec"],
        group["template"]["spec"],
    )


def test_the_ray_service_serves_what_the_configuration_file_says() -> None:
    assert _ray()[0] == yaml.safe_load((REPOSITORY / "deployment" / "ray" / "serve.yaml").read_text())


def test_the_ray_service_s_workers_have_room_for_all_replicas() -> None:
    arguments, worker = _ray()[0]["applications"][0]["args"], _ray()[2]
    (group,) = only("ray", "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    cores = group["maxReplicas"] * int(worker["containers"][0]["resources"]["limits"]["cpu"])
    assert cores >= arguments["max_replicas"] * arguments["cpus_per_replica"]


def test_the_ray_service_s_pods_find_proxy_layers_model_and_port() -> None:
    config, head, worker = _ray()
    source = (REPOSITORY / "deployment" / "ray" / "serve.py").read_text()
    name, value = re.search(r'\{\s*"(RAY_SERVE_HTTP_PROXY\w+)": "([\w.]+)"\s*\}', source).groups()
    for pod in (head, worker):
        assert {"name": name, "value": value} in pod["containers"][0]["env"]
    (container,), (fetch,) = worker["containers"], worker["initContainers"]
    assert container["ports"] == [{"name": "serve", "containerPort": config["http_options"]["port"]}]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "model"]
    assert mount["mountPath"] == config["applications"][0]["args"]["model"]
    assert fetch["command"][4] == f"{fetch['volumeMounts'][0]['mountPath']}/{mount['subPath']}"
    for pod in (head, worker):
        mounts = {
            mount["name"]
            for part in pod["containers"] + pod.get("initContainers", [])
            for mount in part["volumeMounts"]
        }
        assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_ray_service_s_version_is_one_that_this_project_follows() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    oldest = re.search(r">=([\d.]+)", extras["ray"][0])[1]
    used = only("ray", "RayService")["spec"]["rayClusterConfig"]["rayVersion"]
    assert [*map(int, used.split("."))] >= [*map(int, oldest.split("."))]


def _ray_peers() -> dict[Any, list[dict[str, Any]]]:
    """Who may connect to Ray's pods, by port; None for every port."""
    policy = only("ray", "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    cluster = only("ray", "RayService")["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert selects(policy["podSelector"], group["template"])
    peers: dict[Any, list[dict[str, Any]]] = {}
    for rule in policy["ingress"]:
        for port in rule.get("ports", [{"port": None}]):
            peers.setdefault(port["port"], []).extend(rule["from"])
    return peers


def test_only_ray_s_own_pods_reach_its_ports_and_clients_that_of_the_server() -> None:
    own = only("ray", "NetworkPolicy")["spec"]["podSelector"]
    peers = _ray_peers()
    serving = _ray()[0]["http_options"]["port"]
    assert peers.keys() == {None, 8265, serving}
    assert peers[None] == [{"podSelector": own}]
    (operator,) = peers[8265]  # the dashboard takes serveConfigV2
    assert operator["podSelector"] == {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}}
    (of_the_server,) = only("base", "NetworkPolicy")["spec"]["ingress"]
    assert peers[serving] == of_the_server["from"]


def test_ray_asks_everyone_who_connects_for_a_token() -> None:
    cluster = only("ray", "RayService")["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert [*map(int, cluster["rayVersion"].split("."))] >= [2, 52, 0]  # KubeRay refuses it with an older one
    assert "RAY_AUTH_TOKEN" not in str(cluster)  # KubeRay gives each pod the one of its Secret


def test_the_gateway_s_route_begins_with_all_requests_at_the_stable_service() -> None:
    (rule,) = only("gateway", "HTTPRoute")["spec"]["rules"]
    service = only("base", "Service")
    port, name = service["spec"]["ports"][0]["port"], service["metadata"]["name"]
    assert rule["backendRefs"] == [
        {"name": name, "port": port, "weight": 100},
        {"name": f"{name}-canary", "port": port, "weight": 0},
    ]


def test_the_ingress_leads_to_the_server_by_tls() -> None:
    ingress, service = only("ingress/tls", "Ingress")["spec"], only("base", "Service")
    (rule,), (tls,) = ingress["rules"], ingress["tls"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert tls["hosts"] == [rule["host"]]
    assert backend == {"name": service["metadata"]["name"], "port": {"name": service["spec"]["ports"][0]["name"]}}


def test_nobody_gets_past_the_sign_in_by_the_ingress() -> None:
    proxy, front = only("ingress/oidc", "Deployment"), only("ingress/oidc", "Service")
    (rule,) = only("ingress/oidc", "Ingress")["spec"]["rules"]
    backends = [path["backend"]["service"]["name"] for path in rule["http"]["paths"]]
    assert backends == [front["metadata"]["name"]]
    (container,) = proxy["spec"]["template"]["spec"]["containers"]
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in container["args"])
    server = only("base", "Service")
    assert flags["upstream"] == f"http://{server['metadata']['name']}:{server['spec']['ports'][0]['port']}"
    assert flags["redirect-url"] == f"https://{rule['host']}/oauth2/callback"
    assert not flags.keys() & {"skip-auth-route", "skip-auth-regex", "trusted-ip"}
    labels = proxy["spec"]["template"]["metadata"]["labels"].items()
    assert front["spec"]["selector"].items() <= labels
    assert not server["spec"]["selector"].items() <= labels


def test_the_documented_secret_has_the_keys_that_the_sign_in_reads() -> None:
    (container,) = pod_templates("ingress/oidc")[0]["spec"]["containers"]
    wanted = {entry["valueFrom"]["secretKeyRef"]["key"] for entry in container["env"]}
    names = {entry["valueFrom"]["secretKeyRef"]["name"] for entry in container["env"]}
    page = (REPOSITORY / "docs" / "deployment.md").read_text()
    command = page[page.index(f"kubectl create secret generic {names.pop()}") :].partition("```")[0]
    assert set(re.findall(r"--from-literal=(\w+)=", command)) == wanted
