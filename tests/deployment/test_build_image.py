"""Which builder is taken and what it is told; the builders are scripts that write down their arguments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from common.version import version
from deployment.image_context import ROOT, build_arguments
from tests.deployment.documented import documented
from tests.inference.cascades import make_cascade

Build = Callable[..., subprocess.CompletedProcess[str]]
SCRIPT = """#!/bin/sh
[ "$1" = info ] && exit {info}
if [ "$1" = image ]; then echo "[\\"other@sha256:0\\", \\"$(cat {folder}/pushed)@{digest}\\"]"; exit; fi
echo "{name} $*" >>{folder}/calls
if [ "$1" = push ]; then
    for last; do echo "${{last%:*}}" >{folder}/pushed; done
    [ "$2" = --digestfile ] && echo "{digest}" >"$3"
    exit {push}
fi
for last; do :; done
(cd "$last" && find . -type f -printf '%m %P\\n') >{folder}/context
exit {build}
"""


DIGEST = "sha256:" + "ab" * 32


def _install(folder: Path, name: str, info: int = 0, build: int = 0, push: int = 0) -> None:
    script = SCRIPT.format(name=name, folder=folder, info=info, build=build, push=push, digest=DIGEST)
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)


def _tag(model: Path) -> str:
    """The version and the start of the model's hash."""
    return f"{version()}-{build_arguments(model)['MODEL_SHA256'][:12]}"


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Run the script where no builder is installed but the test's own."""
    for tool in ("sh", "find", "cat"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "deployment/build_image.py", *arguments]
        return subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)

    return run


def test_without_a_builder_one_line_says_so(build: Build, exported_folder: Path) -> None:
    done = build("--model", str(exported_folder))
    line = "none of docker, podman, buildah is installed and running; install or start one of them"
    wanted = f"error: {line} [image-no-builder]\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", wanted)


def test_docker_without_its_daemon_is_passed_over(build: Build, exported_folder: Path, tmp_path: Path) -> None:
    _install(tmp_path, "docker", info=1)
    _install(tmp_path, "podman")
    _install(tmp_path, "buildah")
    done = build("--model", str(exported_folder))
    assert done.returncode == 0, done.stderr
    assert f"Building distrinews:{_tag(exported_folder)} with podman" in done.stdout
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.startswith("podman build ")
    assert "--format docker" in call  # else the image has no HEALTHCHECK


def test_docker_goes_first_and_is_told_tags_arguments_and_flags(
    build: Build, exported_folder: Path, tmp_path: Path
) -> None:
    for name in ("docker", "podman", "buildah"):
        _install(tmp_path, name)
    done = build("--model", str(exported_folder), "--", "--build-arg", "BASE=python:3.12-slim")
    assert done.returncode == 0, done.stderr
    call = (tmp_path / "calls").read_text()
    assert call.startswith("docker build ")
    assert f"--tag distrinews:{_tag(exported_folder)} --tag distrinews:latest" in call
    assert "--build-arg MODEL=model" in call
    assert "--build-arg BASE=python:3.12-slim" in call


@pytest.mark.parametrize("name", ["registry.example:5000/news", "registry.example:5000/news:blue"])
def test_a_name_without_a_tag_gets_version_and_model(
    build: Build, exported_folder: Path, tmp_path: Path, name: str
) -> None:
    _install(tmp_path, "podman")
    assert build("--model", str(exported_folder), "--tag", name).returncode == 0
    wanted = name if name.endswith("blue") else f"{name}:{_tag(exported_folder)} --tag {name}:latest"
    assert f"--tag {wanted} --build-arg" in (tmp_path / "calls").read_text()


def test_another_model_of_the_same_version_gets_another_tag(
    build: Build, exported_folder: Path, exported_copy: Path, tmp_path: Path
) -> None:
    (exported_copy / "model.safetensors").unlink()
    manifest = exported_copy / "onnx" / "manifest.json"
    weights = build_arguments(exported_folder)["MODEL_SHA256"]
    manifest.write_text(manifest.read_text().replace(weights, "f" * 64))
    _install(tmp_path, "docker")
    for model in (exported_folder, exported_copy):
        assert build("--model", str(model)).returncode == 0
    first, second = re.findall(r"--tag distrinews:(\S+) --tag", (tmp_path / "calls").read_text())
    assert first != second == f"{version()}-{'f' * 12}"


def test_a_cascade_gets_a_tag_of_its_own_and_a_note_if_it_is_slow_on_some_processors(
    build: Build, exported_folder: Path, tmp_path: Path
) -> None:
    _install(tmp_path, "docker")
    onnx, news = exported_folder / "onnx", ROOT / "checkpoints" / "news"
    notes = []
    for name, small in (("everywhere", onnx), ("native", news)):
        cascade = make_cascade(onnx, small, tmp_path / name)
        done = build("--model", str(cascade))
        assert done.returncode == 0, done.stderr
        assert f"Building distrinews:{_tag(cascade)} with docker" in done.stdout
        notes.append(done.stdout.count("note: this cascade is fast only on x86-64 with AVX2 and on ARM"))
    assert notes == [0, 1]
    assert "644 model/small/model_int8.safetensors" in (tmp_path / "context").read_text()


def test_extras_are_in_the_tag_and_their_locks_in_the_context(
    build: Build, exported_folder: Path, tmp_path: Path
) -> None:
    _install(tmp_path, "docker")
    assert build("--model", str(exported_folder), "--with", "s3,otel").returncode == 0
    call = (tmp_path / "calls").read_text()
    assert f"--tag distrinews:{_tag(exported_folder)}-otel-s3 " in call
    assert "--build-arg WITH=otel s3 " in call
    assert "deployment/requirements-with-s3.txt" in (tmp_path / "context").read_text()


def test_the_images_of_two_architectures_do_not_share_a_tag(
    build: Build, exported_folder: Path, tmp_path: Path
) -> None:
    _install(tmp_path, "docker")
    assert build("--model", str(exported_folder), "--tag", "registry.example/news", "--suffix", "arm64").returncode == 0
    wanted = f"--tag registry.example/news:{_tag(exported_folder)}-arm64 --build-arg"
    assert wanted in (tmp_path / "calls").read_text()


@pytest.mark.parametrize(
    ("extras", "line"),
    [("ray", "--with ray: needs --torch"), ("otel,gcs", "'gcs' is not one of otel, s3, postgres, ray")],
)
def test_an_extra_that_the_image_cannot_have_is_refused(
    build: Build, exported_folder: Path, extras: str, line: str
) -> None:
    done = build("--model", str(exported_folder), "--with", extras)
    assert done.returncode == 2
    assert line in done.stderr


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_a_pushed_image_is_named_by_the_digest_that_an_overlay_takes(
    build: Build, exported_folder: Path, tmp_path: Path, builder: str
) -> None:
    _install(tmp_path, builder)
    done = build("--model", str(exported_folder), "--tag", "registry.example:5000/news", "--push")
    assert done.returncode == 0, done.stderr
    _, pushed = (tmp_path / "calls").read_text().splitlines()
    assert pushed.endswith(f"registry.example:5000/news:{_tag(exported_folder)}")  # and not latest
    assert f"registry.example:5000/news@{DIGEST}" in done.stdout.splitlines()
    overlay = yaml.safe_load(done.stdout[done.stdout.index("images:") :])
    assert overlay == {"images": [{"name": "distrinews", "newName": "registry.example:5000/news", "digest": DIGEST}]}


def test_an_image_that_the_registry_refuses_ends_with_one_line(
    build: Build, exported_folder: Path, tmp_path: Path
) -> None:
    _install(tmp_path, "podman", push=125)
    done = build("--model", str(exported_folder), "--push")
    assert done.returncode == 1
    assert "[image-push-failed]" in done.stderr


def test_files_that_only_their_owner_may_read_are_readable_in_the_image(
    build: Build, exported_copy: Path, tmp_path: Path
) -> None:
    (exported_copy / "onnx" / "model.onnx").chmod(0o600)
    _install(tmp_path, "podman")
    assert build("--model", str(exported_copy)).returncode == 0
    assert "644 model/onnx/model.onnx" in (tmp_path / "context").read_text().splitlines()


def test_a_failing_builder_ends_with_one_line_and_its_context_is_removed(
    build: Build, exported_folder: Path, tmp_path: Path
) -> None:
    _install(tmp_path, "podman", build=125)
    done = build("--model", str(exported_folder))
    assert (done.returncode, done.stderr) == (
        1,
        "error: podman ended with code 125, its last lines say why [image-build-failed]\n",
    )
    assert not Path((tmp_path / "calls").read_text().split()[-1]).exists()


def test_the_torch_image_needs_no_model_and_takes_the_build_that_was_asked_for(build: Build, tmp_path: Path) -> None:
    _install(tmp_path, "docker")
    done = build("--torch", "cpu")
    assert done.returncode == 0, done.stderr
    call = (tmp_path / "calls").read_text()
    assert f"--tag distrinews-torch:{version()}" in call
    assert "--build-arg TORCH=cpu" in call
    assert "training/train_ddp.py" in (tmp_path / "context").read_text()


@pytest.mark.parametrize(
    "commands",
    [
        documented("docs/deployment.md", "image"),
        documented("docs/deployment.md", "image-flags"),
        documented("docs/deployment.md", "push"),
        documented("docs/OPERATIONS.md", "tagged-image"),
    ],
    ids=["image", "image-flags", "push", "tagged-image"],
)
def test_the_documented_commands_start_a_build(commands: str, exported_folder: Path, tmp_path: Path) -> None:
    _install(tmp_path, "docker")
    installed = tmp_path / "installed"
    installed.touch()
    os.utime(installed, (2**32, 2**32))  # newer than whatever it is made from
    # make's own Python is that of the test, where everything is installed.
    bin_folder = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{tmp_path}:{bin_folder}:{os.environ['PATH']}"}
    environment |= {"MAKEFLAGS": f"BIN={bin_folder} INSTALLED={installed} INSTALLED_DEV={installed}"}
    for line in re.sub(r"checkpoints/\w+", str(exported_folder), commands).splitlines():
        done = subprocess.run(line, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    calls = [call for call in (tmp_path / "calls").read_text().splitlines() if " push " not in call]
    assert len(calls) == len(commands.splitlines())
    flags = re.findall(r'BUILD_FLAGS="(.*)"', commands)
    assert all(flag in call for flag, call in zip(flags, calls, strict=False))
