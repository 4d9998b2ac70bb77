"""Models that read long texts in windows: the same answers everywhere, and the passage that decided."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from common.errors import ModelLoadError, UserError
from common.model_folder import read_saved_model
from common.text import TextTokenizer, clean_text
from common.windows import ATTENTION_KEY, MOST_WINDOWS, Windows, pool
from inference import cascade, export, score
from inference.engines import native
from inference.engines.model_loader import ModelLoader
from inference.engines.native.library import library_path
from inference.exporting.browser import browser_files
from tests.inference.conftest import MAX_LENGTH, TEXTS, StartServer

LONG = " ".join([*TEXTS, *reversed(TEXTS)] * 3)
OTHER_LENGTH = {"length": 7, "overlap": 1, "most": 2, "head": "classifier"}


def give_windows(folder: Path) -> dict[str, Any]:
    """Let a model read windows, some of which its attention prefers; returns its config.json."""
    weights = load_file(folder / "model.safetensors")
    weights[ATTENTION_KEY] = torch.randn(1, 32, generator=torch.Generator().manual_seed(2))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= Windows.of_length(MAX_LENGTH, "classifier").as_settings()
    (folder / "config.json").write_text(json.dumps(config))
    return config


@pytest.fixture(scope="module")
def windowed(model_folder: Path, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a native artefact whose attention prefers some windows."""
    folder = tmp_path_factory.mktemp("windows") / "articles"
    shutil.copytree(model_folder, folder)
    config = give_windows(folder)
    rows = folder.with_name("rows.jsonl")
    labels = list(config["label2id"])
    lines = [{"text": text, "label": labels[i % len(labels)]} for i, text in enumerate([*TEXTS, LONG, LONG[40:]])]
    rows.write_text("\n".join(map(json.dumps, lines)))
    export.main([str(folder), "--engine", "native", "--rows", str(rows), "--max_drop", "100"])
    return folder


@pytest.fixture(scope="module")
def client(windowed: Path, start_server: StartServer) -> Iterator[httpx.Client]:
    with start_server(windowed, CACHE_ENTRIES="100") as client:
        yield client


def by_hand(folder: Path, text: str) -> tuple[np.ndarray, np.ndarray]:
    """The probabilities of transformers' own network over each window, pooled, and the windows' weights."""
    saved = read_saved_model(folder)
    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    row = load_file(folder / "model.safetensors")[ATTENTION_KEY]
    ids = saved.tokenizer().encode([text])[0].ids
    outputs = []
    for start in range(0, len(ids), MAX_LENGTH):
        with torch.no_grad():
            hidden = network.distilbert(torch.tensor([ids[start : start + MAX_LENGTH]])).last_hidden_state[:, 0]
            vector = network.pre_classifier(hidden).relu()
            outputs.append(torch.cat([network.classifier(vector), vector @ row.T], dim=1))
    scores, shares = pool(torch.cat(outputs).numpy(), np.array([len(outputs)]))
    return saved.problem_type.answers(scores)[0], shares


@pytest.mark.parametrize(
    ("engine", "package", "tolerance"),
    [("torch", "torch", 1e-5), ("native", "numpy", 0.1), ("onnx", "onnxruntime", 0.1)],
)
def test_every_engine_answers_long_texts_as_the_pooled_windows(
    windowed: Path, tmp_path: Path, engine: str, package: str, tolerance: float
) -> None:
    pytest.importorskip(package)
    if engine == "onnx":
        rows = windowed.with_name("rows.jsonl")
        windowed = Path(shutil.copytree(windowed, tmp_path / "model"))
        export.main([str(windowed), "--engine", engine, "--rows", str(rows), "--max_drop", "100"])
    model = ModelLoader(windowed, engine)

    answers = model.predict_batch([LONG, *TEXTS])

    for text, answer in zip([LONG, *TEXTS], answers, strict=True):
        assert list(answer["probabilities"].values()) == pytest.approx(by_hand(windowed, text)[0], abs=tolerance)


@pytest.mark.skipif(library_path() is None, reason=native.is_supported()[1])
def test_a_short_or_long_text_gets_the_same_answer_alone_and_among_others(windowed: Path) -> None:
    model, texts = ModelLoader(windowed, "native"), [LONG, *TEXTS, LONG[40:]]

    alone = [model.predict(text) for text in texts]

    # To the last bit, unlike above: rows of an int8 pass do not depend on each other.
    assert model.predict_batch(texts * 9) == alone * 9  # several passes
    assert model.predict_batch(texts[::-1]) == alone[::-1]


def test_short_texts_are_answered_as_by_the_model_without_windows(windowed: Path, model_folder: Path) -> None:
    short = [text for text in TEXTS if read_saved_model(model_folder).tokenizer().encode([text])[0].truncated is False]
    with_windows, without = (ModelLoader(folder, "torch").predict_batch(short) for folder in (windowed, model_folder))

    for one, other in zip(with_windows, without, strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-6)


def test_an_answer_to_a_long_text_names_the_passage_that_decided(client: httpx.Client, windowed: Path) -> None:
    answer = client.post("/predict", json={"text": LONG}).json()
    again = client.post("/predict", json={"text": LONG}).json()  # from the cache
    short = client.post("/predict", json={"text": "oil prices"}).json()

    saved = read_saved_model(windowed)
    (encoded,) = saved.tokenizer().encode([LONG])
    passages = saved.tokenizer().locate(LONG, encoded.passages)
    assert answer == again
    assert (answer["passage"]["start"], answer["passage"]["end"]) in passages
    assert answer["truncated"] is encoded.truncated
    assert answer["num_tokens"] == encoded.num_tokens
    assert "passage" not in short


def test_batches_streams_explanations_and_the_other_faces_answer_long_texts_alike(client: httpx.Client) -> None:
    alone = client.post("/predict", json={"text": LONG}).json()
    batch = client.post("/predict/batch", json={"texts": ["oil", LONG, LONG]}).json()
    lines = client.post(
        "/predict/batch", content=json.dumps({"text": LONG}), headers={"Content-Type": "application/x-ndjson"}
    )
    explained = client.post("/explain", json={"text": LONG}).json()

    for answer in (*batch[1:], json.loads(lines.text), explained):
        assert answer["label"] == alone["label"]
        assert answer["confidence"] == pytest.approx(alone["confidence"], abs=1e-4)
        assert answer["passage"] == alone["passage"]
    assert len(explained["words"]) == len(LONG.split())


def test_the_faces_of_other_servers_and_files_read_long_texts_too(
    client: httpx.Client, windowed: Path, tmp_path: Path
) -> None:
    expected = client.post("/predict", json={"text": LONG}).json()

    (hub,) = client.post("/hub", json={"inputs": LONG}).json()
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [LONG]}
    outputs = client.post(f"/v2/models/{windowed.name}/infer", json={"inputs": [tensor]}).json()["outputs"]
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": LONG}))
    flags = ["--model", str(windowed), "--quiet", "--probabilities"]
    score.main([str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *flags])

    assert {one["label"]: one["score"] for one in hub} == pytest.approx(expected["probabilities"], abs=1e-5)
    assert outputs[-1]["data"] == pytest.approx(list(expected["probabilities"].values()), abs=1e-5)
    scored = json.loads((tmp_path / "out.jsonl").read_text())
    assert scored["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-5)


@pytest.mark.parametrize("kind", ["multi_label", "regression"])
def test_several_labels_and_numbers_are_pooled_too(
    kind: str, request: pytest.FixtureRequest, start_server: StartServer, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(request.getfixturevalue(f"{kind}_folder"), tmp_path / kind))
    give_windows(folder)

    with start_server(folder) as client:
        answer = client.post("/predict", json={"text": LONG}).json()

    values, shares = by_hand(folder, LONG)
    if kind == "regression":
        assert answer["value"] == pytest.approx(values[0], rel=1e-5)
        assert answer["passage"] == passage_of(folder, int(shares.argmax()))
    else:
        assert list(answer["probabilities"].values()) == pytest.approx(list(values), abs=1e-5)
        assert ("passage" in answer) is bool(answer["labels"])


def passage_of(folder: Path, window: int) -> dict[str, int]:
    tokenizer = read_saved_model(folder).tokenizer()
    (encoded,) = tokenizer.encode([LONG])
    start, end = tokenizer.locate(LONG, encoded.passages)[window]
    return {"start": start, "end": end}


def test_a_text_has_so_many_windows_and_no_more(windowed: Path) -> None:
    tokenizer = read_saved_model(windowed).tokenizer()
    (encoded,) = tokenizer.encode([LONG * 20])

    assert len(encoded.ids) == MOST_WINDOWS * MAX_LENGTH == tokenizer.most_ids
    assert encoded.truncated
    assert len(encoded.passages) == MOST_WINDOWS


def test_files_are_tokenised_into_the_same_windows(windowed: Path) -> None:
    tokenizer = read_saved_model(windowed).tokenizer()
    texts = [*TEXTS, LONG, *(LONG[:length] for length in range(0, 400, 7) if LONG[:length].strip())]
    texts += [(LONG * 20)[:length] for length in range(300, 1200, 13)]
    many, alone = tokenizer.many(), tokenizer.encode_cleaned(texts)

    assert many.token_ids(texts) == [one.ids for one in alone]
    assert many.cut == [i for i, one in enumerate(alone) if one.truncated]
    assert 0 < many.num_cut == len(many.cut)


def test_a_passage_is_found_in_the_text_as_it_was_before_cleaning(windowed: Path) -> None:
    text = "<b>Oil</b>  prices &amp; stocks #39;rise\\again  on Wall <a href='x'>Street</a> " * 9
    saved = read_saved_model(windowed)
    tokenizer = TextTokenizer.from_json(saved.tokenizer_json, MAX_LENGTH, "news", saved.windows)
    (encoded,) = tokenizer.encode([text])
    cleaned = clean_text(text)

    for (start, end), (first, last) in zip(encoded.passages, tokenizer.locate(text, encoded.passages), strict=True):
        assert clean_text(text[first:last]) == cleaned[start:end]


def test_a_browser_is_refused_a_model_that_reads_windows(windowed: Path) -> None:
    with pytest.raises(UserError, match="reads long texts in windows"):
        browser_files(windowed)


def test_a_model_that_reads_windows_cannot_be_in_a_cascade(windowed: Path) -> None:
    with pytest.raises(UserError, match="reads long texts in windows cannot be in a cascade"):
        cascade.main([str(windowed), str(windowed)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 8}, "must have length, overlap, most and head"),
        ({"length": 7, "overlap": 1, "most": 2, "head": "classifier"}, "windows of 7 tokens"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    settings: dict[str, object], message: str, windowed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(windowed, folder)
    config = json.loads((folder / "config.json").read_text()) | {"long_texts": settings}
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelLoadError, match=message):
        read_saved_model(folder)
