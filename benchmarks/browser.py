"""How fast does a browser run a model with our kernels, and how fast with onnxruntime-web, on one
page?

Needs a model with both artefacts, Chromium, the package playwright, and onnxruntime-web from npm:
npm install onnxruntime-web@1.30, then give its node_modules as --node_modules.
"""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import harness
from common.errors import TrainingFailure, UserError, positive
from common.model_folder import read_saved_model
from inference.exporting.browser import browser_files

MODULE = "benchmarks.browser"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OURS, TWO = "**ours**", "**ours**, 2 threads"
RELAXED, PLAIN = "**ours**, relaxed SIMD, two bytes", "**ours**, plain SIMD"
ORT, ORT_TWO = "onnxruntime-web", "onnxruntime-web, 2 threads"
TOKENS = 50
TEXT = (
    "Ministers meet in Geneva for talks on a cease-fire; observers expect an answer from both "
    "sides within the week. "
    "Oil prices fell after the news, and shares of airlines rose on hopes of cheaper fuel. "
) * 3
INTRODUCTION = f"""
One page in a headless Chromium runs the same int8 model with every engine, each in its own worker, and alternates
between their passes. A pass takes one text of {TOKENS} token ids to its logits, without the tokenizer, which
onnxruntime-web does not have. *ms* is the median over rounds of each round's fastest pass, with the smallest and the
largest. The fastest one counts because other programs and the browser's own compiler can only make a pass slower. *×*
is the median of the ratios within a round. *ours* uses the fastest kernels that this browser supports, which are named
under *Chosen*: `wasm_dot` is the relaxed dot product of four bytes, one instruction with AVX-VNNI; *two bytes* is what
a processor without it uses. onnxruntime-web runs the `onnx/` artefact with all optimisations.

The first answer is measured on a page without any cache, loaded from a server on this machine. Its time runs from the
page's first line of code to the answer and includes everything that is loaded in between.
"""


@dataclass(frozen=True)
class Case:
    """An engine with its settings."""

    engine: str
    threads: int
    instructions: str = "auto"


CASES = {
    OURS: Case("ours", 1),
    RELAXED: Case("ours", 1, "relaxed-simd"),
    PLAIN: Case("ours", 1, "simd"),
    ORT: Case("onnxruntime-web", 1),
    TWO: Case("ours", 2),
    ORT_TWO: Case("onnxruntime-web", 2),
}


def main() -> None:
    parser = harness.Parser(MODULE, __doc__, page="browser.md", rounds=15)
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        default=Path("checkpoints/minilm_agnews"),
        help="with native/ and onnx/",
    )
    add("--node_modules", type=Path, default=Path("node_modules"), help="where onnxruntime-web is")
    add("--passes", type=positive, default=20, help="of a case per round (default: 20)")
    add("--starts", type=positive, default=7, help="first answers of an engine (default: 7)")
    options = parser.parse_args()
    ids = token_ids(options.model)
    with tempfile.TemporaryDirectory() as temporary:
        site = Path(temporary)
        ort_version = write_site(site, options.model, options.node_modules)
        with served(site) as (address, sent), chromium() as browser:
            facts = harness.measurement_facts(MODULE, ["playwright"]) | {
                "Browser": f"Chromium {browser.version}, onnxruntime-web {ort_version}",
                "Runs": f"{options.rounds} rounds of {options.passes} passes; {options.starts} first answers",
            }
            passes, chosen = measure_passes(browser, address, ids, options.rounds, options.passes)
            facts["Chosen"] = f"`{chosen}`"
            starts = measure_starts(browser, address, sent, ids, options.starts)
    text = harness.introduction(MODULE, "A model in the browser", INTRODUCTION) + harness.fact_list(
        facts
    )
    text += f"\n## One pass\n\n{pass_table(passes)}\n## The first answer\n\n{start_table(starts)}"
    harness.write_page(
        options.output,
        text,
        {"passes": {name: {"rounds": found} for name, found in passes.items()}},
    )


def token_ids(model: Path) -> list[int]:
    ids = read_saved_model(model).tokenizer().encode([TEXT])[0].ids
    # Cut to exactly so many tokens, but with the end token at the end, as the tokenizer cuts.
    return [*ids[: TOKENS - 1], ids[-1]]


# The site and the browser.


def write_site(site: Path, model: Path, node_modules: Path) -> str:
    """Put the page, the model for both engines and onnxruntime-web into a folder; returns the latter's version."""
    package = node_modules / "onnxruntime-web"
    if not (package / "dist" / "ort.wasm.min.mjs").is_file():
        what = (
            f"--node_modules {node_modules}: has no onnxruntime-web; npm install "
            "onnxruntime-web@1.30"
        )
        raise UserError(what, code="benchmark-input")
    onnx = model / "onnx" / "model.onnx"
    if not onnx.is_file():
        what = f"{onnx}: no such file; python -m inference.export {model} --engine onnx"
        raise UserError(what, code="benchmark-input")
    shutil.copytree(harness.ROOT / "inference" / "web", site, dirs_exist_ok=True)
    shutil.copy(harness.HERE / "browser_worker.js", site)
    # The empty icon keeps the browser from asking for one, which would be a request of its own.
    (site / "bench.html").write_text(
        "<!doctype html><link rel=icon href='data:,'><title>Benchmark</title>"
    )
    (site / "ort").mkdir()
    for name in ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"):
        shutil.copy(package / "dist" / name, site / "ort")
    (site / "model").mkdir()
    for name, content in browser_files(model).items():
        (site / "model" / name).write_bytes(content)
    shutil.copy(onnx, site / "model")
    return json.loads((package / "package.json").read_text())["version"]


@contextmanager
def served(site: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Serve the folder as a page with threads; yields its address and the bytes sent since the dict was cleared."""
    sent: dict[str, int] = defaultdict(int)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            # Browsers give shared memory, and with it threads, only to isolated pages.
            self.send_header("Cross-Origin-Opener-Policy", "same-origin")
            self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
            # Nothing is cached: every first answer has to fetch all that it needs, and its bytes
            # are counted.
            self.send_header("Cache-Control", "no-store")
            super().end_headers()

        def copyfile(self, source: Any, outputfile: Any) -> None:
            content = source.read()
            sent[self.path] += len(content)
            outputfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", sent
        server.shutdown()


@contextmanager
def chromium() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        what = "this benchmark needs the package playwright: pip install playwright"
        raise UserError(what, code="benchmark-input") from error
    if program is None:
        raise UserError(
            "this benchmark needs Chromium: apt-get install chromium", code="benchmark-input"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


# A worker answers each message with one: what it threw, or its result.
ASK = """([worker, message]) => new Promise((resolve, reject) => {
    const handle = (globalThis.workers ??= {})[worker] ??= new Worker("browser_worker.js", { type: "module" });
    handle.onmessage = ({ data }) => data.error ? reject(new Error(data.error)) : resolve(data);
    handle.onerror = (event) => reject(new Error(event.message ?? "the worker did not load"));
    handle.postMessage(message);
})"""


def ask(page: Any, worker: str, message: Mapping[str, Any]) -> dict[str, Any]:
    from playwright.sync_api import Error

    try:
        return page.evaluate(ASK, [worker, message])
    except Error as error:
        raise TrainingFailure(
            f"{worker}: {error.message.splitlines()[0]}", code="benchmark-failed"
        ) from error


def opening(case: Case, address: str, ids: Sequence[int]) -> dict[str, Any]:
    settings = {"engine": case.engine, "threads": case.threads, "instructions": case.instructions}
    return {"open": {**settings, "base": f"{address}/model/", "ids": list(ids)}}


# The measurements.


def measure_passes(
    browser: Any, address: str, ids: Sequence[int], rounds: int, passes: int
) -> tuple[dict[str, list[float]], str]:
    """The fastest pass of each round in milliseconds, by the case's name; and the kernels that were chosen."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(f"{address}/bench.html")
    chosen = open_all(page, address, ids, passes)

    def measure(name: str, number: int) -> float:
        return min(ask(page, name, {"passes": passes})["times"])

    found: dict[str, list[float]] = {name: [] for name in CASES}
    names = {name: name for name in CASES}
    for one in harness.run_rounds(
        names, rounds, measure, lambda milliseconds: f"{milliseconds:.1f} ms"
    ):
        for name, milliseconds in one.items():
            found[name].append(milliseconds)
    context.close()
    return found, chosen


def open_all(page: Any, address: str, ids: Sequence[int], passes: int) -> str:
    """Open and warm every case; returns the kernels that were chosen.

    Raises:
        TrainingFailure: a case has not what it is measured for, or the engines disagree.
    """
    logits, chosen = {}, ""
    for name, case in CASES.items():
        opened = ask(page, name, opening(case, address, ids))
        # Without isolation or a second core the engine falls back to one thread and says nothing:
        # the row for two threads would be that of one.
        if case.engine == "ours" and opened["facts"]["threads"] != case.threads:
            raise TrainingFailure(
                f"{name}: the browser started no threads", code="benchmark-failed"
            )
        logits[name] = opened["logits"]
        chosen = opened["facts"]["kernels"] if name == OURS else chosen
        ask(page, name, {"passes": 3 * passes})  # until the browser has optimised the code
    # A fast engine with another answer is no finding. Quantised kernels round differently, so the
    # label is compared and not the logits.
    if len({int(np.argmax(found)) for found in logits.values()}) > 1:
        raise TrainingFailure(
            f"the engines disagree on the text: {logits}", code="benchmark-failed"
        )
    return chosen


def measure_starts(
    browser: Any, address: str, sent: dict[str, int], ids: Sequence[int], starts: int
) -> dict[str, list[dict[str, float]]]:
    """Seconds to the first answer, and the bytes of code and model that it took."""

    def measure(case: Case, number: int) -> dict[str, float]:
        # A new context has an empty cache, as a first visitor's browser has.
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{address}/bench.html")
        # The page itself and the benchmark's own worker count for neither engine.
        sent.clear()
        began = page.evaluate("performance.now()")
        ask(page, "first", opening(case, address, ids))
        seconds = (page.evaluate("performance.now()") - began) / 1e3
        context.close()
        files = {
            path: size for path, size in sent.items() if not path.endswith("browser_worker.js")
        }
        model = sum(size for path, size in files.items() if path.startswith("/model/"))
        return {"seconds": seconds, "model": model, "code": sum(files.values()) - model}

    found: dict[str, list[dict[str, float]]] = {OURS: [], ORT: []}
    cases = {name: CASES[name] for name in found}
    for one in harness.run_rounds(
        cases, starts, measure, lambda start: f"{start['seconds']:.2f} s"
    ):
        for name, start in one.items():
            found[name].append(start)
    return found


# The page.


def pass_table(found: Mapping[str, list[float]]) -> str:
    def times(of: str) -> Callable[[str], str]:
        return lambda name: f"{harness.median_ratio(found[of], found[name]):.2f}"

    columns: dict[str, Callable[[str], str]] = {
        "engine": str,
        "ms": lambda name: harness.median_and_spread(found[name]),
        f"× {ORT}": times(ORT),
        f"× {ORT_TWO}": times(ORT_TWO),
        "× ours": times(OURS),
    }
    return harness.table(columns, found)


def start_table(found: Mapping[str, list[dict[str, float]]]) -> str:
    def middle(field: str, unit: float, digits: int) -> Callable[[str], str]:
        return lambda name: f"{median(start[field] for start in found[name]) / unit:,.{digits}f}"

    columns: dict[str, Callable[[str], str]] = {
        "engine": str,
        "seconds": lambda name: harness.median_and_spread(
            [start["seconds"] for start in found[name]], 2
        ),
        "code, kB": middle("code", 1e3, 0),
        "model, MB": middle("model", 1e6, 1),
    }
    return harness.table(columns, found)


if __name__ == "__main__":
    harness.run_benchmark(main)
