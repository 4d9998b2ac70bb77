"""Evaluate a written model on test rows: python -m training.evaluate MODEL [--dataset DATA] (also under torchrun)."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.errors import OneLineParser, rank0_only_output, run_command
from common.escaping import printable
from common.model_folder import read_saved_model
from training.data.hub_access import refuse_missing
from training.fault_tolerance.interruption import run_rank

# A wider confusion matrix does not fit into a terminal; instead, this many of its cells are named.
MOST_COLUMNS, MOST_CONFUSIONS = 16, 10


def main() -> None:
    parser = OneLineParser(prog="python -m training.evaluate", description=__doc__)
    parser.add_argument(
        "model", metavar="MODEL", type=Path, help="a model folder, or the .pt beside it"
    )
    parser.add_argument(
        "--dataset",
        help="as in training, such as my_rows.csv (default: what the model was trained on)",
    )
    parser.add_argument("--text_column", help="column with the text (default: as in training)")
    parser.add_argument("--label_column", help="column with the label (default: as in training)")
    parser.add_argument(
        "--pair_column", help="column with the second text of a pair (default: as in training)"
    )
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: auto"
    )
    parser.add_argument(
        "--robustness",
        action="store_true",
        help=(
            "also measure titles, upper case, no punctuation, typing errors and the first ten "
            "words of the test rows"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")
    options = parser.parse_args()
    # PyTorch takes seconds to import, so check the paths first.
    with rank0_only_output():
        if not options.model.exists():
            read_saved_model(options.model)  # raises the error for it
        refuse_missing(options.dataset or "")
    from training.distributed.group import join_ranks
    from training.evaluation.evaluator import evaluate_saved

    # Under torchrun each rank answers its share of the rows. All of them have the figures then, and
    # the first one prints.
    with join_ranks(options.device) as ranks:
        columns = (options.text_column, options.label_column, options.pair_column)
        metrics = evaluate_saved(
            options.model,
            options.dataset,
            ranks,
            columns,
            quiet=options.json,
            robustness=options.robustness,
        )
        if ranks.is_first:
            print(json.dumps(metrics, indent=2) if options.json else _table(metrics))
            if not options.json:
                print(f"\nNext: python -m inference.export {shlex.quote(str(options.model))}")


def _table(metrics: dict[str, Any]) -> str:
    from training.evaluation.robustness import robustness_table
    from training.monitoring.records import calibration_in_words, metrics_of

    width = max(len("class"), *(len(printable(name)) for name in metrics["labels"]))
    figures = {"loss": metrics["loss"]} | {
        one.title: metrics[name] for name, one in metrics_of(metrics).items()
    }
    lines = [
        printable(f"{metrics['model']} on {metrics['dataset']}: {metrics['rows']:,} test rows"),
        "  ".join(f"{title} {value:.4f}" for title, value in figures.items()),
    ]
    if words := calibration_in_words(metrics):
        lines.append(f"it {words}")
    if "per_class" in metrics:
        lines += ["", f"{'class':{width}}  precision  recall      F1   rows"]
    for name, scores in metrics.get("per_class", {}).items():
        line = (
            f"{scores['precision']:9.4f}  {scores['recall']:6.4f}  {scores['f1']:6.4f}  "
            f"{scores['rows']:5}"
        )
        lines.append(f"{printable(name):{width}}  {line}")
    if "confusion_matrix" in metrics:
        lines += ["", *_confusion(metrics["labels"], metrics["confusion_matrix"], width)]
    if "robustness" in metrics:
        lines += ["", robustness_table(metrics["robustness"], metrics["rows"])]
    return "\n".join(lines)


def _confusion(names: list[str], matrix: list[list[int]], width: int) -> list[str]:
    """The matrix, or of a matrix that is too wide for a terminal what is confused most."""
    # Of many classes nearly all cells are 0 or small. What a person looks for is which classes are
    # taken for which others.
    if len(names) <= MOST_COLUMNS:
        lines = ["confusion (a row is a true class, a column a predicted one):"]
        for name, counts in zip(names, matrix, strict=True):
            lines.append(
                f"{printable(name):{width}}  {'  '.join(f'{count:5}' for count in counts)}"
            )
        return lines
    pairs = [
        (count, names[true], names[predicted])
        for true, counts in enumerate(matrix)
        for predicted, count in enumerate(counts)
        if count and true != predicted
    ]
    pairs.sort(key=lambda pair: -pair[0])
    width = max(width, len("true class"))
    lines = [f"{'true class':{width}}   rows  predicted instead (the most frequent confusions)"]
    for count, true, predicted in pairs[:MOST_CONFUSIONS]:
        lines.append(f"{printable(true):{width}}  {count:5,}  {printable(predicted)}")
    return lines if pairs else []


if __name__ == "__main__":
    run_rank(lambda: run_command(main))
