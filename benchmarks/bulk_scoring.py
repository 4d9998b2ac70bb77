"""How fast are files scored, compared with the engine alone, and in how much memory?

The engine alone runs the same rows in the same forward passes on the same threads, but from token
ids that are in memory already. What scoring adds is reading, cleaning, tokenizing and writing,
which share the cores with it.
"""

from __future__ import annotations

import resource
import tempfile
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from benchmarks import harness
from benchmarks.processes import Layout, run_ranks
from common.errors import UserError, positive
from common.hardware import usable_cpus
from common.row_parts import ROWS_PER_PART
from common.rows import read_labelled_rows
from inference.bulk.job import plan_job
from inference.bulk.scoring import Passes, Scoring, Tokenized, divide
from inference.engines.base import TokenBatch
from inference.engines.model_loader import ModelLoader
from inference.settings import keep_tokenizer_on_one_thread

MODULE = "benchmarks.bulk_scoring"
PACKAGES = ("tokenizers", "numpy", "pyarrow")
SETTINGS = {
    "text_column": "text", "bad_rows": "refuse", "probabilities": False, "prefix": "", "format": "",
    "part_rows": ROWS_PER_PART,
}  # fmt: skip
MB = 1e6
INTRODUCTION = """
The rounds are in the JSON file next to this page. *engine*: rows per second of only the forward passes, from token ids
in memory. *scoring*: the same rows from Parquet to Parquet, from planning the job to the finished output, with the
model already loaded. Both run the same passes on the same threads, one right after the other in each round. *ratio*:
scoring divided by engine, the median of {rounds} rounds and their range. *CPU ratio*: the same for rows per second of
processor time, which other work on the machine disturbs less.
"""


def main() -> None:
    options = _parse()
    keep_tokenizer_on_one_thread()
    run = harness.read_results(options.output.with_suffix(".json"))
    if options.memory_rows:
        run["memory"] = {
            "facts": harness.measurement_facts(MODULE, PACKAGES),
            "texts": options.data.parent.name,
            "cases": measure_memory(options),
        }
        harness.write_page(options.output, render(run), run)
        return
    run["speed"] = {
        "facts": harness.measurement_facts(MODULE, PACKAGES),
        "threads": usable_cpus(),
        "cases": [],
    }
    for path, rows in zip(options.models, options.rows, strict=True):
        measure_model(path, rows, options, run)


def measure_model(path: Path, num_rows: int, options: Namespace, run: dict[str, Any]) -> None:
    model = ModelLoader(path)
    found = read_labelled_rows(options.data, model.labels).texts
    # Texts repeat if there are too few. Nothing here remembers answers, so a repeated text costs as
    # much as a new one.
    texts = [found[i % len(found)] for i in range(num_rows)]
    case: dict[str, Any] = {
        "model": path.name,
        "engine": model.info["engine"],
        "rows": num_rows,
        "rounds": [],
    }
    run["speed"]["cases"].append(case)
    with tempfile.TemporaryDirectory(prefix="bulk-scoring-") as folder:
        source = Path(folder) / "in.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"id": range(num_rows), "text": texts}), source)
        token_ids = [encoded.ids for encoded in model.tokenizer.encode(texts)]

        def timed(run_all: Callable[[], None], number: int) -> dict[str, float]:
            wall, processor = time.perf_counter(), time.process_time()
            run_all()
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            return {"rows_per_second": num_rows / wall, "rows_per_cpu_second": num_rows / processor}

        cases = {
            "engine": lambda: run_engine(model, token_ids),
            "scoring": lambda: run_scoring(
                model, source, Path(folder) / f"{time.monotonic_ns()}.parquet"
            ),
        }
        for number, round_ in enumerate(
            harness.run_rounds(
                cases, options.rounds, timed, lambda one: f"{one['rows_per_second']:.1f} rows/s"
            )
        ):
            case["rounds"].append(round_)
            harness.report(
                f"{path.name}, round {number + 1}: ratio {_ratio(round_, 'rows_per_second'):.3f}"
            )
            harness.write_page(options.output, render(run), run)


def run_engine(model: ModelLoader, token_ids: list[list[int]]) -> None:
    """The forward passes of all rows, in the windows that scoring has."""
    passes = Passes([model.engine])
    futures = []
    for start in range(0, len(token_ids), ROWS_PER_PART):
        window = token_ids[start : start + ROWS_PER_PART]
        # Cut into the windows of scoring, so both sort by length within the same rows and have the
        # same passes: what differs is everything around these.
        divided = divide(window, model.engine)
        futures += passes.submit(Tokenized(token_ids=window, passes=divided))
    for future in futures:
        future.result()
    passes.close()


def run_scoring(model: ModelLoader, source: Path, out: Path) -> Scoring:
    job = plan_job(str(source), str(out), SETTINGS)
    scoring = Scoring(job, model, quiet=True)
    scoring.check_inputs()
    job.begin({"name": model.info["name"]})
    scoring.run()
    return scoring


class InstantEngine:
    """Answers at once, by the number of tokens: what is left is everything but the model."""

    name = "instant"
    batch_tokens = 512
    pads = False

    def __init__(self, num_labels: int) -> None:
        self.num_slots = usable_cpus()
        self._labels = np.arange(num_labels)

    def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        return ((batch.lengths[:, None] + self._labels) % 5).astype(np.float32)


def measure_memory(options: Namespace) -> list[dict[str, float]]:
    """The peak of a new process for a hundredth, a tenth and all of the rows."""
    cases = []
    with tempfile.TemporaryDirectory(prefix="bulk-scoring-", dir=options.folder) as folder:
        for num_rows in (
            options.memory_rows // 100,
            options.memory_rows // 10,
            options.memory_rows,
        ):
            arguments = {
                "model": str(options.models[0]),
                "data": str(options.data),
                "folder": folder,
                "rows": num_rows,
            }
            # A process of its own for each size: the peak of a process never falls again.
            [figures] = run_ranks(
                score_in_this_process, Layout(1, usable_cpus()), pin=False, **arguments
            )
            cases.append({"rows": num_rows, **figures})
            harness.report(f"{num_rows:,} rows: {figures}")
    return cases


def score_in_this_process(model: str, data: str, folder: str, rows: int) -> dict[str, float]:
    """Score so many rows with a model that answers at once; runs in a process of its own."""
    keep_tokenizer_on_one_thread()
    loaded = ModelLoader(Path(model))
    # The first line of each text, about a headline, so that the measurement takes minutes and not
    # hours.
    texts = [text[:60] for text in read_labelled_rows(Path(data), loaded.labels).texts]
    source, group = Path(folder) / f"{rows}.parquet", 65_536
    schema = pyarrow.schema([("id", pyarrow.int64()), ("text", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(source, schema) as writer:
        for start in range(0, rows, group):
            ids = range(start, min(rows, start + group))
            writer.write_table(
                pyarrow.table(
                    {"id": ids, "text": [texts[i % len(texts)] for i in ids]}, schema=schema
                )
            )
    # ru_maxrss is the peak since the process began, so what is read before the job is the peak of
    # loading the model and of writing the input: the job's own shows only if it is higher.
    loaded.engine = InstantEngine(len(loaded.labels))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    run_scoring(loaded, source, Path(folder) / f"{rows}.out.parquet")
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = pyarrow.parquet.ParquetFile(Path(folder) / f"{rows}.out.parquet").metadata.num_rows
    if found != rows:
        raise UserError(f"{found:,} rows were written instead of {rows:,}", code="benchmark-failed")
    size = source.stat().st_size
    # The next size writes its own rows, and they need not be on the disk together.
    source.unlink()
    return {
        "before_mb": before * 1024 / MB,
        "peak_mb": peak * 1024 / MB,
        "seconds": seconds,
        "input_mb": size / MB,
    }


def _ratio(round_: dict[str, dict[str, float]], figure: str) -> float:
    return round_["scoring"][figure] / round_["engine"][figure]


def render(run: dict[str, Any]) -> str:
    """The page of a run."""
    speed, memory = run.get("speed"), run.get("memory")
    rounds = min((len(case["rounds"]) for case in speed["cases"]), default=0) if speed else 0
    page = harness.introduction(MODULE, "Scoring files", INTRODUCTION.format(rounds=rounds))
    if speed:
        columns: dict[str, Callable[[dict[str, Any]], str]] = {
            "model": lambda case: f"{case['model']}, {case['engine']}",
            "rows": lambda case: f"{case['rows']:,}",
            **{
                name: lambda case, name=name: f"{_median(case, name):,.0f}"
                for name in ("engine", "scoring")
            },
            "ratio": lambda case: _ratios(case, "rows_per_second"),
            "CPU ratio": lambda case: _ratios(case, "rows_per_cpu_second"),
        }
        page += (
            "## "
            f"Speed\n\n{harness.table(columns, speed['cases'])}\n{harness.fact_list(speed['facts'])}\n"
        )
    if memory:
        columns = {
            "rows": lambda case: f"{case['rows']:,}",
            "input, MB": lambda case: f"{case['input_mb']:,.0f}",
            "with the model loaded, MB": lambda case: f"{case['before_mb']:,.0f}",
            "peak, MB": lambda case: f"{case['peak_mb']:,.0f}",
            "seconds": lambda case: f"{case['seconds']:,.0f}",
        }
        page += (
            "## Memory\n\nResident memory of a process that scores headlines (60 characters) from "
            "Parquet to Parquet. "
            "The model is loaded, but answers immediately instead of running its forward passes, "
            "so that this many "
            "rows take minutes; its buffers for forward passes are therefore not in these "
            "figures.\n\n"
        )
        page += f"{harness.table(columns, memory['cases'])}\n{harness.fact_list(memory['facts'])}"
    return page.rstrip() + "\n"


def _median(case: dict[str, Any], name: str) -> float:
    return median(round_[name]["rows_per_second"] for round_ in case["rounds"])


def _ratios(case: dict[str, Any], figure: str) -> str:
    return harness.median_and_spread([_ratio(round_, figure) for round_ in case["rounds"]], 3)


def _folder(text: str) -> Path:
    path = Path(text)
    if not path.exists():
        raise ArgumentTypeError(f"{text}: no such file or folder")
    return path


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__ or "", page="bulk_scoring.md", rounds=5)
    models = [harness.ROOT / "checkpoints" / name for name in ("minilm_agnews", "minilm_widened")]
    add = parser.add_argument
    add("--models", type=_folder, nargs="+", default=models, help="model folders")
    add("--rows", type=positive, nargs="+", default=[8_192, 3_072], help="rows for each model")
    add(
        "--data",
        type=_folder,
        default=harness.ROOT / "data" / "ag_news" / "test.csv",
        help="the texts",
    )
    add("--memory_rows", type=positive, default=0, help="measure memory with so many rows instead")
    add("--folder", type=_folder, default=None, help="where rows of the memory are written")
    options = parser.parse_args()
    if len(options.rows) != len(options.models):
        raise UserError("--rows: give one number for each of --models", code="benchmark-input")
    return options


if __name__ == "__main__":
    harness.run_benchmark(main)
