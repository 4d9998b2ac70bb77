"""A model folder with one artefact, written in milliseconds: whole to whoever checks it, though nothing runs it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from common.files import sha256_of
from common.model_folder import (
    MANIFEST_FILE,
    SMALL_FOLDER,
    Manifest,
    describe_files,
    describe_source,
    read_manifest,
    write_manifest,
)

LABELS = ("World", "Sports", "Business", "Sci/Tech")
# Where the data lay when the model was trained: nobody else's business.
DATASET = "/home/ada/ag_news"


def write_small_model(folder: Path) -> Path:
    """Write config, tokenizer, weights, metrics and an artefact for ONNX Runtime; there is no card."""
    folder.mkdir(parents=True)
    id2label = {str(i): label for i, label in enumerate(LABELS)}
    (folder / "config.json").write_text(json.dumps({"model_type": "distilbert", "vocab_size": 2, "id2label": id2label}))
    Tokenizer(models.WordLevel({"[UNK]": 0, "news": 1}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"model_max_length": 16, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    (folder / "metrics.json").write_text(json.dumps(_metrics()))
    save_file({"weight": np.arange(500, dtype=np.float32)}, folder / "model.safetensors")
    _write_artefact(folder, folder / "onnx")
    return folder


def write_cascade(model: Path, folder: Path) -> Path:
    """Write a cascade in which both models are the artefact of the model that `write_small_model` has written."""
    shutil.copytree(model / "onnx", folder)
    shutil.copytree(model / "onnx", folder / SMALL_FOLDER)
    record = {
        "threshold": 0.9,
        "stricter": [1.01],
        "max_disagreement": 0.005,
        "confidence": 0.95,
        "dataset": "ag_news/test.csv",
        "texts": 7600,
        "passed_on": 0.18,
        "disagreed": 27,
        "big": {"name": "big"},
        "small": {"name": "small", "manifest_sha256": sha256_of(folder / SMALL_FOLDER / MANIFEST_FILE)},
        "accuracy": {"big": 0.94, "small": 0.92, "cascade": 0.93},
    }
    write_manifest(folder, replace(read_manifest(folder), cascade=record))
    return folder


def _metrics() -> dict[str, object]:
    scores = {"precision": 0.9, "recall": 0.9, "f1": 0.9, "rows": 10}
    figures = {"rows": 40, "accuracy": 0.9, "macro_f1": 0.9, "calibration_error": 0.1, "labels": LABELS}
    test = {**figures, "per_class": dict.fromkeys(LABELS, scores)}
    return {"dataset": DATASET, "base_model": "tiny", "max_length": 16, "best_epoch": 1, "test": test}


def _write_artefact(model: Path, folder: Path) -> None:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "metrics.json"):
        shutil.copy(model / name, folder / name)
    (folder / "model.onnx").write_bytes(bytes(range(256)) * 8)
    made = Manifest(
        engine="onnx",
        precision="int8",
        created="2025-01-01T00:00:00+00:00",
        source=describe_source(model.name, model / "model.safetensors"),
        files=describe_files(folder),
        versions={},
        options={},
        accuracy={"dataset": f"{DATASET}/test.csv", "rows": 40},
        size={},
        speed={},
        probes=[],
        probe_tolerance=0.1,
    )
    write_manifest(folder, made)
