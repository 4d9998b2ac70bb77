"""A model's files for a browser (inference/web/local_model.js): the native artefact, smaller."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from html.entities import html5
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.model_folder import (
    FAMILIARITY_FILE,
    SavedModel,
    artefact_folder,
    is_artefact,
    read_manifest,
)
from common.problem_types import REGRESSION
from common.text import TextTokenizer
from inference.engines.answering import Answering
from inference.engines.base import answers_of
from inference.engines.native.engine import NativeEngine
from inference.engines.selection import LoadedModel, check_probes, load_model

FORMAT = 4
DESCRIPTION = "model.json"
_ADDRESS_BYTES = 4  # in WebAssembly
_OTHER_TOKENIZER = (
    "; a browser runs models with BERT's tokenizer only, so serve this one with a server"
)
# What web/wordpiece.js does, part by part of a tokenizer.json.
_READABLE = {
    "model": "WordPiece",
    "normalizer": "BertNormalizer",
    "pre_tokenizer": "BertPreTokenizer",
}


def browser_files(model: Path) -> dict[str, bytes]:
    """What a browser needs of a model, by file name: ``model.json``, and the weights under a name
    with their hash.

    Word embeddings are rounded to int8 with a scale for each word, which halves their size. All
    else is the native artefact, bit for bit, with its calibration. The table of familiarity is the
    end of the weights: a file of its own would be one more that can be missing or of another model.

    Raises:
        ModelLoadError: The model or its artefact is damaged, or cannot be run here.
        UserError: The model has no native artefact, or a tokenizer that the page does not have.
    """
    folder = model if is_artefact(model) else artefact_folder(model, "native")
    if not is_artefact(folder):
        what = f"{folder}: there is no native artefact of this model; "
        what += f"write it with python -m inference.export {model} --engine native"
        raise UserError(what, code="artefact-missing")
    loaded = load_model(model, "native")
    saved, engine = loaded.saved, loaded.engine
    _refuse_unreadable(model, folder, saved)
    assert isinstance(engine, NativeEngine)
    settings = json.loads(saved.tokenizer_json)
    tokenizer = tokenizer_settings(
        folder / "tokenizer.json", settings, loaded.tokenizer, saved.cleaning
    )
    # The engine computes with the rounded embeddings from here on, so that the probes judge what a
    # browser will compute, and `check` below is the answer that it has to repeat.
    quantised, scale = _quantised(engine.words)
    engine.words[...] = quantised * scale[:, None]
    manifest = read_manifest(folder)
    check_probes(folder, manifest, saved, loaded.tokenizer, engine)
    image = engine.image(_ADDRESS_BYTES)
    weights = image.memory[: image.words] + quantised.tobytes() + scale.tobytes()
    if loaded.calibration and loaded.calibration.familiarity:
        weights += (folder / FAMILIARITY_FILE).read_bytes()
    # The name has a hash of the contents, so a copy in a browser's cache is never a model's other
    # version.
    name = f"model-{hashlib.sha256(weights).hexdigest()[:16]}.bin"
    check = max((probe["text"] for probe in manifest.probes), key=len)
    description = {
        "format": FORMAT,
        "name": manifest.source["name"],
        "problem_type": saved.problem_type.name,
        "labels": saved.labels,
        "thresholds": Answering.of(saved, loaded.calibration).thresholds,
        "test": _test_result(saved.metadata),
        "examples": saved.metadata.get("examples", {}),
        "calibration": manifest.calibration or None,
        "weights": {
            "file": name,
            "bytes": len(weights),
            "int8": image.int8,
            "image": image.words,
            "words": dict(zip(("rows", "width"), quantised.shape, strict=True)),
        },
        "pointers": image.pointers,
        "tokenizer": tokenizer,
        # Before calibration: it is what the engine computes that has to be the same.
        "check": {
            "text": check,
            "answers": _answers(engine, loaded, check),
            "spread": manifest.accuracy["spread"] if saved.problem_type is REGRESSION else 1,
        },
    }
    written = json.dumps(description, ensure_ascii=False, separators=(",", ":"))
    return {DESCRIPTION: written.encode(), name: weights}


def _refuse_unreadable(model: Path, folder: Path, saved: SavedModel) -> None:
    if read_manifest(folder).cascade:
        what = f"{model}: is a cascade, and the page in a browser runs one model, because each "
        what += "visitor would have to load both; give one of the two, or publish the cascade with "
        what += "a server"
        raise UserError(what, code="cascade-refused")
    if saved.windows:
        what = f"{model}: reads long texts in windows (--long windows), and the page in a browser "
        what += "cuts them; serve it with a server, or train it with --long cut"
        raise UserError(what, code="browser-windows")
    if saved.reads_pairs:
        what = f"{model}: reads pairs of texts, and the page in a browser reads only one text; "
        raise UserError(what + "serve it with a server", code="browser-pairs")


def _test_result(metrics: dict[str, Any]) -> dict[str, float]:
    """What training measured on the test rows; metrics.json is whatever lies beside the weights."""
    test = metrics.get("test")
    found = (
        {name: test.get(name) for name in ("accuracy", "rows")} if isinstance(test, dict) else {}
    )
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _quantised(words: NDArray[np.float16]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    rows = words.astype(np.float32)
    # One scale for each word, (words,), beside (words, width) of int8. A row of zeros, as of a word
    # that was never trained, must not divide by zero.
    scale = np.maximum(np.abs(rows).max(axis=1), np.finfo(np.float32).tiny) / np.float32(127)
    return np.rint(rows / scale[:, None]).astype(np.int8), scale


def _answers(engine: NativeEngine, loaded: LoadedModel, text: str) -> list[float]:
    token_ids = loaded.tokenizer.encode([text])[0].ids
    found = answers_of(engine, loaded.saved.problem_type, [token_ids])[0]
    # Seven digits are what float32 has.
    return [float(f"{one:.7g}") for one in found]


def tokenizer_settings(
    file: Path, settings: dict[str, Any], tokenizer: TextTokenizer, cleaning: str
) -> dict[str, Any]:
    """What inference/web/wordpiece.js needs to give the same ids."""
    if problem := next(_problems(settings), None):
        raise UserError(f"{file}: {problem}{_OTHER_TOKENIZER}", code="browser-tokenizer")
    model, normalizer = settings["model"], settings["normalizer"]
    added = {token["content"]: token["id"] for token in settings["added_tokens"]}
    pieces: list[str | None] = [None] * (1 + max(model["vocab"].values()))
    for piece, index in model["vocab"].items():
        pieces[index] = piece
    # What stands around every text (BERT's [CLS] and [SEP]), by asking: files describe it in
    # several ways.
    unknown = model["vocab"][model["unk_token"]]
    around = tokenizer.encode_cleaned([model["unk_token"]])[0].ids
    strip = normalizer["strip_accents"]
    # Python's table, so that both sides decode the same names.
    entities = {name[:-1]: text for name, text in html5.items() if name[-1] == ";"}
    return {
        "cleaning": cleaning,
        "entities": entities if cleaning == "news" else {},
        "max_tokens": tokenizer.max_length,
        "vocabulary": pieces,
        "added": added,
        "before": around[: around.index(unknown)],
        "after": around[around.index(unknown) + 1 :],
        "unknown": unknown,
        "prefix": model["continuing_subword_prefix"],
        "max_characters": model["max_input_chars_per_word"],
        "lowercase": normalizer["lowercase"],
        "clean_text": normalizer["clean_text"],
        "handle_chinese_chars": normalizer["handle_chinese_chars"],
        "strip_accents": normalizer["lowercase"] if strip is None else strip,
    }


def _problems(settings: dict[str, Any]) -> Iterator[str]:
    """What in a tokenizer.json the page's tokenizer would do differently."""
    for part, kind in _READABLE.items():
        found = (settings.get(part) or {}).get("type")
        if found != kind:
            yield f"the {part} is {found or 'missing'}, not {kind}"
    for token in settings["added_tokens"]:
        if any(token[flag] for flag in ("single_word", "lstrip", "rstrip", "normalized")):
            yield f"the added token {token['content']!r} is matched in a special way"
    if (settings.get("truncation") or {}).get("direction") == "Left":
        yield "long texts lose their beginning"
    unknown = settings["model"]["unk_token"]
    if all(token["content"] != unknown for token in settings["added_tokens"]):
        yield f"{unknown} is not among the added tokens"
