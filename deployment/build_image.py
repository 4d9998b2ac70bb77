"""Build an image with docker, podman or buildah, whichever is there.

python deployment/build_image.py --model FOLDER [--with otel,s3,postgres] [--tag NAME] [--push]
[-- FLAGS]: the server with that model.

python deployment/build_image.py --torch cuda|cpu [--with otel,s3,postgres,ray] ...: PyTorch with
training and serving, without a model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# A script finds only its own folder by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import ForeseenError, OneLineParser, run_command
from common.version import version
from deployment.image_context import (
    DOCKERFILE,
    EXTRAS,
    SERVING_EXTRAS,
    TORCH_BUILDS,
    TORCH_DOCKERFILE,
    DeploymentError,
    build_arguments,
    copy_files,
    exported_artefacts,
    image_files,
    torch_image_files,
)

BUILDERS = ("docker", "podman", "buildah")
_ANSWER_SECONDS = 20
_HOW_TO_USE = """Pushed {tag}
{repository}@{digest}
In your overlay's kustomization.yaml:
images:
  - name: {name}
    newName: {repository}
    digest: {digest}"""


@dataclass(frozen=True)
class Image:
    """What manifests call it, its Dockerfile, the files of its context, its arguments and its tags, `latest` last."""

    name: str
    dockerfile: Path
    files: dict[str, Path]
    arguments: dict[str, str]
    tags: list[str]


class BuildFailure(ForeseenError): ...


def main() -> None:
    options = _parse()
    builder = options.builder or find_builder()
    if options.torch:
        image = torch_image(options.torch, options.tag, options.extras, options.suffix)
    else:
        image = serving_image(options.model, options.tag, options.extras, options.suffix)
    print(f"Building {image.tags[0]} with {builder} from {len(image.files)} files ...", flush=True)
    if code := build(builder, image, options.flags):
        raise BuildFailure(
            f"{builder} ended with code {code}, its last lines say why", code="image-build-failed"
        )
    print(f"Built {' and '.join(image.tags)}", flush=True)
    if options.push:
        # The overlay names the digest: a tag may be moved to another image, and nodes keep what
        # they pulled under it.
        repository, digest = push(builder, image.tags[0])
        print(
            _HOW_TO_USE.format(
                tag=image.tags[0], name=image.name, repository=repository, digest=digest
            )
        )


def _parse() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model",
        type=Path,
        help="the model folder to serve, exported for native, onnx or both; or a cascade",
    )
    what.add_argument(
        "--torch", choices=TORCH_BUILDS, help="which PyTorch; cpu needs an index that has it"
    )
    add = parser.add_argument
    add(
        "--with",
        dest="extras",
        type=_extras,
        default=(),
        metavar="EXTRAS",
        help=f"of {','.join(EXTRAS)}: tracing, S3 addresses, PostgreSQL, Ray (only with --torch); default: "
        "none",
    )
    add(
        "--tag",
        help="default: distrinews:VERSION-MODEL's first 12 digits or distrinews-torch:VERSION, and "
        "latest",
    )
    add(
        "--suffix", help="end of the default tag, such as amd64, for images that one name will join"
    )
    add("--push", action="store_true", help="push the image to its registry and print its digest")
    add(
        "--builder",
        choices=BUILDERS,
        help="default: the first of these that is installed and answers",
    )
    add("flags", nargs="*", help="after --: for the builder, such as --no-cache")
    options = parser.parse_args()
    if options.model and (refused := set(options.extras) - set(SERVING_EXTRAS)):
        parser.error(f"--with {','.join(refused)}: needs --torch")
    return options


def _extras(text: str) -> tuple[str, ...]:
    names = tuple(sorted(set(text.split(","))))
    if unknown := [name for name in names if name not in EXTRAS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(EXTRAS)}")
    return names


def find_builder() -> str:
    """The first of `BUILDERS` that is installed and responds."""
    for name in BUILDERS:
        if shutil.which(name) and _answers(name):
            return name
    raise DeploymentError(
        f"none of {', '.join(BUILDERS)} is installed and running; install or start one of them",
        code="image-no-builder",
    )


def _answers(name: str) -> bool:
    # docker is of no use without its daemon, nor podman on a Mac without its machine.
    try:
        return (
            subprocess.run([name, "info"], capture_output=True, timeout=_ANSWER_SECONDS).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


def serving_image(
    model: Path, tag: str | None = None, extras: tuple[str, ...] = (), suffix: str | None = None
) -> Image:
    artefacts = exported_artefacts(model)
    needed = {one.engine for one in artefacts.values()}
    if "" in artefacts and "native" in needed:
        remedy = "python -m inference.cascade BIG/onnx SMALL/onnx writes one for others"
        print(f"note: this cascade is fast only on x86-64 with AVX2 and on ARM; {remedy}")
    elif "onnx" not in needed:
        remedy = f"python -m inference.export {model} --engine onnx adds what others need"
        print(f"note: without onnx the image serves only on x86-64 with AVX2 and on ARM; {remedy}")
    arguments = {**build_arguments(model), "WITH": " ".join(extras)}
    # Two models of one version must not share a tag: nodes keep the first that they pulled.
    tags = _tags("distrinews", tag, [version(), arguments["MODEL_SHA256"][:12], *extras], suffix)
    return Image("distrinews", DOCKERFILE, image_files(model), arguments, tags)


def torch_image(
    build: str, tag: str | None = None, extras: tuple[str, ...] = (), suffix: str | None = None
) -> Image:
    arguments = {"TORCH": build, "VERSION": version(), "WITH": " ".join(extras)}
    tags = _tags("distrinews-torch", tag, [version(), *extras], suffix)
    return Image("distrinews-torch", TORCH_DOCKERFILE, torch_image_files(), arguments, tags)


def _tags(name: str, asked: str | None, parts: Sequence[str], suffix: str | None) -> list[str]:
    # A colon before the last slash belongs to a registry's port.
    if asked and ":" in asked.rpartition("/")[2]:
        return [asked]
    # Images for several platforms are built one by one and joined under one name later. Until then
    # none of them may take `latest` from the others.
    if suffix:
        return [f"{asked or name}:{'-'.join((*parts, suffix))}"]
    return [f"{asked or name}:{tag}" for tag in ("-".join(parts), "latest")]


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
    # A context of its own, so that a build never depends on what lies in the working tree besides.
    with tempfile.TemporaryDirectory(prefix="distrinews-image-") as context:
        copy_files(image.files, Path(context))
        return subprocess.run([*command, *flags, context]).returncode


def push(builder: str, tag: str) -> tuple[str, str]:
    """Push an image; returns its repository and the digest that the registry gave it.

    Raises:
        BuildFailure: the registry refuses it, or the builder does not say which digest it got.
    """
    # The last colon, because an earlier one may belong to a registry's port.
    repository = tag[: tag.rindex(":")]
    with tempfile.TemporaryDirectory(prefix="distrinews-push-") as folder:
        file = Path(folder, "digest")
        flags = [] if builder == "docker" else ["--digestfile", str(file)]
        if code := subprocess.run([builder, "push", *flags, tag]).returncode:
            what = f"{builder} push {tag} ended with code {code}"
            raise BuildFailure(
                f"{what}; log in with {builder} login, or name a registry with --tag",
                code="image-push-failed",
            )
        digest = (
            _digest_of_docker(tag, repository) if builder == "docker" else file.read_text().strip()
        )
    if not digest.startswith("sha256:"):
        raise BuildFailure(
            f"{tag}: was pushed, but {builder} does not know its digest", code="image-push-failed"
        )
    return repository, digest


def _digest_of_docker(tag: str, repository: str) -> str:
    # Docker has no --digestfile, but it keeps the digest of each repository that an image was
    # pushed to.
    shown = subprocess.run(
        ["docker", "image", "inspect", "--format", "{{json .RepoDigests}}", tag],
        capture_output=True,
        text=True,
    )
    known = json.loads(shown.stdout or "null") or []
    return next(
        (
            digest
            for name, _, digest in (entry.partition("@") for entry in known)
            if name == repository
        ),
        "",
    )


if __name__ == "__main__":
    run_command(main)
