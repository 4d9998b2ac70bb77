"""What others get of a model folder or a cascade: its files, without paths of this machine."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from common.errors import ModelLoadError, UserError
from common.model_folder import (
    CERTIFY_AGAIN,
    DESCRIPTION_FILES,
    FAMILIARITY_FILE,
    MANIFEST_FILE,
    PRECISIONS,
    SMALL_FOLDER,
    WEIGHTS_FILE,
    artefact_files,
    is_artefact,
    read_manifest,
    read_saved_model,
    verified_cascade,
    verified_manifest,
)
from training.publishing.hub_upload import Files, content_of
from training.publishing.model_card import TAG, cascade_card, model_card, public_name

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
# What only an upload writes at the root of a repository, where a cascade has its big model: if the
# manifest of a cascade were left beside a model, `inference.fetch` would still find the cascade.
OWNED = frozenset(
    {
        *(*_FILES, *PRECISIONS, SMALL_FOLDER, MANIFEST_FILE, FAMILIARITY_FILE),
        *("model_int8.safetensors", "model.onnx", "model.xml", "model.bin"),
    }
)
# Not after a letter, a dot, a colon or a slash: that is within an address or a relative path.
_ABSOLUTE_PATH = re.compile(r"""(?<![\w./:-])(?:~|/(?P<root>\w+))/[^\s`"')]+""")


def model_files(model: Path) -> Files:
    """The files of a model's repository: weights, tokenizer, metrics, every exported artefact and
    the card; or a cascade as it is, and a card.

    Raises:
        UserError: the folder is not a complete model or cascade, an artefact does not belong to it,
            or its card names a path.
    """
    is_cascade = is_artefact(model) and bool(read_manifest(model).cascade)
    if (is_artefact(model) and not is_cascade) or model.is_file():
        what = "is one file or one artefact of a model; give the model folder"
        raise UserError(f"{model}: {what}", code="model-folder-needed")
    # Only to refuse what is no complete model; the files go up as they are.
    read_saved_model(model)
    if is_cascade:
        names, manifests = [], verified_cascade(model)
    else:
        names = [name for name in _FILES if (model / name).is_file()]
        manifests = {
            engine: verified_manifest(model / engine, model)
            for engine in PRECISIONS
            if is_artefact(model / engine)
        }
    for folder, manifest in manifests.items():
        names += artefact_files(folder, manifest)
    files: dict[str, Path | bytes] = {file: model / file for file in names}
    return without_local_paths(files) | {_CARD: _card(model)}


def named(files: Files, model: Path, name: str) -> Files:
    """Let the card show how to load the model by its repository's name."""
    card = content_of(files[_CARD])
    for load in ('model="{}"', "hf://{} "):
        card = card.replace(load.format(model.name).encode(), load.format(name).encode())
    return {**files, _CARD: card}


def without_local_paths(files: Files) -> dict[str, Path | bytes]:
    """Shorten the paths of datasets and base models in ``metrics.json`` and manifests to plain names."""
    public = dict(files)
    for name in [name for name in files if Path(name).name == _METRICS]:
        public[name] = _renamed(public[name], [], ("dataset", "base_model"))
    manifests = [name for name in files if Path(name).name == MANIFEST_FILE]
    # The longest first: that of a small model before that of its cascade, which has its digest.
    for name in sorted(manifests, key=len, reverse=True):
        public[name] = _renamed(public[name], ["accuracy"], ("dataset",))
        # The manifest has a digest of the metrics beside it. If these were rewritten above, it must
        # follow, or whoever loads the artefact would find a file that has changed.
        beside = public.get(Path(name).with_name(_METRICS).as_posix())
        if isinstance(beside, bytes):
            public[name] = _with_digest(public[name], beside)
        small = public.get((Path(name).parent / SMALL_FOLDER / MANIFEST_FILE).as_posix())
        if isinstance(small, bytes):
            content = _read(public[name])
            content["cascade"]["small"]["manifest_sha256"] = hashlib.sha256(small).hexdigest()
            public[name] = _write(content)
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
    if is_artefact(model):
        try:
            return cascade_card(model)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = f"its cascade is damaged ({type(error).__name__}: {error})"
            raise ModelLoadError(model / MANIFEST_FILE, what, CERTIFY_AGAIN) from error
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
