"""`make base`, with a registry on this machine that asks for a token as the public one does."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deployment.image_context import DOCKERFILE, ROOT, TORCH_DOCKERFILE
from deployment.pin_base_images import PINNED
from tests.http_servers import JsonHandler, served_answers
from tests.inference.servers import free_port

OLD = "sha256:" + "0" * 64


@dataclass
class Registry:
    """Knows the tags in `manifests`, for those who bring the token that it gives away."""

    manifests: dict[str, bytes] = field(default_factory=dict)
    url: str = ""

    def answer(self, request: JsonHandler) -> Any:
        path, _, query = request.path.partition("?")
        if path == "/token":
            repository = re.fullmatch(r"scope=repository%3A(\S+)%3Apull&service=here", query)
            return {"token": repository and repository[1]}
        if request.headers["Authorization"] is None:
            repository = path.removeprefix("/v2/").partition("/manifests/")[0]
            challenge = f'Bearer realm="{self.url}/token",scope="repository:{repository}:pull",service="here"'
            return request.send(401, b"", {"WWW-Authenticate": challenge})
        assert "image.index" in request.headers["Accept"]
        return self.manifests[path] if path in self.manifests else request.send(404, b"")


@pytest.fixture
def registry() -> Iterator[Registry]:
    registry = Registry()
    with served_answers(registry.answer) as registry.url:
        yield registry


def _pin(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "deployment/pin_base_images.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def _list_for(*architectures: str) -> bytes:
    return json.dumps({"manifests": [{"platform": {"architecture": name}} for name in architectures]}).encode()


def test_every_pinned_base_gets_the_digest_that_its_tag_has_now(registry: Registry, tmp_path: Path) -> None:
    python, grafana = _list_for("amd64", "arm64"), _list_for("amd64", "arm64", "s390x")
    registry.manifests = {
        "/v2/library/python/manifests/3.11-slim": python,
        "/v2/grafana/grafana/manifests/12.4": grafana,
    }
    dockerfile, compose = tmp_path / "Dockerfile", tmp_path / "compose.yaml"
    dockerfile.write_text(f"ARG BASE=docker.io/library/python:3.11-slim@{OLD}\nFROM ${{BASE}}\n")
    compose.write_text(f"image: grafana/grafana:12.4@{OLD}\nimage: distrinews:latest\n")
    done = _pin("--registry", registry.url, dockerfile, compose)
    assert done.returncode == 0, done.stderr
    digests = [hashlib.sha256(content).hexdigest() for content in (python, grafana)]
    assert (
        dockerfile.read_text() == f"ARG BASE=docker.io/library/python:3.11-slim@sha256:{digests[0]}\nFROM ${{BASE}}\n"
    )
    assert compose.read_text() == f"image: grafana/grafana:12.4@sha256:{digests[1]}\nimage: distrinews:latest\n"
    assert f"was {OLD}" in done.stdout


@pytest.mark.parametrize("manifest", [None, _list_for("amd64")], ids=["no such tag", "no image for ARM"])
def test_no_file_changes_if_one_base_cannot_be_pinned(
    registry: Registry, tmp_path: Path, manifest: bytes | None
) -> None:
    registry.manifests = {"/v2/library/python/manifests/3.11-slim": _list_for("amd64", "arm64")}
    if manifest is not None:
        registry.manifests["/v2/other/base/manifests/1"] = manifest
    text = f"FROM python:3.11-slim@{OLD}\nFROM docker.io/other/base:1@{OLD}\n"
    (tmp_path / "Dockerfile").write_text(text)
    done = _pin("--registry", registry.url, tmp_path / "Dockerfile")
    assert done.returncode == 1
    assert re.fullmatch(r"error: docker\.io/other/base:1: .* the files are unchanged \[base-unknown\]\n", done.stderr)
    assert (tmp_path / "Dockerfile").read_text() == text


def test_without_the_registry_one_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM python:3.11-slim@{OLD}\n")
    done = _pin("--registry", f"http://127.0.0.1:{free_port()}", tmp_path / "Dockerfile")
    assert (done.returncode, done.stdout) == (1, "")
    assert "[base-unknown]" in done.stderr


@pytest.mark.parametrize("dockerfile", [DOCKERFILE, TORCH_DOCKERFILE], ids=lambda path: path.name)
def test_a_dockerfile_has_one_base_and_its_digest(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    (base,) = re.findall(r"^ARG BASE=(.+)$", text, re.MULTILINE)
    assert PINNED.fullmatch(base)
    assert {line.split()[1] for line in text.splitlines() if line.startswith("FROM ")} == {"${BASE}"}
