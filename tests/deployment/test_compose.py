"""The composition is sound, agrees with the image and the settings, and gives a service no right it does not need."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from inference.settings import Settings
from tests.deployment.documented import REPOSITORY

FILE = REPOSITORY / "deployment" / "compose.yaml"
COMPOSED = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, Any] = COMPOSED["services"]
DOCKERFILE = (FILE.parent / "Dockerfile").read_text()
COMPOSE = Path(sys.executable).with_name("docker-compose")


def _complaint_of_compose(file: Path) -> str:
    """What Docker Compose finds wrong; the wheel's command loses its exit code."""
    command = [COMPOSE, "-f", file, "--profile", "alerts", "config", "--quiet"]
    return subprocess.run(command, capture_output=True, text=True).stderr


def test_docker_compose_takes_the_file() -> None:
    assert _complaint_of_compose(FILE) == ""


def test_docker_compose_refuses_a_misspelt_field(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text(FILE.read_text().replace("cap_drop", "cap_dropped"))
    assert "cap_dropped" in _complaint_of_compose(tmp_path / "compose.yaml")


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_bounds_and_no_rights_it_does_not_need(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory", "pids"}
    assert all(
        volume.endswith(":ro") or volume.split(":")[0] in COMPOSED["volumes"] for volume in service.get("volumes", ())
    )


def test_every_service_has_a_health_check_and_the_server_that_of_its_image() -> None:
    assert {name for name, service in SERVICES.items() if "healthcheck" not in service} == {"server"}
    assert "HEALTHCHECK" in DOCKERFILE


@pytest.mark.parametrize("name", ["prometheus", "alertmanager", "grafana"])
def test_what_watches_is_pinned_and_seen_from_this_machine_alone(name: str) -> None:
    assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", SERVICES[name]["image"])
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])


def test_the_services_meet_on_a_network_without_a_way_out() -> None:
    assert COMPOSED["networks"]["monitoring"] == {"internal": True}
    assert all("monitoring" in service["networks"] for service in SERVICES.values())


def test_the_port_is_the_same_in_settings_image_composition_and_prometheus() -> None:
    port = Settings.model_fields["port"].default
    prometheus = yaml.safe_load((FILE.parent / "prometheus" / "prometheus.yml").read_text())
    targets = [
        target
        for job in prometheus["scrape_configs"]
        for one in job.get("static_configs", ())
        for target in one["targets"]
    ]
    assert SERVICES["server"]["ports"] == [f"{port}:{port}"]
    assert f"EXPOSE {port}" in DOCKERFILE
    assert targets == [f"server:{port}"]


def test_the_image_needs_neither_another_user_nor_a_place_to_write() -> None:
    assert re.search(r"^USER 1000", DOCKERFILE, re.MULTILINE)
    assert SERVICES["server"].keys().isdisjoint({"user", "volumes", "tmpfs"})


def test_variables_are_settings_of_the_server() -> None:
    assert {name.lower() for name in SERVICES["server"]["environment"]} <= Settings.model_fields.keys()


def test_a_stop_leaves_time_to_drain_and_to_finish() -> None:
    fields = Settings.model_fields
    assert int(SERVICES["server"]["stop_grace_period"].removesuffix("s")) > (
        fields["drain_seconds"].default + fields["grace_seconds"].default
    )


def test_what_is_mounted_is_there_and_where_the_commands_look() -> None:
    for service in SERVICES.values():
        for source in (volume.split(":")[0] for volume in service.get("volumes", ())):
            assert source in COMPOSED["volumes"] or (FILE.parent / source).is_dir()
    for name in ("prometheus", "alertmanager"):
        assert "./prometheus:/etc/prometheus:ro" in SERVICES[name]["volumes"]
        assert f"--config.file=/etc/prometheus/{name}.yml" in SERVICES[name]["command"]


def test_alerts_go_to_the_alertmanager_that_only_its_profile_starts_and_from_there_to_the_address_in_a_secret() -> None:
    config, routes = (
        yaml.safe_load((FILE.parent / "prometheus" / name).read_text())
        for name in ("prometheus.yml", "alertmanager.yml")
    )
    ((found,),) = (one["dns_sd_configs"] for one in config["alerting"]["alertmanagers"])
    service = SERVICES[found["names"][0]]
    assert service["profiles"] == ["alerts"]
    assert service["ports"] == [f"127.0.0.1:{found['port']}:{found['port']}"]
    receivers = {one["name"]: one for one in routes["receivers"]}
    (slack,) = receivers[routes["route"]["receiver"]]["slack_configs"]
    (secret,) = service["secrets"]
    assert slack["api_url_file"] == f"/run/secrets/{secret}"
    ignored = (REPOSITORY / ".gitignore").read_text().splitlines()
    assert f"/deployment/{Path(COMPOSED['secrets'][secret]['file']).name}" in ignored
