"""What of a model folder others get: its files, without the paths that data and models had on this machine."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from common.errors import UserError
from common.model_folder import (
    DESCRIPTION_FILES,
    MANIFEST_FILE,
    PRECISIONS,
    WEIGHTS_FILE,
    is_artefact,
    read_manifest,
    read_saved_model,
    verified_manifest,
)
from training.publishing.hub_upload import Files, content_of
from training.publishing.model_card import TAG, model_card, public_name

_CARD, _METRICS = "README.md", "metrics.json"
# By name, so that what people keep beside a model is not published with it.
_FILES = (
    *DESCRIPTION_FILES,
    WEIGHTS_FILE,
    _METRICS,
    "merges.txt",
    "vocab.json",
    "vocab.txt",
)
# Not after a letter, a dot, a colon or a slash: that is within an address or a relative path.
_ABSOLUTE_PATH = re.compile(r"""(?<![\w./:-])(?:~|/(?P<root>\w+))/[^\s`"')]+""")


def model_files(model: Path) -> Files:
    """The files of a model's repository: weights, tokenizer, metrics, every exported artefact and
    the card.

    Raises:
        UserError: the folder is not a complete model, an artefact does not belong to it, or its
            card names a path.
    """
    if is_artefact(model) or model.is_file():
        what = "is one file or one artefact of a model; give the model folder"
        if is_artefact(model) and read_manifest(model).cascade:
            what = "is a cascade; publish the folders of its two models"
        raise UserError(f"{model}: {what}", code="model-folder-needed")
    # Only to refuse what is no complete model; the files go up as they are.
    read_saved_model(model)
    manifests = {
        engine: verified_manifest(model / engine, model)
        for engine in PRECISIONS
        if is_artefact(model / engine)
    }
    names = [name for name in _FILES if (model / name).is_file()]
    for engine, manifest in manifests.items():
        names += [f"{engine}/{file}" for file in sorted({*manifest.files, MANIFEST_FILE})]
    files: dict[str, Path | bytes] = {file: model / file for file in names}
    return without_local_paths(files) | {_CARD: _card(model)}


def named(files: Files, model: Path, name: str) -> Files:
    """Let the card show how to load the model by its repository's name."""
    card = content_of(files[_CARD]).replace(
        f'model="{model.name}"'.encode(), f'model="{name}"'.encode()
    )
    return {**files, _CARD: card}


def without_local_paths(files: Files) -> dict[str, Path | bytes]:
    """Shorten the paths of datasets and base models in ``metrics.json`` and manifests to plain names."""
    public = dict(files)
    for name in [name for name in files if Path(name).name == _METRICS]:
        public[name] = _renamed(public[name], [], ("dataset", "base_model"))
    for name in [name for name in files if Path(name).name == MANIFEST_FILE]:
        public[name] = _renamed(public[name], ["accuracy"], ("dataset",))
        # The manifest has a digest of the metrics beside it. If these were rewritten above, it must
        # follow, or whoever loads the artefact would find a file that has changed.
        beside = public.get(f"{Path(name).parent.as_posix()}/{_METRICS}")
        if isinstance(beside, bytes):
            public[name] = _with_digest(public[name], beside)
    return public


def _renamed(source: Path | bytes, where: list[str], keys: tuple[str, ...]) -> Path | bytes:
    content = _read(source)
    section: Any = content
    for step in where:
        section = section.get(step, {})
    changes = {key: public_name(section[key]) for key in keys if isinstance(section.get(key), str)}
    if all(section[key] == value for key, value in changes.items()):
        return source
    section |= changes
    return _write(content)


def _with_digest(manifest: Path | bytes, metrics: bytes) -> bytes:
    content = _read(manifest)
    content["files"][_METRICS] = {
        "sha256": hashlib.sha256(metrics).hexdigest(),
        "bytes": len(metrics),
    }
    return _write(content)


def _card(model: Path) -> bytes:
    path = model / _CARD
    text = path.read_text(encoding="utf-8") if path.is_file() else _new_card(model)
    # People write into their cards, so this one is not changed silently: the line is named, and
    # they decide what stands there instead of a path that is of no use to others.
    for number, line in enumerate(text.splitlines(), start=1):
        if (found := _ABSOLUTE_PATH.search(line)) and _is_of_a_machine(found):
            raise UserError(
                f"{path}: line {number} names {found[0]}, a path of one machine; write a name in "
                "its place, "
                "or remove the file: then a new card is written",
                code="model-card-path",
            )
    card = ModelCard(text, ignore_metadata_errors=True)
    tags = card.data.get("tags") or []
    if TAG not in tags:
        card.data.tags = [*tags, TAG]
    return str(card).encode()


def _new_card(model: Path) -> str:
    path = model / _METRICS
    metrics = _read(path) if path.is_file() else {}
    if "test" not in metrics:
        raise UserError(
            f"{model}: has neither a {_CARD} nor a {_METRICS} with test results to write one "
            "from; add one",
            code="model-card-missing",
        )
    return model_card(metrics, model.name, read_saved_model(model).cleaning)


def _is_of_a_machine(path: re.Match[str]) -> bool:
    # A route such as /predict/batch is none.
    root = path["root"]
    return root is None or root in ("home", "Users", "root") or Path("/", root).is_dir()


def _read(source: Path | bytes) -> dict[str, Any]:
    return json.loads(content_of(source))


def _write(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
