"""Cascades of two artefacts, on disk as `python -m inference.cascade` writes them, and small artefacts for them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from common.files import sha256_of
from common.model_folder import (
    MANIFEST_FILE,
    SMALL_FOLDER,
    WEIGHTS_FILE,
    Manifest,
    describe_files,
    describe_source,
    read_manifest,
    read_saved_model,
    write_manifest,
)
from common.problem_types import REGRESSION
from inference.engines.base import answers_of
from inference.engines.native.quantize import write_native
from inference.engines.selection import build_engine
from inference.engines.windowed import config_with_attention, weights_with_attention
from tests.processes import REPOSITORY

NEWS = REPOSITORY / "checkpoints" / "news"
_PROBES = ["Oil prices rise again as stocks fall on Wall Street."]


def make_cascade(big: Path, small: Path, folder: Path, threshold: float = 0.8, **changes: Any) -> Path:
    """Join two artefacts; ``changes`` replace keys of the record."""
    shutil.copytree(big, folder)
    shutil.copytree(small, folder / SMALL_FOLDER)
    sources = {name: read_manifest(artefact).source for name, artefact in (("big", big), ("small", small))}
    named = {name: {key: one[key] for key in ("name", "weights_sha256")} for name, one in sources.items()}
    record: dict[str, Any] = {
        "threshold": threshold,
        "stricter": [(threshold + 1) / 2, 1.01],
        "max_disagreement": 0.005,
        "confidence": 0.95,
        "dataset": "rows.csv",
        "texts": 7600,
        "texts_sha256": "0" * 64,
        "left_out": {},
        "fitted": "2026-11-28",
        "passed_on": 0.175,
        "disagreed": 27,
        "big": named["big"],
        "small": named["small"] | {"manifest_sha256": sha256_of(small / MANIFEST_FILE)},
        **changes,
    }
    write_manifest(folder, replace(read_manifest(folder), cascade=record))
    return folder


def make_artefact(model: Path, folder: Path) -> Path:
    """Write the native artefact of a model folder in milliseconds, without a calibration.

    It takes seconds to export one, which compares it with PyTorch.
    """
    folder.mkdir(parents=True)
    for path in model.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, folder)
    saved = read_saved_model(model)
    weights = weights_with_attention(saved.config, load_file(model / WEIGHTS_FILE))
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    write_native(config_with_attention(saved.config), arrays, folder)
    token_ids = [one.ids for one in saved.tokenizer().encode(_PROBES)]
    engine = build_engine("native", folder, saved.config, "int8")
    answers = answers_of(engine, saved.problem_type, token_ids).tolist()
    is_number = saved.problem_type is REGRESSION
    expected = [{"value": one[0]} if is_number else {"probabilities": one} for one in answers]
    probes = [{"text": text} | one for text, one in zip(_PROBES, expected, strict=True)]
    manifest = Manifest(
        engine="native",
        precision="int8",
        created="2026-11-28T00:00:00+00:00",
        source=describe_source(model.name, model / WEIGHTS_FILE),
        files=describe_files(folder),
        versions={},
        options={},
        accuracy={"spread": 100.0} if is_number else {},
        size={},
        speed={},
        probes=probes,
        probe_tolerance=0.1,
    )
    write_manifest(folder, manifest)
    return folder


def recalibrated(artefact: Path, folder: Path, **changes: Any) -> Path:
    """A copy of an artefact with other keys in its calibration."""
    shutil.copytree(artefact, folder)
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, calibration=manifest.calibration | changes))
    return folder


def make_artefact_with_head(model: Path, folder: Path, seed: int, **config: Any) -> Path:
    """The native artefact of a model that has the encoder of another one and a random head."""
    source = Path(shutil.copytree(model, folder.with_name(f"{folder.name}_source")))
    found = json.loads((source / "config.json").read_text()) | config
    names = found["id2label"].values()
    found["label2id"] = {label: i for i, label in enumerate(names)}
    (source / "config.json").write_text(json.dumps(found))
    weights, generator = load_file(source / "model.safetensors"), torch.Generator().manual_seed(seed)
    weights["classifier.weight"] = torch.randn(len(names), 32, generator=generator)
    weights["classifier.bias"] = torch.randn(len(names), generator=generator)
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    return make_artefact(source, folder)
