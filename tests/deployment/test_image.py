"""The served image: built as `make image` builds it, and run in its own root, which nothing can write to."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from benchmarks import containers
from common.version import version
from deployment.build_image import build, serving_image
from deployment.image_context import ROOT
from inference import export
from tests.inference.servers import free_port
from tests.processes import wait_until

BASE = os.environ.get("BASE", "docker.io/library/python:3.11-slim")  # by tag: a stand-in has no digest
IMAGE = "localhost/distrinews-test:latest"
MAX_BYTES = 350e6  # beside the base image and the model

pytestmark = pytest.mark.slow


def build_flags() -> list[str]:
    """What a build without a registry needs; pip in it takes this machine's own settings and certificates."""
    certificates = [Path(os.environ.get(name, "")) for name in ("PIP_CERT", "SSL_CERT_FILE")]
    places = {Path("/etc/pip.conf"), *(path.parent for path in certificates if path.is_file())}
    mounts = [f"{place}:{place}:ro" for place in sorted(places) if place.exists()]
    return [
        "--build-arg",
        f"BASE={BASE}",
        "--pull-never",
        "--isolation",
        "chroot",
        *(word for mount in mounts for word in ("-v", mount)),
    ]


@pytest.fixture(scope="module")
def exported(exported_folder: Path, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with artefacts for both engines of the image."""
    folder = Path(shutil.copytree(exported_folder, tmp_path_factory.mktemp("exported") / "tiny"))
    if platform.machine() == "x86_64":
        export.main([str(folder), "--engine", "native", "--rows", str(rows_file), "--max_drop", "100"])
    return folder


@pytest.fixture(scope="module")
def container(exported: Path) -> Iterator[containers.Container]:
    if reason := containers.why_not():
        pytest.skip(reason)
    if not containers.has_image(BASE):
        pytest.skip(f"no local {BASE}: buildah pull {BASE}")
    command = [
        sys.executable,
        "deployment/build_image.py",
        "--model",
        exported,
        "--builder",
        "buildah",
        "--with",
        "otel",
    ]
    done = subprocess.run(
        [*command, "--tag", IMAGE, "--", *build_flags()], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with containers.opened(IMAGE) as opened:
        yield opened


class Running:
    """The image's own command, running."""

    def __init__(self, container: containers.Container, log: Path) -> None:
        self.port = free_port()
        self.log = log
        with log.open("w") as output:
            command = container.command(PORT=str(self.port))
            self.launcher = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def is_ready(self) -> bool:
        assert self.launcher.poll() is None, self.log.read_text()
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture
def running(container: containers.Container, tmp_path: Path) -> Iterator[Running]:
    running = Running(container, tmp_path / "log")
    try:
        wait_until(running.is_ready, 120)
        yield running
    finally:
        running.client.close()
        running.launcher.kill()  # its first process goes with it
        running.launcher.wait()


def test_it_answers_texts_and_shows_its_page_with_a_root_that_nothing_can_write(running: Running) -> None:
    one = running.client.post("/predict", json={"text": "Oil prices rise again"}).json()
    many = running.client.post("/predict/batch", json={"texts": ["Goal!", "Ministers meet in Geneva"]}).json()
    explained = running.client.post("/explain", json={"text": "Oil prices rise again"}).json()
    assert one["label"] in one["probabilities"]
    assert len(many) == 2
    assert explained["label"] == one["label"]
    assert running.client.get("/health").status_code == 200
    assert "<title>" in running.client.get("/demo").text
    assert "distrinews_requests_total" in running.client.get("/metrics").text


def test_it_serves_with_the_fastest_engine_of_this_processor(running: Running) -> None:
    from inference.engines import native

    wanted = "native" if native.is_supported()[0] else "onnx"
    assert running.client.get("/model").json()["engine"]["engine"].startswith(wanted)


def test_sigterm_drains_and_ends_with_exit_code_0(running: Running) -> None:
    assert containers.stop(running.launcher) == 0
    assert "SIGTERM: not ready" in running.log.read_text()


def test_the_health_check_follows_readiness(container: containers.Container, running: Running) -> None:
    kind, *check = container.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    assert container.run(*check, PORT=str(running.port)).returncode == 0
    assert container.run(*check, PORT=str(free_port())).returncode == 1


def test_no_client_chooses_its_address_unless_a_proxy_is_named(container: containers.Container) -> None:
    script = """if True:
        import asyncio, os
        from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

        async def app(scope, receive, send):
            print(scope["client"][0])

        claimed_and_seen = [(b"x-forwarded-for", b"6.6.6.6, 203.0.113.9")]
        scope = {"type": "http", "client": ("10.16.3.58", 1), "headers": claimed_and_seen}
        asyncio.run(ProxyHeadersMiddleware(app, os.environ["FORWARDED_ALLOW_IPS"])(scope, None, None))
    """
    assert container.run("python", "-c", script).stdout.strip() == "10.16.3.58"
    named = container.run("python", "-c", script, FORWARDED_ALLOW_IPS="10.16.0.0/16")
    assert named.stdout.strip() == "203.0.113.9"


def test_it_runs_as_user_1000_who_can_write_nothing(container: containers.Container) -> None:
    found = container.run("sh", "-c", "id -u; id -g; find / -xdev -writable -not -type l")
    assert found.stdout.split() == ["1000", "1000"]


def test_code_and_model_belong_to_root_and_nobody_else_may_write_them(container: containers.Container) -> None:
    for folder in ("app", "opt/venv"):
        for path in [container.root / folder, *(container.root / folder).rglob("*")]:
            found = path.lstat()
            assert (found.st_uid, found.st_gid) == (0, 0), path
            if not path.is_symlink():
                assert found.st_mode & 0o022 == 0, path
                assert found.st_mode & 0o444 == 0o444, path


def test_nothing_in_it_can_install_packages(container: containers.Container) -> None:
    found = [
        path
        for folder in ("usr", "opt")
        for name in ("pip", "setuptools", "ensurepip", "pip-*.dist-info", "setuptools-*.dist-info", "pip3*")
        for path in (container.root / folder).rglob(name)
        if "python" in str(path) or path.parent.name == "bin"
    ]
    assert found == []
    for python in ("python", "/usr/bin/python3", "/usr/local/bin/python3"):
        assert container.run(python, "-m", "pip", "--version").returncode != 0


def test_it_has_the_extra_that_was_asked_for(container: containers.Container) -> None:
    script = "import opentelemetry.sdk.trace, opentelemetry.exporter.otlp.proto.http.trace_exporter"
    done = container.run("python", "-c", script)
    assert done.returncode == 0, done.stderr
    assert not (container.root / "opt/venv/lib/python3.11/site-packages/s3fs").exists()


def test_it_has_no_pytorch_no_trainer_no_compiler_and_no_cache(container: containers.Container) -> None:
    packages = container.root / "opt/venv/lib/python3.11/site-packages"
    assert (packages / "onnxruntime").is_dir()
    for name in ("torch", "transformers", "pip", "huggingface_hub"):
        assert not (packages / name).exists(), name
    assert sorted(path.name for path in (container.root / "app").iterdir()) == ["common", "inference", "model"]
    assert not list((container.root / "app/model").glob("*.safetensors"))
    assert container.run("sh", "-c", "command -v gcc cc c++").stdout == ""
    assert not list((container.root / "root").glob(".cache"))


def test_every_module_has_its_byte_code_since_none_can_be_written_later(container: containers.Container) -> None:
    script = "import sys, inference.app; print(*(getattr(m, '__cached__', None) for m in sys.modules.values()))"
    cached = container.run("python", "-c", script).stdout.split()
    ours = [path for path in cached if path.startswith(("/app", "/opt"))]
    assert len(ours) > 100
    assert [path for path in ours if not (container.root / path[1:]).is_file()] == []


def test_the_kernels_are_compiled_for_its_python(container: containers.Container) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the kernels are for x86-64")
    script = "from inference.engines.native.library import load_library; load_library()"
    assert container.run("python", "-c", script).returncode == 0


def test_its_bill_lists_what_is_in_it(container: containers.Container, tmp_path: Path) -> None:
    command = [sys.executable, "deployment/write_sbom.py", "--rootfs", container.root, "--output", tmp_path]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    components = json.loads((tmp_path / "image.cdx.json").read_text())["components"]
    names = {component["name"] for component in components}
    assert {"libc6", "uvicorn", "opentelemetry-sdk", "app/model/onnx/manifest.json"} <= names
    assert any(name.startswith("app/inference/engines/native/_kernels") for name in names)
    assert {"python", "libpython3.11-stdlib"} & names  # the public image's own, or Debian's
    assert not {"pip", "setuptools"} & names


def test_its_labels_say_version_and_model(container: containers.Container, exported: Path) -> None:
    labels = container.config["Labels"]
    manifest = json.loads((exported / "onnx" / "manifest.json").read_text())
    assert labels["org.opencontainers.image.version"] == version()
    assert labels["org.opencontainers.image.base.name"] == BASE
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["distrinews.model.sha256"] == manifest["source"]["weights_sha256"]


def test_it_says_how_it_is_run(container: containers.Container) -> None:
    config = container.config
    assert config["Cmd"] == ["python", "-m", "inference.serve"]
    assert (config["User"], config["WorkingDir"], config["StopSignal"]) == ("1000:1000", "/app", "SIGTERM")
    assert list(config["ExposedPorts"]) == ["7860/tcp"]


def test_it_is_small_beside_its_base_and_its_model(container: containers.Container) -> None:
    folders = [container.root / "opt/venv", container.root / "app/inference"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    num_bytes = sum(path.stat().st_size for path in files)
    print(f"{num_bytes / 1e6:.0f} MB beside base and model")
    assert num_bytes <= MAX_BYTES


def test_a_change_of_a_source_file_leaves_the_layer_with_the_packages(
    container: containers.Container, exported: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    image = serving_image(exported, IMAGE, ("otel",))
    changed = tmp_path / "app.py"
    changed.write_text("# changed\n")
    files = image.files | {"inference/app.py": changed}
    assert build("buildah", replace(image, files=files), [*build_flags(), "--target", "builder"]) == 0
    steps = capfd.readouterr().out.split("STEP ")
    (packages,) = [step for step in steps if "--require-hashes" in step]
    (sources,) = [step for step in steps if "COPY inference inference" in step]
    assert "Using cache" in packages
    assert "Using cache" not in sources


def test_the_benchmark_writes_size_start_and_memory_of_every_engine(
    container: containers.Container, exported: Path, tmp_path: Path
) -> None:
    page = tmp_path / "image.md"
    command = [sys.executable, "-m", "benchmarks.image", "--models", exported, "--rounds", "1", "--output", page]
    done = subprocess.run([*command, "--", *build_flags()], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    starts = [line for line in page.read_text().splitlines() if line.startswith(f"| {exported.name}, ")]
    assert len(starts) == len([name for name in ("native", "onnx") if (exported / name).is_dir()])
    assert "Python 3.11" in page.read_text()
