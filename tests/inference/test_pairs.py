"""Models that read two texts together: the same answers everywhere, and never to a single text."""

from __future__ import annotations

import csv
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet
import pytest
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors

from common.errors import ModelLoadError, UserError
from common.model_folder import read_saved_model
from common.text import PAIR_KEY
from inference import export, predict, score
from inference.engines.model_loader import ModelLoader
from inference.exporting.browser import browser_files
from tests.inference.conftest import TEXTS, StartServer, folder_maker

PAIRS = list(zip(TEXTS, [*TEXTS[1:], TEXTS[0]], strict=True))
FIRST, SECOND = map(list, zip(*PAIRS, strict=True))
_BERT = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
# With token types, of which the second begins behind the separator; and without.
FAMILIES = {
    "bert": ("Bert", _BERT),
    "electra": ("Electra", {**_BERT, "embedding_size": 16}),
    "distilbert": ("DistilBert", {"dim": 32, "hidden_dim": 64, "n_heads": 2, "n_layers": 2}),
}


def make_pair_folder(model_folder: Path, folder: Path, family: str, **more: Any) -> Path:
    """A model of pairs with random weights, as training writes it."""
    name, sizes = FAMILIES[family]
    settings = {PAIR_KEY: 3, "max_position_embeddings": 64, **sizes, **more}
    folder_maker(model_folder, folder)(name, max_length=40, **settings)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    names = ["input_ids", "attention_mask"] + (["token_type_ids"] if name != "DistilBert" else [])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_input_names": names}))
    (folder / "metrics.json").write_text(json.dumps({"dataset": "tiny", "max_length": 40}))
    return folder


@pytest.fixture(scope="module")
def folders(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("pairs")
    return {family: make_pair_folder(model_folder, place / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def rows(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Rows labelled by the model itself."""
    place = tmp_path_factory.mktemp("rows")

    def write(family: str) -> Path:
        generator, words, path = np.random.default_rng(0), " ".join(TEXTS).split(), place / f"{family}.jsonl"
        sides = [[" ".join(generator.choice(words, generator.integers(2, 12))) for _ in range(80)] for _ in range(2)]
        pairs = list(zip(*sides, strict=True))
        answers = ModelLoader(folders[family], "torch").predict_batch(pairs)
        lines = [
            {"text": first, "text_pair": second, "label": answer["label"]}
            for (first, second), answer in zip(pairs, answers, strict=True)
        ]
        path.write_text("\n".join(map(json.dumps, lines)))
        return path

    return write


@pytest.fixture(scope="module")
def client(folders: dict[str, Path], start_server: StartServer) -> Iterator[httpx.Client]:
    with start_server(folders["bert"], MAX_TEXT_CHARS="2000", MAX_BATCH_TEXTS="8", CACHE_ENTRIES="100") as client:
        yield client


def of_transformers(folder: Path) -> list[dict[str, float]]:
    """The probabilities that transformers' own pipeline gives for the pairs, whose tokenizer knows the token types."""
    pipeline = transformers.pipeline("text-classification", model=str(folder), top_k=None, device="cpu")
    given = [{"text": first, "text_pair": second} for first, second in PAIRS]
    return [{one["label"]: one["score"] for one in scores} for scores in pipeline(given, truncation=True)]


# Engines


@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_are_answered_as_by_transformers(folders: dict[str, Path], family: str) -> None:
    answers = ModelLoader(folders[family], "torch").predict_batch(PAIRS)
    swapped = ModelLoader(folders[family], "torch").predict_batch([(second, first) for first, second in PAIRS])

    for answer, other, expected in zip(answers, swapped, of_transformers(folders[family]), strict=True):
        assert answer["probabilities"] == pytest.approx(expected, abs=1e-5)
        assert answer["probabilities"] != pytest.approx(other["probabilities"], abs=1e-3)


# BERT has token types, which an export may lose, and DistilBERT has none. ELECTRA has them as BERT does.
@pytest.mark.parametrize("engine", ["native", "onnx", "openvino"])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if name == "electra" else ()) for name in FAMILIES]
)
def test_every_engine_answers_pairs_as_the_trained_model_does(
    folders: dict[str, Path], rows: Callable[[str], Path], tmp_path: Path, family: str, engine: str
) -> None:
    pytest.importorskip({"native": "numpy", "openvino": "nncf", "onnx": "onnxruntime"}[engine])
    folder = Path(shutil.copytree(folders[family], tmp_path / "model"))
    expected = [list(one["probabilities"].values()) for one in ModelLoader(folder, "torch").predict_batch(PAIRS)]

    export.main([str(folder), "--engine", engine, "--rows", str(rows(family)), "--max_drop", "20"])

    found = [list(one["probabilities"].values()) for one in ModelLoader(folder, engine).predict_batch(PAIRS)]
    alone = [list(ModelLoader(folder, engine).predict(pair)["probabilities"].values()) for pair in PAIRS[:3]]
    assert np.abs(np.array(found) - np.array(expected)).max() < 0.12  # int8; without token types it is far more
    assert np.abs(np.array(found[:3]) - np.array(alone)).max() < 0.05  # the range of int8 depends on the batch


@pytest.mark.parametrize("family", ["bert", "electra"])
def test_the_second_text_of_a_pair_has_its_own_token_type_in_the_kernels(
    folders: dict[str, Path], rows: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    # Types as large as words, so that leaving them out cannot pass for rounding.
    folder = Path(shutil.copytree(folders[family], tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    weights[f"{family}.embeddings.token_type_embeddings.weight"] *= 8
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    export.main([str(folder), "--engine", "native", "--rows", str(rows(family)), "--max_drop", "100"])

    found = [one["probabilities"] for one in ModelLoader(folder, "native").predict_batch(PAIRS)]

    for answer, expected in zip(found, of_transformers(folder), strict=True):
        assert answer == pytest.approx(expected, abs=0.1)


def test_the_tokens_of_a_pair_that_is_cut_are_counted_once(folders: dict[str, Path]) -> None:
    saved = read_saved_model(folders["bert"])
    whole = Tokenizer.from_file(str(folders["bert"] / "tokenizer.json"))
    whole.no_truncation()
    long = (TEXTS[5], " ".join(TEXTS))

    encoded, short = saved.tokenizer().encode([long, PAIRS[0]])

    assert (len(encoded.ids), encoded.truncated) == (40, True)
    assert encoded.num_tokens == len(whole.encode(*map(saved.tokenizer().clean, long)).ids)
    assert (short.num_tokens, short.truncated) == (len(short.ids), False)


def test_the_library_refuses_a_text_of_the_other_kind(folders: dict[str, Path], model_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"text: this model reads pairs \(text, text_pair\)"):
        ModelLoader(folders["bert"]).predict("oil")
    with pytest.raises(ValueError, match=r"texts\[1\]: this model reads single texts"):
        ModelLoader(model_folder).predict_batch(["oil", ("oil", "gas")])
    with pytest.raises(ValueError, match=r"text is blank"):
        ModelLoader(folders["bert"]).predict(("oil", " "))


@pytest.mark.parametrize("separator", ["[SEP]", -1, True, 3.0, None])
def test_a_separator_that_is_no_token_id_is_refused(folders: dict[str, Path], tmp_path: Path, separator: Any) -> None:
    folder = Path(shutil.copytree(folders["bert"], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {PAIR_KEY: separator}))
    with pytest.raises(ModelLoadError, match=f"{PAIR_KEY} .* in config.json: must be the id"):
        ModelLoader(folder)


# HTTP


def _streamed(client: httpx.Client, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    body = "\n".join(map(json.dumps, lines))
    answer = client.post("/predict/batch", content=body, headers={"content-type": "application/x-ndjson"})
    return [json.loads(line) for line in answer.text.splitlines()]


def test_every_route_answers_pairs_as_the_library_does(folders: dict[str, Path], client: httpx.Client) -> None:
    expected = ModelLoader(folders["bert"]).predict_batch(PAIRS)
    batch = client.post("/predict/batch", json={"texts": FIRST, "text_pairs": SECOND}).json()
    streamed = _streamed(client, [{"text": first, "text_pair": second} for first, second in PAIRS])
    for i, ((first, second), right) in enumerate(zip(PAIRS, expected, strict=True)):
        one = client.post("/predict", json={"text": first, "text_pair": second}).json()
        given = {"inputs": {"text": first, "text_pair": second}}
        (hub,) = client.post("/hub", json=given).json()
        shares = {entry["label"]: entry["score"] for entry in hub}
        for found in (one, batch[i], streamed[i], {"label": hub[0]["label"], "probabilities": shares}):
            assert found["label"] == right["label"]
            assert found["probabilities"] == pytest.approx(right["probabilities"], abs=1e-5)
        assert one["num_tokens"] == batch[i]["num_tokens"] == streamed[i]["num_tokens"]
    several = client.post("/hub", json={"inputs": [{"text": a, "text_pair": b} for a, b in PAIRS]}).json()
    assert [scores[0]["label"] for scores in several] == [one["label"] for one in expected]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/predict", {"text": "oil"}),
        ("/predict/batch", {"texts": ["oil", "gas"]}),
        ("/explain", {"text": "oil"}),
        ("/hub", {"inputs": "oil"}),
        ("/hub", {"inputs": ["oil", "gas"]}),
        ("/v2/models/bert/infer", {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["oil"]}]}),
    ],
)
def test_a_model_of_pairs_refuses_single_texts(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    refused = client.post(path, json=body)
    assert refused.status_code == 422
    error = refused.json()["error"]
    assert "has no second text (text_pair); this model reads pairs of texts" in (
        error if isinstance(error, str) else error["message"]
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/predict", {"text": "oil", "text_pair": "gas"}),
        ("/predict/batch", {"texts": ["oil"], "text_pairs": ["gas"]}),
        ("/explain", {"text": "oil", "text_pair": "gas"}),
        ("/hub", {"inputs": {"text": "oil", "text_pair": "gas"}}),
        ("/hub", {"inputs": [{"text": "oil", "text_pair": "gas"}]}),
    ],
)
def test_a_model_of_single_texts_refuses_pairs(server: httpx.Client, path: str, body: dict[str, Any]) -> None:
    refused = server.post(path, json=body)
    assert refused.status_code == 422
    assert refused.json()["error"]["code"] == "wrong_kind_of_text"
    assert refused.json()["error"]["message"].endswith("has a second text (text_pair); this model reads single texts")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/predict", {"text": "oil", "text_pair": " "}, "text has a blank second text: there is nothing to classify"),
        ("/predict", {"text": "", "text_pair": "gas"}, "text has a blank first text: there is nothing to classify"),
        ("/predict", {"text": "oil", "text_pair": "x" * 2001}, "text_pair has 2001 characters > maximum 2000"),
        ("/predict", {"text": "oil", "text_pair": 3}, "body: text_pair: Input should be a valid string"),
        (
            "/predict/batch",
            {"texts": ["oil", "gas"], "text_pairs": ["gas", "<br>"]},
            "texts[1] has a blank second text: there is nothing to classify",
        ),
        (
            "/predict/batch",
            {"texts": ["oil", "gas"], "text_pairs": ["gas"]},
            "text_pairs has 1 entries and texts 2; send a second text for each",
        ),
        (
            "/predict/batch",
            {"texts": ["oil", "gas"], "text_pairs": ["gas", "x" * 2001]},
            "text_pairs[1] has 2001 characters > maximum 2000; shorten it",
        ),
        ("/hub", {"inputs": [{"text": "oil", "text_pair": "x" * 2001}]}, "inputs[0] has 2001 characters"),
    ],
)
def test_a_bad_pair_is_refused_by_its_place(
    client: httpx.Client, path: str, body: dict[str, Any], message: str
) -> None:
    refused = client.post(path, json=body)
    assert refused.status_code == 422
    assert refused.json()["error"]["message"].startswith(message)


def test_a_stream_goes_on_behind_a_line_without_a_second_text(client: httpx.Client) -> None:
    lines = [{"text": "oil", "text_pair": "gas"}, {"text": "oil"}, {"text": "gas", "text_pair": "oil"}]
    first, refused, last = _streamed(client, lines)
    assert refused["error"]["code"] == "wrong_kind_of_text"
    assert [first["index"], refused["index"], last["index"]] == [0, 1, 2]
    assert {"label", "probabilities"} <= first.keys() & last.keys()


def test_a_batch_may_have_as_many_pairs_as_texts(client: httpx.Client) -> None:
    assert client.post("/predict/batch", json={"texts": ["oil"] * 8, "text_pairs": ["gas"] * 8}).status_code == 200
    refused = client.post("/predict/batch", json={"texts": ["oil"] * 9, "text_pairs": ["gas"] * 9})
    assert refused.json()["error"]["message"].startswith("texts has 9 entries > maximum 8")


def test_the_largest_pairs_within_the_limits_are_answered(client: httpx.Client) -> None:
    text = '"' + "\\ud83d\\ude00" * 2000 + '"'
    batch = f'{{"texts": [{", ".join([text] * 8)}], "text_pairs": [{", ".join([text] * 8)}]}}'
    line = f'{{"text": {text}, "text_pair": {text}}}'
    assert client.post("/predict/batch", content=batch).status_code == 200
    assert client.post("/predict", content=line).status_code == 200
    (answer,) = _streamed(client, [json.loads(line)])
    assert "label" in answer


def test_an_explanation_weighs_the_words_of_both_texts(client: httpx.Client) -> None:
    first, second = "Oil prices rise again", "Ministers meet in Geneva"
    whole = client.post("/predict", json={"text": first, "text_pair": second}).json()

    explained = client.post("/explain", json={"text": first, "text_pair": second}).json()

    def without_each(text: str) -> list[str]:
        words = text.split()
        return [" ".join(words[:i] + words[i + 1 :]) for i in range(len(words))]

    for name, texts in (
        ("words", [(shorter, second) for shorter in without_each(first)]),
        ("pair_words", [(first, shorter) for shorter in without_each(second)]),
    ):
        batch = {"texts": [one for one, _ in texts], "text_pairs": [two for _, two in texts]}
        answers = client.post("/predict/batch", json=batch).json()
        expected = [whole["confidence"] - answer["probabilities"][whole["label"]] for answer in answers]
        assert [word["weight"] for word in explained[name]] == pytest.approx(expected, abs=1e-5)
    assert [word["word"] for word in explained["words"]] == first.split()
    assert [word["word"] for word in explained["pair_words"]] == second.split()
    assert (explained["pair_words"][1]["start"], explained["pair_words"][1]["end"]) == (10, 14)


def test_a_pair_with_more_words_than_passes_is_explained_in_groups(
    folders: dict[str, Path], start_server: StartServer
) -> None:
    texts = {"text": " ".join(["oil"] * 9), "text_pair": " ".join(["chip"] * 5)}
    with start_server(folders["bert"], EXPLAIN_MAX_PASSES="5") as client:
        explained = client.post("/explain", json=texts).json()
    assert [len(explained[name]) for name in ("words", "pair_words")] == [9, 5]


def _tensor(name: str, texts: list[str], **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": [len(texts)], "datatype": "BYTES", "data": texts, **more}


def test_the_open_inference_face_takes_two_tensors_in_any_order(client: httpx.Client) -> None:
    expected = client.post("/predict/batch", json={"texts": FIRST, "text_pairs": SECOND}).json()
    tensors = [_tensor("text", FIRST), _tensor("text_pair", SECOND)]

    for inputs in (tensors, tensors[::-1]):
        outputs = client.post("/v2/models/bert/infer", json={"inputs": inputs}).json()["outputs"]
        assert outputs[0]["data"] == [one["label"] for one in expected]
    described = client.get("/v2/models/bert").json()["inputs"]
    assert [one["name"] for one in described] == ["text", "text_pair"]
    assert client.get("/model").json()["reads_pairs"] is True


def test_binary_tensors_follow_one_after_the_other(client: httpx.Client) -> None:
    def packed(texts: list[str]) -> bytes:
        return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)

    def ask(sizes: list[Any]) -> httpx.Response:
        tensors = [
            {"name": name, "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": size}}
            for name, size in zip(("text", "text_pair"), sizes, strict=True)
        ]
        head = json.dumps({"inputs": tensors}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        return client.post("/v2/models/bert/infer", content=head + b"".join(tails), headers=headers)

    tails = [packed(FIRST[:2]), packed(SECOND[:2])]
    expected = client.post("/predict/batch", json={"texts": FIRST[:2], "text_pairs": SECOND[:2]}).json()

    assert ask([len(tail) for tail in tails]).json()["outputs"][0]["data"] == [one["label"] for one in expected]
    for wrong in (-1, "7", 10**6, None):
        refused = ask([wrong, len(tails[1])])
        assert (refused.status_code, "binary_data_size must be" in refused.json()["error"]) == (422, True)


@pytest.mark.parametrize(
    "inputs",
    [
        [_tensor("text", ["oil"]), _tensor("title", ["gas"])],
        [_tensor("text_pair", ["oil"]), _tensor("text_pair", ["gas"])],
        [_tensor("text", ["oil", "gas"]), _tensor("text_pair", ["gas"])],
    ],
)
def test_two_tensors_that_are_no_pairs_are_refused(client: httpx.Client, inputs: list[dict[str, Any]]) -> None:
    refused = client.post("/v2/models/bert/infer", json={"inputs": inputs})
    assert refused.status_code == 422
    assert refused.json()["error"] == "two tensors must be text and text_pair, of the same shape"


# Files, the terminal and exports


def _score(model: Path, source: Path, out: Path, *flags: str) -> list[dict[str, Any]]:
    score.main([str(source), str(out), "--model", str(model), "--quiet", *flags])
    if out.suffix == ".parquet":
        return pyarrow.parquet.read_table(out).to_pylist()
    if out.suffix == ".jsonl":
        return [json.loads(line) for line in out.read_text().splitlines()]
    return list(csv.DictReader(out.open(newline="")))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_file_of_pairs_is_scored(folders: dict[str, Path], tmp_path: Path, suffix: str) -> None:
    source, again = tmp_path / "in.jsonl", tmp_path / f"again{suffix}"
    source.write_text("\n".join(json.dumps({"question": a, "Answer": b}) for a, b in PAIRS))
    flags = ("--text_column", "question", "--pair_column", "answer")
    expected = ModelLoader(folders["bert"]).predict_batch(PAIRS)

    first = _score(folders["bert"], source, tmp_path / f"out{suffix}", *flags)
    second = _score(folders["bert"], tmp_path / f"out{suffix}", again, *flags, "--prefix", "again_")

    assert [row["label"] for row in first] == [one["label"] for one in expected]
    assert [row["again_label"] for row in second] == [one["label"] for one in expected]


def test_a_pair_without_its_second_text_is_named_with_its_line(folders: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("text,text_pair\noil,gas\noil, \n")
    with pytest.raises(UserError, match=r"in\.csv line 3: the second text is empty"):
        _score(folders["bert"], source, tmp_path / "out.csv")
    rows = _score(folders["bert"], source, tmp_path / "out.csv", "--bad_rows", "keep", "--restart")
    assert [bool(row["label"]) for row in rows] == [True, False]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_missing_column_of_second_texts_is_named(folders: dict[str, Path], tmp_path: Path, suffix: str) -> None:
    source = tmp_path / f"in{suffix}"
    match suffix:
        case ".csv":
            source.write_text("text,answer\noil,gas\n")
        case ".jsonl":
            source.write_text('{"text": "oil", "answer": "gas"}\n')
        case _:
            pyarrow.parquet.write_table(pyarrow.table({"text": ["oil"], "answer": ["gas"]}), source)
    what = "no column text_pair among text, answer; name yours with --text_column and --pair_column"
    with pytest.raises(UserError, match=what):
        _score(folders["bert"], source, tmp_path / "out.csv")


def test_a_model_of_single_texts_has_no_use_for_a_second_column(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text,text_pair\noil,gas\n")
    with pytest.raises(UserError, match="--pair_column text_pair: this model reads single texts"):
        _score(model_folder, tmp_path / "in.csv", tmp_path / "out.csv", "--pair_column", "text_pair")


def test_the_terminal_classifies_a_pair_and_a_file_of_pairs(
    folders: dict[str, Path], model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, expected = str(folders["bert"]), ModelLoader(folders["bert"]).predict_batch(PAIRS)
    lines = tmp_path / "pairs.tsv"
    lines.write_text("\n".join("\t".join(pair) for pair in PAIRS))

    predict.main([FIRST[0], "--pair", SECOND[0], "--model", model, "--json"])
    assert json.loads(capsys.readouterr().out)["label"] == expected[0]["label"]
    predict.main(["--file", str(lines), "--model", model, "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["label"] for row in found] == [one["label"] for one in expected]
    assert (found[0]["text"], found[0]["text_pair"]) == PAIRS[0]
    lines.write_text("oil\tgas\nno second text\n")
    with pytest.raises(UserError, match=r"each line needs two, separated by a tab; found 'no second text'"):
        predict.main(["--file", str(lines), "--model", model])
    with pytest.raises(UserError, match="reads pairs of texts; give the second one with --pair"):
        predict.main(["oil", "--model", model])
    with pytest.raises(UserError, match="reads single texts; leave out --pair"):
        predict.main(["oil", "--pair", "gas", "--model", str(model_folder)])


def test_an_export_without_rows_asks_for_some(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="reads pairs of texts, and the sample news has only single texts; name rows"):
        export.main([str(folders["bert"])])


def test_the_browser_page_of_a_model_of_pairs_is_refused(
    folders: dict[str, Path], rows: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders["bert"], tmp_path / "model"))
    export.main([str(folder), "--engine", "native", "--rows", str(rows("bert")), "--max_drop", "20"])
    with pytest.raises(UserError, match=r"reads pairs of texts.*; serve it with a server") as refused:
        browser_files(folder)
    assert refused.value.code == "browser-pairs"
