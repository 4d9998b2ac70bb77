"""Build an image with docker, podman or buildah, whichever is there.

python deployment/build_image.py --model FOLDER [--tag NAME] [-- FLAGS]: the server with that model.

python deployment/build_image.py --torch cuda|cpu ...: PyTorch with training and serving, without a model.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only its own folder by itself

from common.errors import ForeseenError, OneLineParser, run_command
from deployment.image_context import (
    DOCKERFILE,
    TORCH_BUILDS,
    TORCH_DOCKERFILE,
    DeploymentError,
    build_arguments,
    copy_files,
    exported_artefacts,
    image_files,
    torch_image_files,
    version,
)

BUILDERS = ("docker", "podman", "buildah")
_ANSWER_SECONDS = 20


@dataclass(frozen=True)
class Image:
    """A Dockerfile, the files of its context, its arguments, and the image's names."""

    dockerfile: Path
    files: dict[str, Path]
    arguments: dict[str, str]
    tags: list[str]


class BuildFailure(ForeseenError): ...


def main() -> None:
    options = _parse()
    builder = options.builder or find_builder()
    image = torch_image(options.torch, options.tag) if options.torch else serving_image(options.model, options.tag)
    print(f"Building {image.tags[0]} with {builder} from {len(image.files)} files ...", flush=True)
    if code := build(builder, image, options.flags):
        raise BuildFailure(f"{builder} ended with code {code}, its last lines say why", code="image-build-failed")
    print(f"Built {' and '.join(image.tags)}")


def _parse() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=Path, help="the model folder to serve, exported for native, onnx or both")
    what.add_argument("--torch", choices=TORCH_BUILDS, help="which PyTorch; cpu needs an index that has it")
    parser.add_argument("--tag", help="default: distrinews:VERSION or distrinews-torch:VERSION, and latest")
    parser.add_argument("--builder", choices=BUILDERS, help="default: the first of these that is installed and answers")
    parser.add_argument("flags", nargs="*", help="after --: for the builder, such as --build-arg PYTHON_VERSION=3.12")
    return parser.parse_args()


def find_builder() -> str:
    """The first of `BUILDERS` that is installed and responds."""
    for name in BUILDERS:
        if shutil.which(name) and _answers(name):
            return name
    raise DeploymentError(
        f"none of {', '.join(BUILDERS)} is installed and running; install or start one of them", code="image-no-builder"
    )


def _answers(name: str) -> bool:
    # docker is of no use without its daemon, nor podman on a Mac without its machine.
    try:
        return subprocess.run([name, "info"], capture_output=True, timeout=_ANSWER_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def serving_image(model: Path, tag: str | None) -> Image:
    if "onnx" not in exported_artefacts(model):
        remedy = f"python -m inference.export {model} --engine onnx adds what others need"
        print(f"note: without onnx the image serves only on x86-64 with AVX2 and on ARM; {remedy}")
    return Image(DOCKERFILE, image_files(model), build_arguments(model), _tags(tag or "distrinews"))


def torch_image(build: str, tag: str | None) -> Image:
    arguments = {"TORCH": build, "VERSION": version()}
    return Image(TORCH_DOCKERFILE, torch_image_files(), arguments, _tags(tag or "distrinews-torch"))


def _tags(name: str) -> list[str]:
    # A colon before the last slash belongs to a registry's port.
    has_tag = ":" in name.rpartition("/")[2]
    return [name] if has_tag else [f"{name}:{version()}", f"{name}:latest"]


def build(builder: str, image: Image, flags: list[str]) -> int:
    """Build an image in a context of its own; returns the builder's exit code."""
    command = [builder, "build", "--file", str(image.dockerfile)]
    if builder != "docker":
        # The OCI format has no HEALTHCHECK, and buildah keeps no layers unless it is asked to.
        command += ["--format", "docker", "--layers"]
    for tag in image.tags:
        command += ["--tag", tag]
    for name, value in image.arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    with tempfile.TemporaryDirectory(prefix="distrinews-image-") as context:
        copy_files(image.files, Path(context))
        return subprocess.run([*command, *flags, context]).returncode


if __name__ == "__main__":
    run_command(main)
