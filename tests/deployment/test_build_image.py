"""Which builder is taken and what it is told; the builders are scripts that write down their arguments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deployment.image_context import ROOT, version
from tests.deployment.documented import documented

Build = Callable[..., subprocess.CompletedProcess[str]]
SCRIPT = """#!/bin/sh
[ "$1" = info ] && exit {info}
for last; do :; done
echo "{name} $*" >>{folder}/calls
(cd "$last" && find . -type f -printf '%m %P\\n') >{folder}/context
exit {build}
"""


def _install(folder: Path, name: str, info: int = 0, build: int = 0) -> None:
    (folder / name).write_text(SCRIPT.format(name=name, folder=folder, info=info, build=build))
    (folder / name).chmod(0o755)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Run the script where no builder is installed but the test's own."""
    for tool in ("sh", "find"):
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
    assert f"Building distrinews:{version()} with podman" in done.stdout
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.startswith("podman build ")
    assert "--format docker" in call  # else the image has no HEALTHCHECK


def test_docker_goes_first_and_is_told_tags_arguments_and_flags(
    build: Build, exported_folder: Path, tmp_path: Path
) -> None:
    for name in ("docker", "podman", "buildah"):
        _install(tmp_path, name)
    done = build("--model", str(exported_folder), "--", "--build-arg", "PYTHON_VERSION=3.12")
    assert done.returncode == 0, done.stderr
    call = (tmp_path / "calls").read_text()
    assert call.startswith("docker build ")
    assert f"--tag distrinews:{version()} --tag distrinews:latest" in call
    assert "--build-arg MODEL=model" in call
    assert "--build-arg PYTHON_VERSION=3.12" in call


@pytest.mark.parametrize(
    ("tag", "wanted"),
    [
        ("registry.example:5000/news", f"--tag registry.example:5000/news:{version()}"),
        ("registry.example:5000/news:blue", "--tag registry.example:5000/news:blue --build-arg"),
    ],
)
def test_a_name_without_a_tag_gets_the_version(
    build: Build, exported_folder: Path, tmp_path: Path, tag: str, wanted: str
) -> None:
    _install(tmp_path, "podman")
    assert build("--model", str(exported_folder), "--tag", tag).returncode == 0
    assert wanted in (tmp_path / "calls").read_text()


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
        documented("docs/OPERATIONS.md", "tagged-image"),
    ],
    ids=["image", "image-flags", "tagged-image"],
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
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == len(commands.splitlines())
    flags = re.findall(r'BUILD_FLAGS="(.*)"', commands)
    assert all(flag in call for flag, call in zip(flags, calls, strict=False))
