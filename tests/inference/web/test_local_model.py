"""A model in the visitor's browser: its kernels in Node, and all of it in a real Chromium."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from common.errors import ModelLoadError, UserError
from common.problem_types import SINGLE_LABEL
from deployment.compile_kernels import BROWSER_FILES, sources_hash
from inference import export
from inference.engines import native
from inference.engines.answering import Answering
from inference.engines.base import TokenBatch, answers_of
from inference.engines.native.engine import NativeEngine
from inference.engines.native.library import library_path
from inference.engines.selection import load_model
from inference.exporting.browser import browser_files
from tests.http_servers import served_folder
from tests.inference.demo_browser import chromium, until
from tests.processes import REPOSITORY

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.skipif(library_path() is None, reason=native.is_supported()[1])
WEB = REPOSITORY / "inference" / "web"
TEXTS = [
    "Oil prices rise again as stocks fall on Wall Street.",
    "Goal!",
    "Ministers meet in Geneva for talks on a cease-fire; observers expect an answer within the week, or soon after it.",
    "caf\u00e9 &amp; <b>bar</b> \\ \u4e2d\u6587 [SEP]",
]
NEWS = REPOSITORY / "checkpoints" / "news"
KINDS_OF_TEXTS = [
    *TEXTS,
    "x",
    "Apple sues a football club",
    "The home side won the cup final after extra time and penalties in the Champions League",
    "Chip maker cuts its profit forecast as rivals release faster processors for phones",
    "def f(x): return [y for y in x if y > 3]",
    "Le ministre a annonc\u00e9 hier une r\u00e9forme des retraites",
    "\u041f\u0440\u0435\u0437\u0438\u0434\u0435\u043d\u0442 \u043f\u043e\u0434\u043f\u0438\u0441\u0430\u043b",
    "\u65e5\u672c\u9280\u884c\u306f\u91d1\u5229\u3092\u5f15\u304d\u4e0a\u3052\u305f",
    "Shares in the software maker rose three percent after it raised its forecast for the year. " * 30,
]
MakeFolder = Callable[..., Path]


def with_artefact(folder: Path, rows_file: Path, limit: int = 99) -> Path:
    """Export a model; 99 rows are too few to calibrate on, so that answers are what the engine computes."""
    rows = ["--rows", str(rows_file), "--limit", str(limit)]
    export.main([str(folder), "--engine", "native", *rows, "--max_drop", "100"])
    return folder


@pytest.fixture(scope="module")
def native_folder(model_folder: Path, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native") / "tiny"
    return with_artefact(Path(shutil.copytree(model_folder, folder)), rows_file)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def expected_logits(model: Path, files: dict[str, bytes], texts: list[str]) -> np.ndarray:
    """What the native engine answers with the word embeddings of the files."""
    loaded = load_model(model, "native")
    engine = loaded.engine
    assert isinstance(engine, NativeEngine)
    weights = json.loads(files["model.json"])["weights"]
    packed, shape = files[weights["file"]], engine.words.shape
    words = np.frombuffer(packed, np.int8, engine.words.size, weights["image"]).reshape(shape)
    scale = np.frombuffer(packed, np.float32, shape[0], weights["image"] + engine.words.size)
    engine.words[...] = words * scale[:, None]
    ids = [encoded.ids for encoded in loaded.tokenizer.encode(texts)]
    return np.concatenate([engine.logits(TokenBatch.of([one])) for one in ids])


def expected_predictions(
    model: Path, files: dict[str, bytes], texts: list[str], asked: list[dict[str, Any]]
) -> list[list[dict[str, Any]]]:
    """What a server answers with the word embeddings of the files, for each that is asked for."""
    loaded = load_model(model, "native")
    answering = Answering.of(loaded.saved, loaded.calibration)
    scores = answering.scores(expected_logits(model, files, texts))
    values = answering.problem_type.answers(scores).tolist()
    batch = TokenBatch.of([encoded.ids for encoded in loaded.tokenizer.encode(texts)])
    familiarity = answering.familiarity(batch, scores) or [None] * len(texts)
    wanted = [answering.wanted(**one) for one in asked]
    answers = list(zip(values, familiarity, strict=True))
    return [[answering.predict(one) | answering.honest(one, known, some) for one, known in answers] for some in wanted]


def flat(predictions: list[list[dict[str, Any]]]) -> tuple[list[Any], list[float]]:
    """What must be equal, and the numbers, which have to be near."""
    numbers, others = [], []
    for one in (one for some in predictions for one in some):
        found = [one.get(name) for name in ("confidence", "familiarity", "value")]
        found += [*one.get("probabilities", {}).values(), *one.get("interval", [])]
        numbers += [number for number in found if number is not None]
        others.append({name: one.get(name) for name in ("label", "labels", "set", "abstained", "coverage")})
        others.append(sorted(one))
    return others, numbers


# ---------------------------------------------------------------- what is published


def test_the_compiled_kernels_are_those_of_the_sources() -> None:
    for name in BROWSER_FILES:
        end = (WEB / name).read_bytes()[-32:]
        assert end == sources_hash(name), f"{name}: run python deployment/compile_kernels.py --browser"


def test_a_visitor_loads_less_than_214_kb_of_code() -> None:
    code = [path for path in WEB.glob("[!d]*") if path.suffix in (".html", ".js", ".css", ".svg")]  # but docs.*
    largest = max((WEB / name).stat().st_size for name in BROWSER_FILES)
    assert sum(path.stat().st_size for path in code) + largest < 214_000


def test_smaller_embeddings_change_answers_less_than_int8_did(native_folder: Path, rows_file: Path) -> None:
    texts = [json.loads(line)["text"] for line in rows_file.read_text().splitlines()]
    loaded, reference = load_model(native_folder, "native"), load_model(native_folder, "torch")
    ids = [encoded.ids for encoded in loaded.tokenizer.encode(texts)]
    exact, before = (answers_of(one.engine, SINGLE_LABEL, ids) for one in (reference, loaded))
    after = SINGLE_LABEL.answers(expected_logits(native_folder, browser_files(native_folder), texts))
    assert np.square(after - before).mean() < np.square(before - exact).mean()


def test_a_model_without_a_native_artefact_is_refused(model_folder: Path) -> None:
    with pytest.raises(UserError, match=r"there is no native artefact.*--engine native") as refused:
        browser_files(model_folder)
    assert refused.value.code == "artefact-missing"


def test_an_artefact_of_other_weights_is_refused(native_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(native_folder, tmp_path / "changed"))
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(ModelLoadError, match="made from other weights"):
        browser_files(folder)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda settings: settings["model"].update(type="BPE", merges=[]), "the model is BPE, not WordPiece"),
        (lambda settings: settings.update(normalizer=None), "the normalizer is missing, not BertNormalizer"),
        (lambda settings: settings["added_tokens"][0].update(lstrip=True), r"'\[PAD\]' is matched in a special way"),
    ],
    ids=["byte pairs", "no normalizer", "a token with spaces"],
)
def test_another_tokenizer_is_refused_in_one_line(
    model_folder: Path, rows_file: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], what: str
) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "other"))
    settings = json.loads((folder / "tokenizer.json").read_text())
    change(settings)
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    with_artefact(folder, rows_file)
    with pytest.raises(UserError, match=what) as refused:
        browser_files(folder)
    assert refused.value.code == "browser-tokenizer"
    assert "\n" not in str(refused.value)


# ---------------------------------------------------------------- in Node


def in_node(
    base: str, texts: list[str], instructions: str = "auto", asked: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    if not shutil.which("node"):
        pytest.skip("Node runs the page's kernels, and is not installed")
    options = subprocess.run(["node", "--v8-options"], capture_output=True, text=True, check=True).stdout
    flags = ["--experimental-wasm-relaxed-simd"] if "relaxed-simd" in options else []  # newer ones need no flag
    command = ["node", "--no-warnings", *flags, Path(__file__).with_name("run_in_node.mjs"), instructions]
    question = json.dumps({"base": base, "texts": texts, "asked": asked})
    done = subprocess.run(command, input=question, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def logits_of(answer: dict[str, Any]) -> np.ndarray:
    return np.array(answer["bits"], dtype=np.uint32).view(np.float32)


@pytest.fixture(
    params=[
        "tiny",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("BERT", "MPNet")),
        "ELECTRA with narrow embeddings",
    ]
)
def any_folder(request: pytest.FixtureRequest, make_folder: MakeFolder, rows_file: Path) -> Path:
    if request.param == "tiny":
        return request.getfixturevalue("native_folder")
    sizes = {"hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 2, "num_attention_heads": 2}
    family = {"BERT": "Bert", "MPNet": "MPNet"}.get(request.param, "Electra")
    # With larger weights, int8 embeddings of 32 numbers change the answers of a random model too much.
    more = {"embedding_size": 32, "initializer_range": 0.1} if family == "Electra" else {}
    return with_artefact(make_folder(family, max_position_embeddings=64, **sizes, **more), rows_file)


@pytest.fixture
def many_promises(tmp_path: Path) -> Path:
    """The model of the repository with everything that a calibration may hold, beside what was fitted."""
    folder = Path(shutil.copytree(NEWS, tmp_path / "news"))
    manifest = json.loads((folder / "manifest.json").read_text())
    record = manifest["calibration"]
    del record["temperature"]
    record |= {"scale": [0.8, 0.9, 1.0, 1.1], "offset": [0.3, 0.0, -0.2, 0.1]}
    record["coverage"][-1]["own_thresholds"] = {"Business": 0.2}
    costs = [[0, 1, 5, 1], [1, 0, 1, 1], [2, 1, 0, 1], [1, 1, 1, 0]]
    record["operating_points"] |= {
        "costs": {"max_cost": 0.4, "costs": costs, "threshold": 0.5},
        "precision": {"thresholds": {"World": 0.9, "Sci/Tech": 0.99}},
        "careful": {"max_error": 0.025, "threshold": 0.97},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("folder", ["fitted", "many promises"])
def test_node_knows_as_well_as_a_server_what_it_does_not_know(
    folder: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model, names = NEWS, []
    if folder == "many promises":
        model, names = request.getfixturevalue("many_promises"), ["costs", "precision", "careful"]
    asked = [{"coverage": 0.95, "max_error": 0.02, "familiarity": True}, {"coverage": 0.5}, {"coverage": 0.999}]
    asked += [{}, {"familiarity": True}, *({"max_error": one} for one in (0.01, 0.019, 0.025, 1.0, *names))]
    files = browser_files(model)
    found = in_node(write(tmp_path / "site", files).as_uri() + "/", KINDS_OF_TEXTS, asked=asked)["predictions"]
    expected = expected_predictions(model, files, KINDS_OF_TEXTS, asked)
    reasons = {one["abstained"] for one in expected[0]}
    assert reasons == {None, "uncertain", "unfamiliar"}
    (others, numbers), (expected_others, expected_numbers) = flat(found), flat(expected)
    assert others == expected_others
    np.testing.assert_allclose(numbers, expected_numbers, rtol=0, atol=1e-9)


def test_what_cannot_be_promised_is_refused_in_one_line(tmp_path: Path) -> None:
    base = write(tmp_path / "site", browser_files(NEWS)).as_uri() + "/"
    for asked, what in (({"coverage": 0.9999}, "coverage 0.9999"), ({"max_error": 0.001}, "max_error 0.001")):
        refused = in_node(base, TEXTS, asked=[asked])
        assert (refused["error"], refused["code"]) == (f"{what} cannot be promised by this model", "no_guarantee")


def test_node_gives_the_logits_of_the_native_engine(any_folder: Path, tmp_path: Path) -> None:
    files = browser_files(any_folder)
    base = write(tmp_path / "site", files).as_uri() + "/"
    expected = expected_logits(any_folder, files, TEXTS)
    relaxed, plain = in_node(base, TEXTS), in_node(base, TEXTS, "simd")
    assert relaxed["info"]["instructionSet"] == "relaxed-simd"
    assert plain["info"]["instructionSet"] == "simd"
    np.testing.assert_array_equal(logits_of(relaxed), expected)
    # Plain SIMD rounds twice: an activation may get the next step of int8.
    assert np.abs(logits_of(plain) - expected).max() < 0.1 * expected.std()
    np.testing.assert_array_equal(logits_of(plain).argmax(axis=1), expected.argmax(axis=1))


def test_a_list_is_answered_as_each_text_alone_and_a_long_text_is_cut_as_on_the_server(
    native_folder: Path, tmp_path: Path
) -> None:
    base = write(tmp_path / "site", browser_files(native_folder)).as_uri() + "/"
    texts = [*TEXTS, "oil prices " * 300] * 20  # several passes
    answers = in_node(base, texts)["answers"]
    encoded = load_model(native_folder, "native").tokenizer.encode(texts)
    assert [(one["tokens"], one["truncated"]) for one in answers] == [(e.num_tokens, e.truncated) for e in encoded]
    assert answers[:5] == answers[95:]
    assert all(abs(sum(one["values"]) - 1) < 1e-9 for one in answers)


@pytest.mark.parametrize(("kind", "label"), [("multi_label_folder", "World"), ("regression_folder", 1200)])
def test_other_kinds_of_models_answer_in_node_as_on_a_server(
    kind: str, label: object, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    texts = [*TEXTS, *(f"{text} {i}" for i in range(30) for text in TEXTS)]  # enough to calibrate on
    rows.write_text("\n".join(json.dumps({"text": text, "label": label}) for text in texts))
    folder = with_artefact(Path(shutil.copytree(request.getfixturevalue(kind), tmp_path / "model")), rows, len(texts))
    files = browser_files(folder)
    found = in_node(write(tmp_path / "site", files).as_uri() + "/", TEXTS, asked=[{"coverage": 0.9}])
    expected = expected_predictions(folder, files, TEXTS, [{"coverage": 0.9}])
    (others, numbers), (expected_others, expected_numbers) = flat(found["predictions"]), flat(expected)
    assert others == expected_others
    spread = max(1.0, float(np.abs(expected_numbers).max()))
    np.testing.assert_allclose(numbers, expected_numbers, rtol=0, atol=1e-9 * spread)
    assert found["info"]["problemType"] == load_model(folder, "native").saved.problem_type.name


def _cut(files: dict[str, bytes], name: str, size: int) -> dict[str, bytes]:
    return {**files, name: files[name][:size]}


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda files, name: {name: files[name]}, "model.json is missing here"),
        (lambda files, name: _cut(files, "model.json", 100), "model.json is cut short"),
        (lambda files, name: {**files, "model.json": b'{"format": 0}'}, "model.json is from another version"),
        (lambda files, name: {"model.json": files["model.json"]}, r"model-.*\.bin is missing here"),
        (lambda files, name: _cut(files, name, len(files[name]) - 1), "did not arrive whole"),
        (lambda files, name: {**files, name: files[name] + b"."}, "did not arrive whole"),
        (lambda files, name: {**files, name: bytes(len(files[name]))}, "its file is damaged"),
    ],
    ids=["no description", "cut description", "old description", "no weights", "cut weights", "longer", "zeros"],
)
def test_a_missing_or_damaged_file_is_one_sentence(
    native_folder: Path, tmp_path: Path, damage: Callable[..., dict[str, bytes]], what: str
) -> None:
    files = browser_files(native_folder)
    name = next(name for name in files if name != "model.json")
    base = write(tmp_path / "site", damage(files, name)).as_uri() + "/"
    error = in_node(base, TEXTS)["error"]
    assert re.search(what, error), error
    assert "\n" not in error


# ---------------------------------------------------------------- in Chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@contextmanager
def page_of(browser: Browser, site: Path, *, isolated: bool) -> Iterator[Page]:
    """An empty page beside the page's code and a model, isolated as threads need it or not."""
    headers = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
    with served_folder(site, headers if isolated else None) as address:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{address}/empty.html")
        yield page
        context.close()


@pytest.fixture
def site(native_folder: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(WEB, tmp_path / "site"))
    write(folder / "model", browser_files(native_folder))
    (folder / "empty.html").write_text("<!doctype html><link rel=icon href='data:,'>")
    return folder


OPEN = """async ([options, texts]) => {
    const { openModel } = await import("./local_model.js");
    const loads = [];
    const model = globalThis.model = await openModel("model", { ...options, onProgress: (p) => loads.push(p) });
    return { info: model.info, loads, answers: texts.length ? await model.classify(texts) : [] };
}"""


@pytest.mark.parametrize("isolated", [False, True], ids=["alone", "with threads"])
def test_chromium_answers_as_the_native_engine(
    browser: Browser, site: Path, native_folder: Path, isolated: bool
) -> None:
    expected = SINGLE_LABEL.answers(expected_logits(native_folder, browser_files(native_folder), TEXTS))
    with page_of(browser, site, isolated=isolated) as page:
        threads = 2 if isolated else 1
        for instructions in ("auto", "relaxed-simd", "simd"):
            found = page.evaluate(OPEN, [{"threads": 2, "instructions": instructions}, TEXTS * 10])
            assert found["info"]["threads"] == threads
            assert found["info"]["instructionSet"] == ("simd" if instructions == "simd" else "relaxed-simd")
            assert found["loads"][-1]["loaded"] == found["loads"][-1]["total"] == found["info"]["bytes"]
            probabilities = np.array([one["values"] for one in found["answers"]]).reshape(10, *expected.shape)
            tolerance = 0.02 if instructions == "simd" else 1e-6
            assert np.abs(probabilities - expected).max() < tolerance


# The names of the files that the browser keeps.
KEPT = "(async () => (await (await caches.open('local-model')).keys()).map(({ url }) => url.split('/').pop()).sort())()"


def test_the_weights_are_loaded_once_and_an_older_model_is_forgotten(browser: Browser, site: Path) -> None:
    (weights,) = (site / "model").glob("*.bin")
    with page_of(browser, site, isolated=False) as page:
        asked: list[str] = []
        page.context.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
        page.evaluate(OPEN, [{}, TEXTS])
        until(page, f"{KEPT}.then((names) => names.length === 3)")
        page.reload()
        page.evaluate(OPEN, [{}, TEXTS])
        assert asked.count(weights.name) == 1
        new = weights.rename(weights.with_name("model-0123456789abcdef.bin"))
        description = site / "model" / "model.json"
        description.write_text(description.read_text().replace(weights.name, new.name))
        os.utime(description, (1, 2e9))  # the server compares whole seconds
        page.evaluate(OPEN, [{}, TEXTS])
        until(page, f"{KEPT}.then((names) => String(names) === 'kernels-relaxed.wasm,{new.name},model.json')")


def test_without_a_connection_the_stored_model_answers(browser: Browser, site: Path) -> None:
    with page_of(browser, site, isolated=False) as page:
        page.evaluate(OPEN, [{}, TEXTS])
        until(page, f"{KEPT}.then((names) => names.length === 3)")
        shutil.rmtree(site / "model")
        for kernels in site.rglob("*.wasm"):
            kernels.unlink()
        assert len(page.evaluate(OPEN, [{}, TEXTS])["answers"]) == len(TEXTS)


def test_a_list_stops_when_it_is_aborted_and_a_blank_text_is_named(browser: Browser, site: Path) -> None:
    with page_of(browser, site, isolated=False) as page:
        page.evaluate(OPEN, [{}, []])
        failed = """async ([texts, aborted]) => {
            try { return await model.classify(texts, { signal: aborted ? AbortSignal.abort() : undefined }); }
            catch ({ name, message, code, index }) { return { name, message, code, index }; }
        }"""
        assert page.evaluate(failed, [TEXTS, True])["name"] == "AbortError"
        blank = page.evaluate(failed, [[*TEXTS * 10, " "], False])
        assert blank == {
            "name": "Error",
            "message": "The text is blank: there is nothing to classify.",
            "code": "blank_text",
            "index": 40,
        }
        assert len(page.evaluate(failed, [TEXTS, False])) == len(TEXTS)
        page.evaluate("model.close()")
        assert page.evaluate(failed, [TEXTS, False])["message"] == "The model was closed."


@pytest.mark.parametrize(
    ("lacking", "what"),
    [
        ("WebAssembly.validate = () => false;", "has no WebAssembly SIMD"),
        (
            "WebAssembly.Memory = function () { throw new RangeError('out of memory'); };",
            "gave no memory for the model",
        ),
        ("throw new Error('a broken file');", "did not load or has stopped"),
    ],
    ids=["no SIMD", "no memory", "a broken program"],
)
def test_what_a_browser_lacks_is_one_sentence(browser: Browser, site: Path, lacking: str, what: str) -> None:
    worker = site / "local_worker.js"
    worker.write_text(f"{lacking}\n{worker.read_text()}")
    with page_of(browser, site, isolated=False) as page:
        error = page.evaluate(f"(given) => ({OPEN})(given).catch(({{ message }}) => message)", [{}, TEXTS])
    assert what in error
    assert "\n" not in error
