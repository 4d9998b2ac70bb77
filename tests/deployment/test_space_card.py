"""The Space card: what the hub reads of it, and the commands that it shows."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.deployment.card_rules import card_errors, front_matter
from tests.deployment.documented import REPOSITORY, documented
from tests.inference.conftest import StartServer

CARD = (REPOSITORY / "deployment" / "README.md").read_text()


def test_the_hub_would_accept_the_card() -> None:
    assert card_errors(CARD, "space") == []


def test_the_card_opens_the_page_on_the_port_that_the_image_serves() -> None:
    card = front_matter(CARD)

    assert (card["sdk"], card["app_port"], card["base_path"]) == ("docker", 7860, "/demo")
    assert (card["license"], card["suggested_hardware"]) == ("apache-2.0", "cpu-basic")
    assert "distrinews" in card["tags"]
    assert "EXPOSE 7860" in (REPOSITORY / "deployment" / "Dockerfile").read_text()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("colorFrom: blue", "colorFrom: teal"), "colorFrom"),
        (("emoji: 📰", "emoji: news"), "emoji"),
        (("base_path: /demo", "base_path: demo"), "base_path"),
        (("app_port: 7860", "app_port: seven"), "app_port"),
        (("pinned: false", "pined: false"), "pined"),
        (("headline is about", "headline is about, in a great many words more than fit"), "short_description"),
    ],
)
def test_a_card_that_the_hub_refuses_is_found(change: tuple[str, str], error: str) -> None:
    (found,) = card_errors(CARD.replace(*change), "space")

    assert error in found


def test_the_commands_of_the_card_work_as_they_stand(start_server: StartServer, exported_folder: Path) -> None:
    with start_server(exported_folder) as client:
        settings = {**os.environ, "SPACE": str(client.base_url).rstrip("/"), "NO_PROXY": "127.0.0.1"}
        commands = documented("deployment/README.md", "space-requests").replace("\ncurl", "\necho; curl")
        run = subprocess.run(["bash", "-euc", commands], env=settings, capture_output=True, text=True, timeout=60)

    assert run.returncode == 0, run.stderr
    single, batch, explained, model = (json.loads(line) for line in run.stdout.split("\n") if line)
    assert single["label"] in model["labels"]
    assert len(batch) == 2
    assert explained["words"]
