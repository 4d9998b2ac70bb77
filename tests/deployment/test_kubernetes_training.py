"""The manifests of training and bulk scoring agree with their flags, with torchrun and with each other."""

from __future__ import annotations

import argparse
import os
import re
import signal
from typing import Any

import pytest
from torch.distributed.run import parse_args

from common.errors import EXIT_USER_ERROR
from tests.deployment.manifests import SCORING, TRAINING, only, pod_templates
from training.config import ENVIRONMENT_PREFIX, TrainConfig, parse_config

SCRIPT = "training/train_ddp.py"


def _arguments(folder: str) -> list[str]:
    if folder == "training/kubeflow":
        return only(folder, "TrainJob")["spec"]["trainer"]["args"]
    (container,) = pod_templates(folder)[0]["spec"]["containers"]
    return container["args"]


def _torchrun(folder: str) -> argparse.Namespace:
    return parse_args(_arguments(folder))


def _config(folder: str) -> TrainConfig:
    return parse_config(_torchrun(folder).training_script_args, environment={})


def _job(folder: str) -> dict[str, Any]:
    if folder == "training/kubeflow":
        runtime = only(folder, "TrainingRuntime")["spec"]["template"]["spec"]
        return runtime["replicatedJobs"][0]["template"]["spec"]
    return only(folder, "Job")["spec"]


@pytest.mark.parametrize("folder", TRAINING)
def test_the_flags_are_those_of_training(folder: str) -> None:
    assert _torchrun(folder).training_script == SCRIPT
    assert _config(folder) == _config(TRAINING[0])


@pytest.mark.parametrize("folder", TRAINING)
def test_a_pod_whose_ranks_stop_early_does_not_count_as_done(folder: str) -> None:
    assert _config(folder).stopped_exit_code != 0


@pytest.mark.parametrize("folder", TRAINING)
def test_each_pod_shows_its_metrics_where_its_port_says(folder: str) -> None:
    (container,) = pod_templates(folder)[0]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert _config(folder).metrics_port == ports["metrics"]
    assert _config(folder).metrics_host == "0.0.0.0"  # Prometheus asks the pod's own address


@pytest.mark.parametrize("folder", TRAINING)
def test_only_ranks_may_reach_a_rank_and_prometheus_its_metrics(folder: str) -> None:
    policy = only(folder, "NetworkPolicy")["spec"]
    wanted = policy["podSelector"]["matchLabels"]
    [template] = pod_templates(folder)
    assert wanted.items() <= template["metadata"]["labels"].items()
    from_ranks, from_prometheus = policy["ingress"]
    assert from_ranks == {"from": [{"podSelector": {"matchLabels": wanted}}]}
    [ports] = from_prometheus["ports"]
    assert ports["port"] == _config(folder).metrics_port
    assert ports["endPort"] - ports["port"] == 15  # of the ranks on 16 GPUs


def test_deleting_one_kind_of_run_keeps_the_policy_of_the_other() -> None:
    names = [only(folder, "NetworkPolicy")["metadata"]["name"] for folder in TRAINING]
    assert len(set(names)) == len(TRAINING)


@pytest.mark.parametrize("folder", TRAINING)
def test_prometheus_scrapes_every_rank_of_a_pod_and_nothing_else(folder: str) -> None:
    keep, _ = only("training/monitor", "PodMonitor")["spec"]["podMetricsEndpoints"][0]["relabelings"]
    (container,) = pod_templates(folder)[0]["spec"]["containers"]
    names = [port["name"] for port in container["ports"]]
    assert (keep["action"], keep["sourceLabels"]) == ("keep", ["__meta_kubernetes_pod_container_port_name"])
    scraped = [name for name in [*names, "metrics-1", "metrics-15"] if re.fullmatch(keep["regex"], name)]
    assert scraped == ["metrics", "metrics-1", "metrics-15"]


@pytest.mark.parametrize("folder", TRAINING)
def test_losing_nodes_never_counts_and_a_refused_run_ends_the_job_at_once(folder: str) -> None:
    job = _job(folder)
    (container,) = job["template"]["spec"]["containers"]
    lost, interrupted, refused = job["podFailurePolicy"]["rules"]
    assert lost == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    for rule, action, codes in [
        (interrupted, "Ignore", [os.EX_TEMPFAIL, 128 + signal.SIGTERM]),
        (refused, "FailJob", [EXIT_USER_ERROR]),
    ]:
        assert rule["action"] == action
        assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": codes}
    # Counted per node: what all nodes fail together must not grow with their number.
    assert job["completionMode"] == "Indexed"
    assert (job["backoffLimitPerIndex"], job["maxFailedIndexes"]) == (6, 0)
    assert "backoffLimit" not in job


@pytest.mark.parametrize("folder", TRAINING)
def test_the_nodes_that_are_left_wait_for_a_lost_one_in_a_rendezvous_that_outlives_its_attempts(folder: str) -> None:
    torchrun = _torchrun(folder)
    (container,) = pod_templates(folder)[0]["spec"]["containers"]
    assert (torchrun.rdzv_backend, torchrun.max_restarts) == ("c10d", 3)
    # Kubernetes waits up to ten minutes before it replaces a pod.
    assert torchrun.rdzv_conf == "read_timeout=900,join_timeout=900"
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]


@pytest.mark.parametrize("folder", TRAINING)
def test_a_token_of_the_hub_is_read_from_a_secret_that_need_not_exist(folder: str) -> None:
    (container,) = pod_templates(folder)[0]["spec"]["containers"]
    [token] = [entry["valueFrom"]["secretKeyRef"] for entry in container["env"] if entry["name"] == "HF_TOKEN"]
    assert token == {"name": "distrinews-hub", "key": "HF_TOKEN", "optional": True}


@pytest.mark.parametrize("folder", [*TRAINING, SCORING])
def test_a_pod_requests_the_disk_that_its_scratch_volume_may_take(folder: str) -> None:
    [template] = pod_templates(folder)
    (container,) = template["spec"]["containers"]
    resources = (
        only(folder, "TrainJob")["spec"]["trainer"]["resourcesPerNode"]
        if folder == "training/kubeflow"
        else container["resources"]
    )
    on_disk = [
        one["emptyDir"] for one in template["spec"]["volumes"] if "medium" not in one.get("emptyDir", {"medium": ""})
    ]
    for kind in ("requests", "limits"):
        assert _gibibytes(resources[kind]["ephemeral-storage"]) > sum(_gibibytes(one["sizeLimit"]) for one in on_disk)


def _gibibytes(size: str) -> int:
    assert size.endswith("Gi")
    return int(size.removesuffix("Gi"))


@pytest.mark.parametrize("folder", TRAINING)
def test_no_variable_of_a_pod_is_taken_for_a_flag(folder: str) -> None:
    pod = pod_templates(folder)[0]["spec"]
    # Kubernetes makes DISTRINEWS_PORT and the like of the server's Service, which training would refuse.
    assert pod["enableServiceLinks"] is False
    assert not [one for one in pod["containers"][0]["env"] if one["name"].startswith(ENVIRONMENT_PREFIX)]


@pytest.mark.parametrize("folder", TRAINING)
def test_checkpoints_go_to_the_volume_that_all_nodes_share(folder: str) -> None:
    pod, claim = pod_templates(folder)[0]["spec"], only("storage", "PersistentVolumeClaim")
    shared = {volume["name"]: volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: shared[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert mounts[f"/app/{_config(folder).output_dir.parent}"] == claim["metadata"]["name"]


@pytest.mark.parametrize("folder", TRAINING)
def test_ranks_have_the_time_that_torchrun_gives_them_to_save(folder: str) -> None:
    assert pod_templates(folder)[0]["spec"]["terminationGracePeriodSeconds"] > 30


def test_the_pods_of_the_indexed_job_meet_at_the_first_of_them() -> None:
    torchrun, service = _torchrun("training/indexed-job"), only("training/indexed-job", "Service")
    name, subdomain = only("training/indexed-job", "Job")["metadata"]["name"], service["metadata"]["name"]
    port = {one["name"]: one["port"] for one in service["spec"]["ports"]}["rendezvous"]
    assert torchrun.rdzv_backend == "c10d"
    assert torchrun.rdzv_endpoint == f"{name}-0.{subdomain}:{port}"
    assert _job("training/indexed-job")["template"]["spec"]["subdomain"] == subdomain
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    # The Job's controller gives its pods this label.
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}


def test_the_indexed_job_has_a_pod_for_each_node_and_a_rank_for_each_gpu() -> None:
    job = _job("training/indexed-job")
    (container,) = job["template"]["spec"]["containers"]
    # torchrun reads PET_ and the name of a flag where the flag is not given.
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PET_NNODES", "PET_NPROC_PER_NODE"):
            patch.setenv(name, variables[name])
        torchrun = _torchrun("training/indexed-job")
    assert torchrun.nnodes == str(job["completions"]) == str(job["parallelism"])
    assert torchrun.nproc_per_node == container["resources"]["limits"]["nvidia.com/gpu"]


def test_the_train_job_runs_in_our_runtime_under_a_name_that_no_service_has() -> None:
    job, runtime = only("training/kubeflow", "TrainJob"), only("training/kubeflow", "TrainingRuntime")
    assert job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    services = [only(folder, "Service")["metadata"]["name"] for folder in ("base", "training/indexed-job")]
    assert job["metadata"]["name"] not in services


def _scorer() -> dict[str, Any]:
    return pod_templates(SCORING)[0]["spec"]


def test_every_pod_of_the_indexed_job_runs_the_same_command() -> None:
    job = _job(SCORING)
    (container,) = _scorer()["containers"]

    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] > 1
    assert container["command"] == ["python", "-m", "inference.score"]
    assert "JOB_COMPLETION_INDEX" not in str(container)


def test_rows_lie_on_a_volume_that_all_nodes_write_and_the_model_on_one_that_none_does() -> None:
    claim = only("scoring/storage", "PersistentVolumeClaim")
    claims = {volume["name"]: volume.get("persistentVolumeClaim", {}) for volume in _scorer()["volumes"]}
    (container,) = _scorer()["containers"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    source, target, model = container["args"]

    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claims[mounts["/rows"]["name"]] == {"claimName": claim["metadata"]["name"]}
    assert source.startswith("/rows/")
    assert target.startswith("/rows/")
    trained = only("storage", "PersistentVolumeClaim")["metadata"]["name"]
    assert claims[mounts["/app/checkpoints"]["name"]] == {"claimName": trained, "readOnly": True}
    assert mounts["/app/checkpoints"]["readOnly"] is True
    assert model.startswith("--model=checkpoints/")


def test_an_input_that_cannot_be_read_fails_the_job_at_once_and_a_lost_node_never_does() -> None:
    lost, unusable = _job(SCORING)["podFailurePolicy"]["rules"]

    assert lost["action"] == "Ignore"
    assert lost["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert unusable["action"] == "FailJob"
    assert unusable["onExitCodes"] == {"containerName": "scorer", "operator": "In", "values": [EXIT_USER_ERROR]}
    assert unusable["onExitCodes"]["containerName"] == _scorer()["containers"][0]["name"]
