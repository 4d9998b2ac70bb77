"""Multi-label and regression models, end to end: the same answers everywhere, and never in another kind's shape."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from common.errors import ModelLoadError, UserError, run_command
from common.files import sha256_of
from common.model_folder import MANIFEST_FILE, read_manifest
from common.problem_types import MULTI_LABEL
from inference import export, predict, score
from inference.engines.answering import OneLabelAnswering, SeveralLabelsAnswering
from inference.engines.base import answers_of
from inference.engines.model_loader import ModelLoader
from tests.inference.conftest import LABELS, TEXTS, THRESHOLDS, StartServer
from tests.inference.servers import metric

KINDS = ["multi_label", "regression"]


@pytest.fixture(scope="module")
def folders(multi_label_folder: Path, regression_folder: Path) -> dict[str, Path]:
    return {"multi_label": multi_label_folder, "regression": regression_folder}


@pytest.fixture(scope="module")
def clients(folders: dict[str, Path], start_server: StartServer) -> Iterator[dict[str, httpx.Client]]:
    with (
        start_server(folders["multi_label"], CACHE_ENTRIES="100") as multi_label,
        start_server(folders["regression"], CACHE_ENTRIES="100") as regression,
    ):
        yield {"multi_label": multi_label, "regression": regression}


def _close(expected: dict[str, Any]) -> dict[str, Any]:
    """Equal but for rounding, which depends on the other texts of a forward pass."""
    if "value" in expected:
        return {"value": pytest.approx(expected["value"], rel=1e-5)}
    return {"labels": expected["labels"], "probabilities": pytest.approx(expected["probabilities"], abs=1e-5)}


# The library


def test_a_label_is_given_from_its_threshold_on_the_best_first() -> None:
    answering = SeveralLabelsAnswering(["a", "b", "c"], [0.5, 0.9, 0.2])
    assert answering.predict([0.5, 0.89, 0.7]) == {
        "labels": ["c", "a"],
        "probabilities": {"a": 0.5, "b": 0.89, "c": 0.7},
    }
    assert answering.predict([0.4, 0.1, 0.1])["labels"] == []


@pytest.mark.parametrize("labels", [["b", "a"], ["a, b", "c"], ["[a]", "b"], ["a|b", "c"], []])
def test_joined_labels_are_read_back_by_training(labels: list[str]) -> None:
    answering = SeveralLabelsAnswering([*labels, "d"], [0.5] * (len(labels) + 1))
    assert list(MULTI_LABEL.read_label(answering.joined(labels))) == labels


def test_one_label_is_answered_as_ever() -> None:
    assert OneLabelAnswering(["a", "b"]).predict([0.25, 0.75]) == {
        "label": "b",
        "confidence": 0.75,
        "probabilities": {"a": 0.25, "b": 0.75},
    }


def test_the_library_gives_the_labels_that_reach_their_thresholds(folders: dict[str, Path]) -> None:
    answers = ModelLoader(folders["multi_label"]).predict_batch(TEXTS)
    for answer in answers:
        named = answer["probabilities"].items()
        reached = [name for (name, share), least in zip(named, THRESHOLDS, strict=True) if share >= least]
        assert sorted(answer["labels"]) == sorted(reached)
        assert answer["labels"] == sorted(reached, key=lambda name: -answer["probabilities"][name])
    assert {len(answer["labels"]) for answer in answers} > {1}


# HTTP


@pytest.mark.parametrize("kind", KINDS)
def test_every_route_answers_as_the_library_does(
    folders: dict[str, Path], clients: dict[str, httpx.Client], kind: str
) -> None:
    client, expected = clients[kind], ModelLoader(folders[kind]).predict_batch(TEXTS)
    batch = client.post("/predict/batch", json={"texts": TEXTS}).json()
    lines = "\n".join(json.dumps({"text": text}) for text in TEXTS)
    stream = client.post("/predict/batch", content=lines, headers={"content-type": "application/x-ndjson"}).text
    streamed = [json.loads(line) for line in stream.splitlines()]
    for i, (text, one) in enumerate(zip(TEXTS, expected, strict=True)):
        answer = client.post("/predict", json={"text": text}).json()
        assert list(answer) == [*one, "truncated", "num_tokens"]
        assert {name: answer[name] for name in one} == _close(one)
        for other in (batch[i], streamed[i]):
            assert {name: other[name] for name in one} == _close(one)
            assert (other["truncated"], other["num_tokens"]) == (answer["truncated"], answer["num_tokens"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", [None, "softmax", "sigmoid", "none"])
def test_the_hub_face_gives_the_scores_of_a_transformers_pipeline(
    folders: dict[str, Path], clients: dict[str, httpx.Client], kind: str, function: str | None
) -> None:
    pipeline = transformers.pipeline("text-classification", model=str(folders[kind]), top_k=None, device="cpu")
    options = {} if function is None else {"function_to_apply": function}
    expected = pipeline(TEXTS, truncation=True, **options)
    found = clients[kind].post("/hub", json={"inputs": TEXTS, "parameters": options}).json()
    for ours, theirs in zip(found, expected, strict=True):
        ours, theirs = ({one["label"]: one["score"] for one in scores} for scores in (ours, theirs))
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    if function is None:
        for text, scores in zip(TEXTS, expected, strict=True):
            answer = clients[kind].post("/predict", json={"text": text}).json()
            named = answer["probabilities"] if kind == "multi_label" else {"price": answer["value"]}
            assert named == pytest.approx({one["label"]: one["score"] for one in scores}, rel=1e-5, abs=1e-5)


def test_a_gateway_gets_what_its_format_has_a_place_for(clients: dict[str, httpx.Client]) -> None:
    bodies = [("/classify", name) for name in ("input", "inputs", "text")] + [("/v1/classify", "input")]
    for kind in KINDS:
        expected = clients[kind].post("/predict", json={"text": TEXTS[0]}).json()
        for path, name in bodies:
            answer = clients[kind].post(path, json={name: TEXTS[0]})
            if kind == "multi_label" and (path, name) in bodies[2:]:
                assert answer.json()["labels"] == pytest.approx(expected["probabilities"])
                continue
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "wrong_kind_of_model")
            assert f"do not fit the format of {name}" in error["message"]


def test_top_k_names_fewer_probabilities_and_takes_no_label_away(clients: dict[str, httpx.Client]) -> None:
    for text in TEXTS:
        whole, short = (
            clients["multi_label"].post("/predict", json={"text": text, **more}).json() for more in ({}, {"top_k": 1})
        )
        assert short["labels"] == whole["labels"]
        best = max(whole["probabilities"], key=whole["probabilities"].get)
        assert short["probabilities"] == {best: whole["probabilities"][best]}


def _without_each_word(client: httpx.Client, text: str) -> Iterator[dict[str, Any]]:
    words = text.split()
    for i in range(len(words)):
        yield client.post("/predict", json={"text": " ".join(words[:i] + words[i + 1 :])}).json()


def test_an_explanation_is_of_the_most_probable_label_or_of_the_one_asked_for(clients: dict[str, httpx.Client]) -> None:
    client, text = clients["multi_label"], "Oil prices rise again"
    whole = client.post("/predict", json={"text": text}).json()["probabilities"]
    others = [answer["probabilities"] for answer in _without_each_word(client, text)]
    for asked_for in (None, *LABELS):
        explained = client.post("/explain", json={"text": text, "label": asked_for}).json()
        label = asked_for or max(whole, key=whole.get)
        assert explained["explained"] == label
        weights = [word["weight"] for word in explained["words"]]
        assert weights == pytest.approx([whole[label] - without[label] for without in others], abs=1e-6)
    refused = client.post("/explain", json={"text": text, "label": "Weather"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "unknown_label")


def test_an_explanation_of_a_number_is_how_far_it_falls(clients: dict[str, httpx.Client]) -> None:
    client, text = clients["regression"], "Oil prices rise again"
    explained = client.post("/explain", json={"text": text}).json()
    value = client.post("/predict", json={"text": text}).json()["value"]
    expected = [value - answer["value"] for answer in _without_each_word(client, text)]
    assert [word["weight"] for word in explained["words"]] == pytest.approx(expected, abs=1e-2)
    assert explained["value"] == pytest.approx(value, rel=1e-6)
    (word,) = client.post("/explain", json={"text": "Goal!"}).json()["words"]
    assert word["weight"] == 0  # without it there is no text, and no number to compare with


def test_one_label_can_be_asked_for_too(server: httpx.Client) -> None:
    text = "Oil prices rise again"
    usual = server.post("/explain", json={"text": text}).json()
    assert "explained" not in usual
    asked = server.post("/explain", json={"text": text, "label": usual["label"]}).json()
    assert asked == {**usual, "explained": usual["label"]}


def _infer(client: httpx.Client, model: str, texts: list[str], *outputs: str) -> httpx.Response:
    tensor = {"name": "text", "shape": [len(texts)], "datatype": "BYTES", "data": texts}
    body = {"inputs": [tensor], "outputs": [{"name": name} for name in outputs]}
    return client.post(f"/v2/models/{model}/infer", json=body)


@pytest.mark.parametrize("kind", KINDS)
def test_the_open_inference_face_answers_with_the_tensors_of_its_metadata(
    folders: dict[str, Path], clients: dict[str, httpx.Client], kind: str
) -> None:
    client, name = clients[kind], folders[kind].name
    expected = client.post("/predict/batch", json={"texts": TEXTS}).json()
    outputs = _infer(client, name, TEXTS).json()["outputs"]
    described = client.get(f"/v2/models/{name}").json()["outputs"]
    assert [(one["name"], one["datatype"], len(one["shape"])) for one in outputs] == [
        (one["name"], one["datatype"], len(one["shape"])) for one in described
    ]
    tensors = {one["name"]: one["data"] for one in outputs}
    if kind == "regression":
        assert tensors == {"value": pytest.approx([one["value"] for one in expected], rel=1e-6)}
    else:
        assert tensors["labels"] == ["|".join(one["labels"]) for one in expected]
        flat = [share for one in expected for share in one["probabilities"].values()]
        assert tensors["probabilities"] == pytest.approx(flat, abs=1e-6)
    refused = _infer(client, name, TEXTS, "confidence")
    assert refused.status_code == 422
    assert "the model has no output confidence, its outputs are " in refused.json()["error"]


def test_the_server_says_what_its_model_answers(clients: dict[str, httpx.Client], server: httpx.Client) -> None:
    several, number, one = (client.get("/model").json() for client in (*clients.values(), server))
    assert several["problem_type"] == "multi_label_classification"
    assert several["thresholds"] == dict(zip(LABELS, THRESHOLDS, strict=True))
    assert (number["problem_type"], number["labels"]) == ("regression", ["price"])
    assert one["problem_type"] == "single_label_classification"
    assert "thresholds" not in number | one
    assert clients["multi_label"].get("/health").json()["labels"] == LABELS
    assert "labels" not in clients["regression"].get("/health").json()


def test_metrics_count_every_label_that_is_given(clients: dict[str, httpx.Client]) -> None:
    client = clients["multi_label"]
    names = [f'distrinews_predictions_total{{label="{label}"}}' for label in LABELS]
    names += ["distrinews_unlabelled_texts_total", "distrinews_confidence_count"]

    def counted() -> list[float]:
        lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
        return [float(lines.get(name, 0)) for name in names]

    before = counted()
    answers = client.post("/predict/batch", json={"texts": TEXTS}).json()
    expected = [sum(label in one["labels"] for one in answers) for label in LABELS]
    expected += [sum(not one["labels"] for one in answers), sum(len(one["labels"]) for one in answers)]
    assert [after - earlier for after, earlier in zip(counted(), before, strict=True)] == expected
    clients["regression"].post("/predict", json={"text": "Goal!"})
    assert metric(clients["regression"], "confidence_count") == 0


# The export


def _rows(folder: Path, kind: str, path: Path, noise: float = 0.0) -> Path:
    """Rows labelled by the model itself; numbers are moved by so many standard deviations."""
    generator = np.random.default_rng(0)
    words = " ".join(TEXTS).split()
    texts = [" ".join(generator.choice(words, generator.integers(2, 20))) for _ in range(200)]
    answers = ModelLoader(folder, "torch").predict_batch(texts)
    if kind == "multi_label":
        labels: list[Any] = [one["labels"] for one in answers]
    else:
        values = np.array([one["value"] for one in answers])
        labels = (values + noise * values.std() * generator.standard_normal(len(values))).tolist()
    rows = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def exported(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies of both models with an artefact for the native engine, and their rows beside them."""
    found = {}
    for kind, folder in folders.items():
        copy = Path(shutil.copytree(folder, tmp_path_factory.mktemp("exported") / folder.name))
        rows = _rows(copy, kind, copy.parent / "rows.jsonl", noise=0.5)
        export.main([str(copy), "--engine", "native", "--rows", str(rows), "--max_drop", "20"])
        found[kind] = copy
    return found


@pytest.mark.parametrize("engine", ["native", "openvino", "onnx"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_engine_is_measured_in_the_metric_of_the_task(
    exported: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, engine: str
) -> None:
    pytest.importorskip({"native": "numpy", "openvino": "nncf", "onnx": "onnxruntime"}[engine])
    folder, rows = Path(shutil.copytree(exported[kind], tmp_path / "model")), exported[kind].parent / "rows.jsonl"
    export.main([str(folder), "--engine", engine, "--rows", str(rows), "--max_drop", "20"])
    accuracy = read_manifest(folder / engine).accuracy
    assert (accuracy["rows"], accuracy["metric"]) == (200, {"multi_label": "micro_f1", "regression": "rmse"}[kind])
    assert {"multi_label": "micro-F1", "regression": "RMSE"}[kind] in capfd.readouterr().out
    reference, artefact = ModelLoader(folder, "torch"), ModelLoader(folder, engine)
    assert artefact.info["engine"] == f"{engine} int8"
    for right, found in zip(reference.predict_batch(TEXTS), artefact.predict_batch(TEXTS), strict=True):
        if kind == "regression":
            assert found["value"] == pytest.approx(right["value"], abs=accuracy["spread"])
    if kind == "multi_label":
        # Calibrated, so other probabilities, but the labels are those that the same scores gave before.
        ids = [one.ids for one in artefact.tokenizer.encode(TEXTS)]
        raw = answers_of(artefact.engine, artefact.answering.problem_type, ids)
        assert raw == pytest.approx(answers_of(reference.engine, reference.answering, ids), abs=0.25)
        given = [[LABELS[i] for i in np.flatnonzero(row >= reference.answering.thresholds)] for row in raw]
        assert [sorted(one["labels"]) for one in artefact.predict_batch(TEXTS)] == list(map(sorted, given))
    if kind == "multi_label":
        assert accuracy["before"] == 1
        assert accuracy["drop_points"] == pytest.approx(100 * (1 - accuracy["after"]), abs=1e-3)
    else:
        increase = 100 * (accuracy["after"] / accuracy["before"] - 1)
        assert accuracy["increase_percent"] == pytest.approx(increase, abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (
            "multi_label",
            r"error: micro-F1 drops by \d+\.\d\d points \(100\.00% to \d\d\.\d\d% on 200 rows\), more",
        ),
        ("regression", r"error: RMSE rises by \d+\.\d\d% \([\d.]+ to [\d.]+ on 200 rows\), more than --max_drop 0"),
    ],
)
def test_a_loss_is_refused_in_the_metric_of_the_task_with_the_texts_that_changed(
    exported: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, line: str
) -> None:
    folder = Path(shutil.copytree(exported[kind], tmp_path / "model"))
    before = (folder / "native" / MANIFEST_FILE).read_bytes()
    rows = _rows(folder, kind, tmp_path / "rows.jsonl", noise=0.5)
    with pytest.raises(SystemExit) as end:
        run_command(lambda: export.main([str(folder), "--engine", "native", "--rows", str(rows), "--max_drop", "0"]))
    assert end.value.code == 1
    first, *changed = capfd.readouterr().err.splitlines()
    assert re.match(line, first)
    assert 1 <= len(changed) <= 10
    assert all(" -> " in one and "(right: " in one for one in changed)
    assert (folder / "native" / MANIFEST_FILE).read_bytes() == before


def _edit_manifest(folder: Path, edit: Any) -> None:
    path = folder / MANIFEST_FILE
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("multi_label", r"its answers differ by 0\.\d\d from the reference"),
        ("regression", r"its answers differ by \d+\.\d\d standard deviations from the reference"),
    ],
)
def test_an_artefact_with_other_weights_does_not_serve_though_its_hashes_are_right(
    exported: dict[str, Path], tmp_path: Path, kind: str, what: str
) -> None:
    folder = Path(shutil.copytree(exported[kind] / "native", tmp_path / "native"))
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    weights["classifier.weight"] *= -1
    save_file(weights, file)
    _edit_manifest(folder, lambda content: content["files"][file.name].update(sha256=sha256_of(file)))
    with pytest.raises(ModelLoadError, match=what):
        ModelLoader(folder)


def test_a_regression_artefact_without_its_spread_is_refused(exported: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported["regression"] / "native", tmp_path / "native"))
    _edit_manifest(folder, lambda content: content["accuracy"].pop("spread"))
    with pytest.raises(ModelLoadError, match=r"accuracy\.spread None: must be a number greater than 0"):
        ModelLoader(folder)


@pytest.mark.parametrize(
    ("kind", "label", "what"),
    [
        ("multi_label", "World|Weather", "label 'Weather' is not one of the model's labels"),
        ("regression", "cheap", "label 'cheap' must be a number"),
    ],
)
def test_rows_with_labels_of_another_kind_are_refused_with_their_line(
    folders: dict[str, Path], tmp_path: Path, kind: str, label: str, what: str
) -> None:
    (tmp_path / "rows.csv").write_text(f"text,label\nGoal!,{label}\n")
    with pytest.raises(UserError, match=f"rows.csv line 2: {what}"):
        export.main([str(folders[kind]), "--rows", str(tmp_path / "rows.csv")])


@pytest.mark.parametrize("kind", KINDS)
def test_the_sample_news_measure_no_other_kind_of_model(folders: dict[str, Path], kind: str) -> None:
    with pytest.raises(UserError, match="name some with --rows"):
        export.main([str(folders[kind])])


# Files and the terminal


def _score(model: Path, tmp_path: Path, suffix: str, *flags: str) -> list[dict[str, Any]]:
    source, out = tmp_path / "in.jsonl", tmp_path / f"out{suffix}"
    source.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    score.main([str(source), str(out), "--model", str(model), "--quiet", "--restart", *flags])
    if suffix == ".parquet":
        return pyarrow.parquet.read_table(out).to_pylist()
    if suffix == ".jsonl":
        return [json.loads(line) for line in out.read_text().splitlines()]
    return list(csv.DictReader(out.open(newline="")))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_scored_files_have_the_labels_of_each_row(folders: dict[str, Path], tmp_path: Path, suffix: str) -> None:
    model = folders["multi_label"]
    expected = ModelLoader(model).predict_batch(TEXTS)
    rows = _score(model, tmp_path, suffix, "--probabilities")
    for row, answer in zip(rows, expected, strict=True):
        assert row["labels"] == (answer["labels"] if suffix == ".jsonl" else "|".join(answer["labels"]))
        shares = (
            row["probabilities"] if suffix == ".jsonl" else {one: float(row[f"probability_{one}"]) for one in LABELS}
        )
        assert shares == pytest.approx(answer["probabilities"], abs=1e-5)
        assert not {"label", "confidence"} & row.keys()


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_scored_files_have_the_number_of_each_row(folders: dict[str, Path], tmp_path: Path, suffix: str) -> None:
    model = folders["regression"]
    expected = ModelLoader(model).predict_batch(TEXTS)
    rows = _score(model, tmp_path, suffix)
    assert [set(row) for row in rows] == [{"text", "value"}] * len(TEXTS)
    assert [float(row["value"]) for row in rows] == pytest.approx([one["value"] for one in expected], rel=1e-5)


def test_a_number_has_no_probabilities(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--probabilities: this model answers with a number") as refused:
        _score(folders["regression"], tmp_path, ".csv", "--probabilities")
    assert refused.value.code == "flags-conflict"


def test_a_job_is_not_resumed_with_other_thresholds(folders: dict[str, Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(folders["multi_label"], tmp_path / "model"))
    _score(model, tmp_path, ".csv")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "label_thresholds": [0.9] * 4}))
    with pytest.raises(UserError) as refused:
        score.main([str(tmp_path / "in.jsonl"), str(tmp_path / "out.csv"), "--model", str(model), "--quiet"])
    assert refused.value.code == "score-job-changed"


def test_the_terminal_shows_labels_with_their_thresholds_or_the_number(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {kind: ModelLoader(folder).predict(TEXTS[0]) for kind, folder in folders.items()}
    predict.main([TEXTS[0], "--model", str(folders["multi_label"])])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (", ".join(answers["multi_label"]["labels"]) or "no label reaches its threshold")
    assert any(line.endswith("given if at least 30.0%") and line.startswith("Sports ") for line in lines)
    predict.main([TEXTS[0], "--model", str(folders["regression"])])
    assert capsys.readouterr().out == f"price  {answers['regression']['value']:.6g}\n"


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_gets_a_line_for_each_text(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[:2]))
    expected = ModelLoader(folders[kind]).predict_batch(TEXTS[:2])
    command = ["--file", str(tmp_path / "texts.txt"), "--model", str(folders[kind])]
    predict.main(command)
    written = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    plain = [f"{one['value']:.6g}" if kind == "regression" else "|".join(one["labels"]) for one in expected]
    assert written == [[answer, text] for answer, text in zip(plain, TEXTS, strict=False)]
    predict.main([*command, "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == [{"text": text, **one} for text, one in zip(TEXTS, expected, strict=False)]


def test_an_infinite_score_is_no_probability() -> None:
    found = MULTI_LABEL.answers(np.array([[math.inf, 0.0], [-math.inf, math.nan]], dtype=np.float32))
    assert np.isnan(found).tolist() == [[True, False], [True, True]]
