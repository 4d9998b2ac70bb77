"""The manifests of bulk scoring agree with each other, and with the storage that training writes."""

from __future__ import annotations

from typing import Any

from common.errors import EXIT_USER_ERROR
from tests.deployment.manifests import SCORING, only, pod_templates


def _job() -> dict[str, Any]:
    return only(SCORING, "Job")["spec"]


def _pod() -> dict[str, Any]:
    return pod_templates(SCORING)[0]["spec"]


def test_every_pod_of_the_indexed_job_runs_the_same_command() -> None:
    job = _job()
    (container,) = _pod()["containers"]

    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] > 1
    assert container["command"] == ["python", "-m", "inference.score"]
    assert "JOB_COMPLETION_INDEX" not in str(container)


def test_rows_lie_on_a_volume_that_all_nodes_write_and_the_model_on_one_that_none_does() -> None:
    claim = only("scoring/storage", "PersistentVolumeClaim")
    claims = {volume["name"]: volume.get("persistentVolumeClaim", {}) for volume in _pod()["volumes"]}
    (container,) = _pod()["containers"]
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
    lost, unusable = _job()["podFailurePolicy"]["rules"]

    assert lost["action"] == "Ignore"
    assert lost["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert unusable["action"] == "FailJob"
    assert unusable["onExitCodes"] == {"containerName": "scorer", "operator": "In", "values": [EXIT_USER_ERROR]}
    assert unusable["onExitCodes"]["containerName"] == _pod()["containers"][0]["name"]
