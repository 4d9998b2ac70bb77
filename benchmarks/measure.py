"""Measure again what README and docs cite, one benchmark after the other at one commit, and list all figures.

The pages of `benchmarks/` are written by their own programs; this one starts those that need no
hours of training, in one night, and writes `benchmarks/README.md`: a line per page with its
figure, machine, commit and age.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

from benchmarks import harness
from common.errors import UserError

# What a page measures, and so what makes it old.
TRAINING, SERVING, LOOP = ("training", "common"), ("inference", "common"), ("loop", "inference")


class Figure(NamedTuple):
    """The figure by which a page is known: the row of a table and the number of its column, from 0.

    A page that has several such rows, one per machine, gives a range. ``sections``: the headings of
    those that count.
    """

    what: str
    row: str
    column: int
    code: tuple[str, ...]
    sections: str = ".*"


FIGURES = {
    "accuracy": Figure("accuracy of MiniLM on AG News", "minilm_plain.*", 0, TRAINING),
    "async_saving": Figure("blocked ÷ synchronous saving", "2 × 1", 3, TRAINING),
    "balance": Figure("× faster with one rank at half speed", "2 ×", 2, TRAINING),
    "browser": Figure("× onnxruntime-web, two threads", r"\*\*ours\*\*, 2 threads", 2, SERVING),
    "budget": Figure("accuracy in 10 minutes, %", "`minilm` . 10m", 3, TRAINING),
    "bulk_scoring": Figure("scoring ÷ engine alone", "minilm_widened, native int8", 3, SERVING),
    "by_hand": Figure("DDP ÷ by hand, small network", "DDP", 4, ("learn",)),
    "cascade": Figure("labels that differ from the big model's, %", "0.50", 2, SERVING),
    "compression": Figure("× fewer bytes with powersgd:4", "powersgd:4", 1, TRAINING),
    "data_report": Figure("precision in finding duplicates, %", "duplicates", 3, TRAINING),
    "distillation": Figure(
        "accuracy of the distilled starter, %", "starter, distilled, int8", 0, TRAINING
    ),
    "honest_answers": Figure(
        "right labels in the set, of 95 promised, %", "3,800 . 500 . 95", 0, SERVING
    ),
    "image": Figure("MB without base and model", "minilm_widened", 5, SERVING),
    "imbalance": Figure("macro-F1 with balanced sampling, %", "`--sampling balanced`", 1, TRAINING),
    "label_errors": Figure("precision at 80% recall, %", "5%", 1, TRAINING),
    "long_documents": Figure("accuracy with windows, %", "windows", 0, TRAINING),
    "lora": Figure("memory with `--lora 8`, MiB", "`--lora 8`", 6, TRAINING),
    "many_heads": Figure(
        "time per text of 50 models ÷ one", "ms/text, one text per pass, all ÷ one", 1, SERVING
    ),
    "observation_cost": Figure("cost of all monitoring", "DistilBERT-size . 2", 6, TRAINING),
    "observing": Figure(
        "error of the accuracy without labels, points",
        "mean error of the estimate, points",
        1,
        SERVING,
    ),
    "one_or_two_processes": Figure(
        "× one process, with two", "two processes, one core each", 3, TRAINING
    ),
    "planner_accuracy": Figure(
        "error of the predicted peak memory, zero2", "distilbert-base . 2: zero2.*", 6, TRAINING
    ),
    "recipe": Figure(
        "accuracy from 8 rows per label, %", "ag_news . 8 . `minilm` . 1", 0, TRAINING
    ),
    "request_cost": Figure("CPU ms per request", "CPU ms per request, 1 worker", 1, SERVING),
    "restart": Figure("seconds from a kill to the next step", r"\*\*from the kill.*", 0, TRAINING),
    "review": Figure(
        "random texts that 500 reviewed ones are worth", "random texts that.*", 1, LOOP
    ),
    "scaling": Figure("efficiency of DDP with 2 processes", "ddp . 2", 3, TRAINING),
    "sequence_parallel": Figure("MiB kept for the backward pass, `--tp 4`", "4", 1, TRAINING),
    "serving": Figure("× plain FastAPI + PyTorch", "64 clients, × plain FastAPI.*", 1, SERVING),
    "sizing": Figure("texts/s on 2 cores", "minilm_widened, native . 2", 0, SERVING),
    "starter": Figure("accuracy after 1,000 rows, %", "`starter` . 1,000 rows", 0, TRAINING),
    "time_to_accuracy": Figure(
        "accuracy after a minute, %", "ours, starter, --budget 1m", 1, TRAINING
    ),
    "training_throughput": Figure(
        "× `transformers.Trainer`",
        r"\*\*ours\*\* . 2 × 1",
        3,
        TRAINING,
        sections="MiniLM size, ag_news(, [A-Z].*)?",  # of other tasks and sizes are sections too
    ),
    "verdict": Figure("models 1 point worse that were promoted", "1 point worse . 3,100", 0, LOOP),
}

# In the order of a night: what the README cites first. {name} is a flag of this program. A program
# with --output gets the page's own.
COMMANDS = {
    "serving": "serving_load --model {wide} --accuracy_model {model} --texts {data} --seconds 4 "
    "--servers ours,mosec_tuned,mosec_tuned_onnx,litserve,naive --peer_python {peer_python}",
    "training_throughput": "training_throughput --dataset {data} --tokenizer {model} --layouts 2x1 "
    "--variants trainer trainer-grouped ours",
    "image": "image --models {model} {wide}",
    "request_cost": "request_cost --model {model} --texts {data}",
    "restart": "training_features restart",
    "async_saving": "training_features async_saving",
    "observation_cost": "training_features observation_cost",
    "balance": "training_features balance",
    "compression": "training_features compression",
    "sequence_parallel": "training_features sequence_parallel",
    "by_hand": "by_hand --cifar10 {cifar10}",
    "scaling": "scaling --dataset {data} --tokenizer {model}",
    "planner_accuracy": "planner_accuracy --real",
    "one_or_two_processes": "one_or_two_processes --data {data} --rows 3000 --epochs 2 --rounds 5",
    "bulk_scoring": "bulk_scoring --models {model} {wide} --data {data}/test.csv",
    "sizing": "sizing {model} {wide}",
}


def make_parser() -> harness.Parser:
    parser = harness.Parser("benchmarks.measure", __doc__ or "")
    folder = Path("checkpoints")
    for name, default, what in (
        ("data", Path("data/ag_news"), "a folder in AG News' layout"),
        ("model", folder / "minilm_agnews", "an exported model of MiniLM's size"),
        ("wide", folder / "minilm_widened", "the same, widened (benchmarks/serving/widen.py)"),
        ("cifar10", Path("data/cifar10"), "CIFAR-10's images, train/CLASS/*.png, or their .tar.gz"),
        ("peer_python", Path("peers/bin/python"), "the Python that has the other servers"),
    ):
        parser.add_argument(
            f"--{name}", type=Path, default=default, help=f"{what} (default: {default})"
        )
    parser.add_argument(
        "--only", nargs="+", choices=list(COMMANDS), default=list(COMMANDS), help="default: all"
    )
    parser.add_argument("--table", action="store_true", help="only write benchmarks/README.md")
    return parser


def measure(options: Namespace) -> None:
    """Run the benchmarks in turn. One that fails or lacks its inputs does not keep the others out."""
    left_out = {}
    for number, name in enumerate(options.only, 1):
        missing = [
            part
            for part in re.findall(r"{(\w+)}", COMMANDS[name])
            if not (harness.ROOT / getattr(options, part)).exists()
        ]
        if missing:
            left_out[name] = " ".join(
                f"--{part} {getattr(options, part)}: not found." for part in missing
            )
            continue
        words = [word.format(**vars(options)) for word in shlex.split(COMMANDS[name])]
        harness.report(
            f"{number}/{len(options.only)}, {name}: python -m benchmarks.{shlex.join(words)}"
        )
        started = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:]], cwd=harness.ROOT
        )
        if ended.returncode:
            left_out[name] = f"ended with code {ended.returncode}."
        harness.report(f"{name}: {(time.monotonic() - started) / 60:.0f} min")
    for name, reason in left_out.items():
        harness.report(f"{name} was not measured: {reason}")
    if len(left_out) < len(options.only):
        write_table()
    if left_out:
        raise UserError(
            f"{len(left_out)} of {len(options.only)} pages were not measured: "
            f"{', '.join(left_out)}; see above",
            code="benchmark-input",
        )


# The table.


def write_table() -> None:
    harness.write_page(harness.HERE / "README.md", render(harness.HERE))


def render(folder: Path) -> str:
    """`benchmarks/README.md` from the pages in `folder`."""
    text = """
Every page names its command, machine, commit and versions. A figure is a range if the page has it for several machines
or models. *Commits since*: how many commits had changed the measured code after it when this table was written.
`make measure` measures again whatever needs no hours of training."""
    rows = []
    for name, figure in FIGURES.items():
        page = (folder / f"{name}.md").read_text(encoding="utf-8")
        title = page.partition("\n")[0].removeprefix("# ")
        machines = dict.fromkeys(machine.partition(";")[0] for machine in facts_of(page, "Machine"))
        measured = dict.fromkeys(facts_of(page, "Measured"))
        ages = dict.fromkeys(commits_since(one, figure.code) for one in measured)
        rows.append(
            [
                f"[{title}]({name}.md)",
                f"{figure.what}: {figure_of(page, figure)}",
                "; ".join(machines),
                "; ".join(one.replace(", commit", "") for one in measured),
                ", ".join(harness.NONE if age is None else str(age) for age in ages),
            ]
        )
    table = harness.markdown_table(["page", "figure", "machine", "measured", "commits since"], rows)
    return harness.introduction(
        "benchmarks.measure --table", "What was measured", text
    ) + table.replace("---:", "---")


def facts_of(page: str, name: str) -> list[str]:
    """What the page says of each of its measurements under this name."""
    return re.findall(rf"^- {name}: (.*)$", page, re.MULTILINE)


def counting(page: str, figure: Figure) -> str:
    """The sections of a page that its figure is taken from."""
    sections = re.split(r"^## ", page, flags=re.MULTILINE)
    return "\n".join(
        one for one in sections if re.fullmatch(figure.sections, one.partition("\n")[0])
    )


def figure_of(page: str, figure: Figure) -> str:
    """The figure, or the smallest and the largest of several, without their spreads over rounds."""
    row = figure.row.replace(" . ", r" \| ").replace(".*", "[^|]*")
    found = re.findall(rf"^\| {row} \| (.*) \|$", counting(page, figure), re.MULTILINE)
    lines = [line.split(" | ") for line in found]
    cells = [
        re.sub(r" [(±].*", "", line[figure.column]) for line in lines if len(line) > figure.column
    ]
    if not cells:
        raise UserError(
            f"{page.partition(chr(10))[0]}: no table has the row {figure.row!r}; see FIGURES in "
            "benchmarks/measure.py",
            code="benchmark-input",
        )
    ordered = sorted(dict.fromkeys(cells), key=lambda cell: float(re.sub(r"[^\d.-]", "", cell)))
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def commits_since(measured: str, folders: tuple[str, ...]) -> int | None:
    """Commits that changed these folders after the measurement; None if git does not know."""
    commit = re.search(r"\b[0-9a-f]{7,}\b", measured)
    if commit is None:
        return None
    command = [
        "git",
        "-C",
        str(harness.ROOT),
        "rev-list",
        "--count",
        f"{commit[0]}..HEAD",
        "--",
        *folders,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # no git
        return None
    return int(done.stdout) if done.returncode == 0 else None


def main() -> None:
    options = make_parser().parse_args()
    write_table() if options.table else measure(options)


if __name__ == "__main__":
    harness.run_benchmark(main)
