"""Evaluate a written model on test rows: python -m training.evaluate MODEL [--dataset DATA] (also under torchrun)."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch

from inference.delimited import Columns
from inference.errors import ModelLoadError
from inference.model_files import SavedModel, read_saved_model
from inference.tokenization import TextTokenizer
from training.batching import DataPlace
from training.dataset import NewsData, Rows, load_news
from training.distributed import Ranks, ranks
from training.errors import OneLineParser, UserError, run_command
from training.evaluation import evaluate
from training.model import NewsClassifier
from training.monitoring import Console
from training.quiet import quiet_libraries
from training.resilience.interruption import run_rank
from training.tokenized import encode_rows


def main() -> None:
    """Evaluate on as many ranks as were started; rank 0 prints."""
    parser = OneLineParser(prog="python -m training.evaluate", description=__doc__)
    parser.add_argument("model", metavar="MODEL", type=Path, help="a model folder, or the .pt beside it")
    parser.add_argument(
        "--dataset", help="as in training, such as my_rows.csv (default: what the model was trained on)"
    )
    parser.add_argument("--text_column", help="column of the text (default: as in training)")
    parser.add_argument("--label_column", help="column of the label (default: as in training)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: auto")
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")
    options = parser.parse_args()
    with ranks(options.device) as mine:
        columns = (options.text_column, options.label_column)
        metrics = evaluate_saved(options.model, options.dataset, mine, columns, quiet=options.json)
        if mine.is_first:
            print(json.dumps(metrics, indent=2) if options.json else _table(metrics))
            if not options.json:
                print(f"\nNext: python -m inference.export {shlex.quote(str(options.model))}")


def evaluate_saved(
    path: Path,
    dataset: str | None,
    mine: Ranks,
    columns: tuple[str | None, str | None] = (None, None),
    *,
    quiet: bool = False,
) -> dict[str, Any]:
    """Evaluate a model folder or ``.pt`` file on a dataset's test rows, in fp32.

    Args:
        path: of the model.
        dataset: None for the one that it was trained on.
        mine: this process's place.
        columns: of text and label; None for those that it was trained on.
        quiet: show no progress.

    Raises:
        UserError: the model or the data cannot be read, or their labels differ.
    """

    quiet_libraries()

    def read() -> tuple[SavedModel, NewsData]:
        try:
            saved = read_saved_model(path)
        except ModelLoadError as error:
            raise UserError(str(error)) from error
        name = dataset or saved.metadata.get("dataset")
        if name is None:
            raise UserError(f"{path}: does not say what it was trained on; name the data with --dataset")
        text, label = columns
        text = text or str(saved.metadata.get("text_column", "text"))
        label = label or str(saved.metadata.get("label_column", "label"))
        return saved, load_news(name, columns=Columns(text, label), say=partial(print, file=sys.stderr))

    saved, data = mine.together(read)
    rows = _relabelled(data, saved.labels)
    tokens = encode_rows(TextTokenizer.from_json(saved.tokenizer_json, saved.max_length, saved.cleaning), rows)
    model = NewsClassifier.from_saved(saved).to(mine.device).eval()
    show = mine.is_first and not quiet
    counting = Console().counting("evaluating", len(tokens)) if show else nullcontext(lambda rows: None)
    with counting as count, torch.inference_mode():
        place = DataPlace(mine.rank, mine.world_size)
        metrics, _ = evaluate(
            model, tokens, mine, saved.labels, place, on_batch=lambda rows: count(rows * mine.world_size)
        )
    return {"model": str(path), "dataset": data.name, **metrics}


def _relabelled(data: NewsData, labels: list[str]) -> Rows:
    unknown = [name for name in data.label_names if name not in labels]
    if unknown:
        raise UserError(
            f"--dataset {data.name}: label {unknown[0]!r} is none of the model's labels {', '.join(labels)}"
        )
    index = np.array([labels.index(name) for name in data.label_names])
    return Rows(data.test.texts, index[data.test.labels])


def _table(metrics: dict[str, Any]) -> str:
    width = max(len("class"), *map(len, metrics["labels"]))
    lines = [
        f"{metrics['model']} on {metrics['dataset']}: {metrics['rows']:,} test rows",
        f"accuracy {metrics['accuracy']:.4f}  macro-F1 {metrics['macro_f1']:.4f}  loss {metrics['loss']:.4f}  "
        f"calibration error {metrics['calibration_error']:.4f}",
        "",
        f"{'class':{width}}  precision  recall      F1   rows",
    ]
    for name, scores in metrics["per_class"].items():
        figures = f"{scores['precision']:9.4f}  {scores['recall']:6.4f}  {scores['f1']:6.4f}  {scores['rows']:5}"
        lines.append(f"{name:{width}}  {figures}")
    lines += ["", "confusion (a row is a true class, a column a predicted one):"]
    for name, counts in zip(metrics["labels"], metrics["confusion_matrix"], strict=True):
        lines.append(f"{name:{width}}  {'  '.join(f'{count:5}' for count in counts)}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_rank(lambda: run_command(main))
