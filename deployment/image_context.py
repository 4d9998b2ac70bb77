"""What images are made of: their build contexts and build arguments, for the image and for the Space alike."""

from __future__ import annotations

import shutil
from pathlib import Path

from common.errors import ModelLoadError, UserError
from common.model_folder import (
    DESCRIPTION_FILES,
    METRICS_FILE,
    Manifest,
    artefact_files,
    cascade_sha256,
    file_inside,
    is_artefact,
    read_manifest,
    verified_cascade,
    verified_manifest,
)
from common.version import version

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "deployment" / "Dockerfile"
TORCH_DOCKERFILE = ROOT / "deployment" / "Dockerfile.torch"
# The engines whose runtime the image has, fastest first.
ENGINES = ("native", "onnx")
# The model's folder in the context.
MODEL_FOLDER = "model"
# The builds of PyTorch that there is a lock for.
TORCH_BUILDS = ("cuda", "cpu")
# What an image may have besides, by the names of its locks; the server without PyTorch runs on no
# Ray cluster.
SERVING_EXTRAS = ("otel", "s3", "postgres")
EXTRAS = (*SERVING_EXTRAS, "ray")
_KERNEL_FILES = ("pyproject.toml", "deployment/compile_kernels.py")
# An allowlist, so that files which tools and people leave among the sources are not copied.
_SOURCES = {
    ".py",
    ".c",
    ".h",
    ".html",
    ".css",
    ".js",
    ".svg",
    ".wasm",
    ".sh",
    ".csv",
    ".txt",
    ".yaml",
    ".json",
}


class DeploymentError(UserError): ...


def image_files(model: Path) -> dict[str, Path]:
    """The files that the serving image is built from, besides the Dockerfile: source by path in the
    build context.

    The model's own weights are left out; the image serves one of its artefacts, or a cascade.

    Raises:
        DeploymentError: the folder is neither a model nor a cascade, or has no artefact that
            belongs to it.
    """
    artefacts = exported_artefacts(model)
    names = [name for name in (*DESCRIPTION_FILES, METRICS_FILE) if (model / name).is_file()]
    for folder, manifest in artefacts.items():
        names += artefact_files(folder, manifest)
    locks = ["deployment/requirements.txt", *_extra_locks(SERVING_EXTRAS)]
    files = {
        name: ROOT / name
        for name in (*locks, *_KERNEL_FILES, *_sources("common"), *_sources("inference"))
    }
    try:
        return files | {f"{MODEL_FOLDER}/{name}": file_inside(model, name) for name in names}
    except ModelLoadError as error:
        raise DeploymentError(str(error), code=error.code) from error


def torch_image_files() -> dict[str, Path]:
    """The same for the image with PyTorch, which contains no model."""
    locks = (
        "requirements-torch.txt",
        *(f"requirements-torch-{build}.txt" for build in TORCH_BUILDS),
    )
    packages = ("common", "inference", "training", "deployment/ray")
    names = [*(f"deployment/{lock}" for lock in locks), *_extra_locks(EXTRAS), *_KERNEL_FILES]
    names += [name for package in packages for name in _sources(package)]
    return {name: ROOT / name for name in names}


def build_arguments(model: Path) -> dict[str, str]:
    """The Dockerfile's arguments that depend on the model and the version."""
    first, *others = exported_artefacts(model).values()
    # Its first digits are the revision that the server shows.
    digest = cascade_sha256(first, *others) if first.cascade else first.source["weights_sha256"]
    return {"MODEL": MODEL_FOLDER, "VERSION": version(), "MODEL_SHA256": digest}


def exported_artefacts(model: Path) -> dict[str, Manifest]:
    """The verified manifests of what the image can serve, by their folders: of a model folder one
    for each engine, of a cascade those of the big model, in ``""``, and of the small one.
    """
    if not model.is_dir():
        raise DeploymentError(
            f"{model}: no such model folder; train one (python -m training.train_single)",
            code="model-not-found",
        )
    try:
        if is_artefact(model):
            return _cascade(model)
        found = {
            name: verified_manifest(model / name, model)
            for name in ENGINES
            if is_artefact(model / name)
        }
    except ModelLoadError as error:
        raise DeploymentError(str(error), code=error.code) from error
    if not found:
        what = f"no {' or '.join(ENGINES)} artefact in it"
        raise DeploymentError(
            f"{model}: {what}; write one with python -m inference.export {model}",
            code="artefact-missing",
        )
    # The server picks the fastest engine at its start, so artefacts of different weights would make
    # answers depend on the processor.
    if len({manifest.source["weights_sha256"] for manifest in found.values()}) > 1:
        what = f"{' and '.join(found)} were made from different weights"
        raise DeploymentError(
            f"{model}: {what}; write them again with python -m inference.export {model}",
            code="artefact-missing",
        )
    return found


def _cascade(folder: Path) -> dict[str, Manifest]:
    if not read_manifest(folder).cascade:
        what = "is one exported artefact; give the model folder above it"
        raise DeploymentError(f"{folder}: {what}", code="model-folder-needed")
    found = verified_cascade(folder)
    if others := [one.engine for one in found.values() if one.engine not in ENGINES]:
        what = f"is a cascade for {others[0]}, which no image has; write it again from artefacts "
        what += f"for {' or '.join(ENGINES)}: python -m inference.cascade BIG/native SMALL/native"
        raise DeploymentError(f"{folder}: {what}", code="artefact-missing")
    return found


def copy_files(files: dict[str, Path], folder: Path) -> None:
    """Copy files to their places in a folder, readable by every user."""
    for name, source in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod(0o644)
    # The umask of whoever builds must not decide whether the image's user can read its own files.
    for target in folder.rglob("*/"):
        target.chmod(0o755)


def _extra_locks(extras: tuple[str, ...]) -> list[str]:
    return [f"deployment/requirements-with-{extra}.txt" for extra in extras]


def _sources(package: str) -> list[str]:
    files = (path for path in (ROOT / package).rglob("*") if path.suffix in _SOURCES)
    return sorted(path.relative_to(ROOT).as_posix() for path in files)
