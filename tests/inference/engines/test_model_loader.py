from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from safetensors.torch import load_file, save_file
from transformers import pipeline

from common.errors import ModelLoadError
from common.model_folder import describe_files, read_manifest, read_saved_model, write_manifest
from common.text import clean_text
from inference import export
from inference.app import create_app
from inference.engines.base import PADDED_TEXTS
from inference.engines.model_loader import ModelLoader
from inference.settings import Settings
from tests.processes import REPOSITORY, wait_until


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ModelLoader:
    return ModelLoader(model_folder)


def test_labels_length_and_metrics_come_from_the_folder(model: ModelLoader, labels: list[str]) -> None:
    assert model.labels == labels
    assert model.max_length == 24
    assert model.metadata["dataset"] == "tiny"


def test_answers_equal_those_of_the_transformers_pipeline(
    model: ModelLoader, model_folder: Path, texts: list[str]
) -> None:
    classify = pipeline("text-classification", model=str(model_folder), top_k=None)
    for text, expected in zip(texts, classify(texts, truncation=True), strict=True):
        answer = model.predict(text)
        assert answer["label"] == expected[0]["label"]
        assert answer["confidence"] == pytest.approx(expected[0]["score"], abs=1e-5)
        scores = {one["label"]: one["score"] for one in expected}
        assert answer["probabilities"] == pytest.approx(scores, abs=1e-5)


def test_the_pt_file_answers_as_the_folder_does(
    model: ModelLoader, checkpoint: Path, texts: list[str], labels: list[str]
) -> None:
    from_file = ModelLoader(checkpoint)
    assert (from_file.labels, from_file.max_length, from_file.metadata) == (
        labels,
        24,
        model.metadata,
    )
    assert from_file.predict_batch(texts) == model.predict_batch(texts)


def test_half_precision_weights_are_served_in_float32(
    model: ModelLoader, checkpoint: Path, tmp_path: Path, texts: list[str]
) -> None:
    def halve(saved: dict[str, Any]) -> None:
        saved["model_state_dict"] = {name: value.half() for name, value in saved["model_state_dict"].items()}

    answer = ModelLoader(_changed(checkpoint, tmp_path, halve)).predict(texts[0])
    assert answer["probabilities"] == pytest.approx(model.predict(texts[0])["probabilities"], abs=1e-2)


def test_a_batch_keeps_the_order_of_its_texts(model: ModelLoader, texts: list[str]) -> None:
    many = [f"{text} {i}" for i in range(PADDED_TEXTS) for text in texts]
    answers = model.predict_batch(many)
    assert len(answers) == len(many)
    for text, answer in list(zip(many, answers, strict=True))[::17]:
        assert answer["probabilities"] == pytest.approx(model.predict(text)["probabilities"], abs=1e-5)


def test_probabilities_sum_to_one_and_the_label_is_the_likeliest(model: ModelLoader, texts: list[str]) -> None:
    for answer in model.predict_batch(texts):
        assert sum(answer["probabilities"].values()) == pytest.approx(1)
        assert answer["confidence"] == max(answer["probabilities"].values())
        assert answer["probabilities"][answer["label"]] == answer["confidence"]


def test_an_empty_batch_has_no_answers(model: ModelLoader) -> None:
    assert model.predict_batch([]) == []


@pytest.mark.parametrize("text", ["", " \n\t", "\\", "&lt;b&gt;&lt;/b&gt;", "\ud83d", "\x00", "\u200b\u200d\ufeff"])
def test_a_blank_text_is_refused(model: ModelLoader, text: str) -> None:
    with pytest.raises(ValueError, match="text is blank"):
        model.predict(text)
    with pytest.raises(ValueError, match=r"texts\[1\] is blank"):
        model.predict_batch(["News", text])


def test_the_position_table_limits_the_length(folder_copy: Path) -> None:
    _edit_json(folder_copy / "tokenizer_config.json", model_max_length=10**30)
    model = ModelLoader(folder_copy)
    assert model.max_length == 64
    model.predict("stocks " * 500)


def _edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _assert_refused(path: Path, *parts: str) -> None:
    with pytest.raises(ModelLoadError) as refusal:
        ModelLoader(path)
    line = str(refusal.value)
    assert len(line.splitlines()) == 1
    assert line.startswith(str(path))
    assert re.search("train|export|give|copy|set|write", line.rpartition(";")[2]), f"says not what to do: {line}"
    for part in parts:
        assert part in line


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    _assert_refused(tmp_path / "nothing", "no such model", "MODEL_CHECKPOINT")


def test_a_folder_that_lacks_files_is_refused_with_their_names(folder_copy: Path) -> None:
    (folder_copy / "tokenizer.json").unlink()
    (folder_copy / "config.json").unlink()
    _assert_refused(folder_copy, "lacks config.json, tokenizer.json")


def _cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _drop_the_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in weights.items() if "classifier" not in name}, folder / "model.safetensors")


def _poison_the_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["classifier.bias"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (_cut_weights, "model.safetensors: the weights do not load"),
        (_drop_the_head, "4 missing keys for DistilBertForSequenceClassification, first classifier.bias"),
        (_poison_the_head, "answers with NaN"),
        (lambda folder: _edit_json(folder / "config.json", n_layers=1), "unexpected keys"),
        (lambda folder: _edit_json(folder / "config.json", hidden_dim=48), "mismatched keys"),
        (lambda folder: _edit_json(folder / "config.json", model_type="none"), "the weights do not load"),
        (lambda folder: _edit_json(folder / "config.json", vocab_size=7), "token ids, the model only 7"),
        (lambda folder: _edit_json(folder / "config.json", id2label=None), "id2label must name the classes"),
        (
            lambda folder: _edit_json(folder / "tokenizer_config.json", model_max_length="many"),
            "model_max_length",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json: is not a JSON object"),
        (lambda folder: (folder / "metrics.json").write_bytes(b"\xff"), "metrics.json: cannot be read"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json holds no tokenizer"),
    ],
)
def test_a_damaged_folder_is_refused(folder_copy: Path, damage: Callable[[Path], object], what: str) -> None:
    damage(folder_copy)
    _assert_refused(folder_copy, what)


def _changed(checkpoint: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    saved = torch.load(checkpoint, weights_only=True)
    change(saved)
    path = tmp_path / "changed.pt"
    torch.save(saved, path)
    return path


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda saved: saved.pop("config"), "lacks config"),
        (lambda saved: saved["config"].pop("tokenizer_json"), "lacks config.tokenizer_json"),
        (
            lambda saved: saved["config"].update(max_length="24"),
            "config.max_length must be of type int, got str",
        ),
        (lambda saved: saved["config"].update(labels=["one", "two"]), "4 classes in the weights, 2 labels"),
        (lambda saved: saved["model_state_dict"].pop("network.classifier.bias"), "1 missing keys"),
    ],
)
def test_a_pt_file_that_lacks_something_is_refused(
    checkpoint: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], what: str
) -> None:
    _assert_refused(_changed(checkpoint, tmp_path, change), what)


def test_a_pt_file_without_a_dict_is_refused(tmp_path: Path) -> None:
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    _assert_refused(tmp_path / "list.pt", "holds a list, not a dict with model_state_dict, config")


def test_a_damaged_pt_file_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    path.write_bytes(checkpoint.read_bytes()[:-5000])
    _assert_refused(path, "not a readable .pt file")


def test_code_in_a_pt_file_is_refused_and_not_run(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"config": Payload()}, tmp_path / "code.pt")
    _assert_refused(tmp_path / "code.pt", "not a readable .pt file of tensors and plain values")
    assert not (tmp_path / "ran").exists()


_CODE = {
    "auto_map": {"AutoModelForSequenceClassification": "modeling_evil.Evil"},
    "attn_implementation": "somebody/kernels",
    "experts_implementation": "somebody/kernels",
    "quantization_config": {"quant_method": "gptq", "bits": 4},
}


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_no_code_that_a_model_names_runs_and_it_answers_as_without(
    kind: str, folder_copy: Path, checkpoint: Path, tmp_path: Path, model: ModelLoader, texts: list[str]
) -> None:
    def name_code(saved: dict[str, Any]) -> None:
        saved["config"]["encoder_config"] |= {**_CODE, "text_config": dict(_CODE)}

    if kind == "file":
        path = _changed(checkpoint, tmp_path, name_code)
    else:
        path = folder_copy
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **_CODE, "text_config": _CODE}))
        (path / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    loaded = ModelLoader(path, "torch")
    assert loaded.predict_batch(texts) == model.predict_batch(texts)
    assert not (tmp_path / "ran").exists()
    config = read_saved_model(path).config
    assert not _CODE.keys() & config.keys()
    assert config["text_config"] == {}


def test_a_link_is_resolved_once_and_names_the_model(folder_copy: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(folder_copy)
    loaded = ModelLoader(link, "torch")
    assert loaded.info["name"] == "current"
    assert loaded.info["path"] == str(folder_copy.resolve())


MARKUP = [
    "return <b>Oil</b> prices",
    r"\frac{oil}{prices} rise",
    "Stocks &amp; markets #39;s",
    "caf\u00e9 \u200b news  ",
]


def _pipeline_answers(folder: Path, texts: list[str]) -> list[Any]:
    found = pipeline("text-classification", model=str(folder), top_k=None)(texts, truncation=True)
    return [{one["label"]: pytest.approx(one["score"], abs=1e-5) for one in scores} for scores in found]


def _answers(folder: Path, texts: list[str]) -> list[dict[str, float]]:
    return [answer["probabilities"] for answer in ModelLoader(folder).predict_batch(texts)]


def test_a_model_from_elsewhere_reads_texts_as_transformers_reads_them(folder_copy: Path) -> None:
    (folder_copy / "metrics.json").unlink()
    assert _answers(folder_copy, MARKUP) == _pipeline_answers(folder_copy, MARKUP)
    # A half of a character is the one thing that no tokenizer takes.
    model = ModelLoader(folder_copy)
    assert model.predict("oil \ud83d prices") == model.predict("oil \ufffd prices")


def test_an_older_folder_that_names_no_cleaning_is_cleaned_as_news(folder_copy: Path) -> None:
    assert _answers(folder_copy, MARKUP) == _pipeline_answers(folder_copy, [clean_text(text) for text in MARKUP])


def test_the_folders_cleaning_applies_to_every_kind_of_call(folder_copy: Path) -> None:
    _edit_json(folder_copy / "config.json", text_cleaning="none")
    model = ModelLoader(folder_copy)
    assert _answers(folder_copy, MARKUP) == _pipeline_answers(folder_copy, MARKUP)
    with TestClient(create_app(Settings(model_checkpoint=folder_copy))) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200)
        for text in MARKUP:
            expected = pytest.approx(model.predict(text)["probabilities"], abs=1e-5)
            for route in ("/predict", "/explain"):
                assert client.post(route, json={"text": text}).json()["probabilities"] == expected
        blank = client.post("/predict", json={"text": " \n"})
        assert (blank.status_code, blank.json()["error"]["code"]) == (422, "blank_text")
        assert client.post("/predict", json={"text": "<b></b>"}).status_code == 200


def test_an_unknown_cleaning_is_refused(folder_copy: Path) -> None:
    _edit_json(folder_copy / "config.json", text_cleaning="legal")
    _assert_refused(folder_copy, "text_cleaning 'legal' in config.json: must be news or none")


def test_a_label_that_no_answer_can_carry_is_refused_when_the_model_loads(folder_copy: Path) -> None:
    config = json.loads((folder_copy / "config.json").read_text())
    config["id2label"]["1"] = "Sports \ud83d"
    (folder_copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"half of a surrogate pair.*; correct id2label in config.json"):
        ModelLoader(folder_copy)


def _with_token(folder: Path, index: int) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["zeppelin"] = index  # a hole before it: the number of tokens is in order
    path.write_text(json.dumps(content))


def test_a_token_id_that_the_model_has_no_row_for_is_refused_by_load_and_export(
    folder_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_rows = json.loads((folder_copy / "config.json").read_text())["vocab_size"]
    what = f"the tokenizer has {num_rows + 51} token ids, the model only {num_rows}"
    _with_token(folder_copy, num_rows + 50)
    _assert_refused(folder_copy, what)
    with pytest.raises(ModelLoadError, match=what):
        export.main([str(folder_copy), "--engine", "native"])
    assert not (folder_copy / "native").exists()


@pytest.mark.parametrize("engine", ["native", "onnx"])
def test_a_token_id_that_an_artefact_has_no_row_for_is_refused(
    exported_copy: Path, tmp_path: Path, engine: str
) -> None:
    artefact = exported_copy / "onnx"
    if engine == "native":
        artefact = Path(shutil.copytree(REPOSITORY / "checkpoints" / "news", tmp_path / "native"))
    num_rows = json.loads((artefact / "config.json").read_text())["vocab_size"]
    _with_token(artefact, num_rows)
    write_manifest(artefact, replace(read_manifest(artefact), files=describe_files(artefact)))
    _assert_refused(artefact, f"the tokenizer has {num_rows + 1} token ids, the model only {num_rows}")


def test_special_tokens_around_a_text_are_no_exception(folder_copy: Path) -> None:
    path = folder_copy / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"]["special_tokens"]["[CLS]"]["ids"] = [9999]
    path.write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=r"^[^\n]*$"):
        ModelLoader(folder_copy)


def test_a_text_of_which_the_tokenizer_leaves_nothing_is_blank(folder_copy: Path) -> None:
    path = folder_copy / "tokenizer.json"
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[^a-z ]"}, "content": ""}
    for frame in (content["post_processor"], None):  # with special tokens around a text, and without
        path.write_text(json.dumps(content | {"post_processor": frame}))
        model = ModelLoader(folder_copy)
        assert model.predict("oil")["label"]
        with pytest.raises(ValueError, match="text is blank"):
            model.predict("1918")
        with pytest.raises(ValueError, match=r"texts\[1\] is blank"):
            model.predict_batch(["oil", "1918"])


def test_only_what_training_measured_is_published(folder_copy: Path) -> None:
    metrics = {"dataset": "tiny", "max_length": 24, "test": {"accuracy": 0.5}}
    (folder_copy / "metrics.json").write_text(json.dumps(metrics | {"auths": {"registry": {"auth": "secret"}}}))
    with TestClient(create_app(Settings(model_checkpoint=folder_copy))) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200)
        assert client.get("/model").json()["metrics"] == metrics
