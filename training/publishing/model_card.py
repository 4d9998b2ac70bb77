"""The model card: the README of a model folder, with the front matter that the hub reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from common.escaping import code_span, in_markdown, printable, some_of
from common.model_folder import SMALL_FOLDER, read_manifest, read_saved_model
from common.rows import AG_NEWS_LABELS
from training.facts import DEFAULT_TASK, TASK_FACTS, TaskFacts
from training.monitoring.records import metrics_of

# By this tag a repository of the hub is known to come from here.
TAG = "distrinews"
_MADE_HERE = ("starter", "tiny", "sample")
# Of the bases whose licence is known here; what is trained from another gets its licence from a
# person.
_DISTILBERT = ("distilbert-base-uncased", "distilbert/distilbert-base-uncased")
_LICENSES = dict.fromkeys(("tiny", *_DISTILBERT), "apache-2.0")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# What the hub calls our metrics.
_HUB_METRICS = {
    "accuracy": "accuracy",
    "macro_f1": "f1",
    "micro_f1": "f1",
    "rmse": "rmse",
    "mae": "mae",
}
_HUB_METRICS |= {
    "perplexity": "perplexity",
    "token_accuracy": "accuracy",
    "cosine": "cosine_similarity",
    "spearman": "spearmanr",
}
_NAMES = {"macro_f1": "macro-F1", "micro_f1": "micro-F1"}
# A neutral text: a row of the data may be private.
_ANY_TEXT = "The text to classify"


def model_card(metrics: dict[str, Any], name: str, cleaning: str) -> str:
    """A model's card, from ``metrics.json``."""
    base, test = public_name(metrics["base_model"]), metrics["test"]
    learned = "with a head made from the names of its labels"
    if "dataset" in metrics:
        learned = f"fine-tuned on {code_span(public_name(metrics['dataset']))}"
    if metrics.get("validation", True):
        tested = f"after the best epoch ({metrics['best_epoch']}) was chosen on a validation split"
    else:
        tested = (
            f"after the last epoch ({metrics['best_epoch']}); no validation split chose between "
            "the epochs"
        )
    version = f"Version {in_markdown(metrics['version'])}. " if metrics.get("version") else ""
    figures = ", ".join(
        f"{_NAMES.get(key, one.title)} {test[key]:.4f}" for key, one in metrics_of(test).items()
    )
    kind = "A news classifier" if _is_news(metrics) else _facts(metrics).kind
    reads = (
        f"Labels: {some_of(test['labels'], in_markdown)}. Texts are cut at "
        f"{metrics['max_length']} tokens."
    )
    if not test["labels"]:
        reads = f"It was trained on blocks of {metrics['max_length']} tokens."
    results = f"""{test["rows"]:,} test {"rows" if test["labels"] else "blocks"}, read once, {tested}:
{figures}.
{_classes(test)}"""
    if not test["rows"]:
        results = "None: there was no row with a label to test it on.\n"
    return f"""---
{_front_matter(metrics, name).to_yaml()}
---

# {in_markdown(name)}

{kind}: {code_span(base)} {learned} with DistriNews{_teacher(metrics)}.

{version}{reads}

{_use(name, cleaning, metrics)}

## Test results

{results}
## Limits

{_limits(metrics)}
"""


def cascade_card(folder: Path) -> str:
    """A cascade's card, from its manifest and the metrics of both models."""
    models = [read_saved_model(one) for one in (folder, folder / SMALL_FOLDER)]
    record = read_manifest(folder).cascade
    big, small = (code_span(record[one]["name"]) for one in ("big", "small"))
    bases = {str(one.metadata.get("base_model", "")) for one in models}
    licenses = {_LICENSES.get(base) for base in bases}
    front_matter = ModelCardData(
        license=licenses.pop() if len(licenses) == 1 else None,
        pipeline_tag=TASK_FACTS[DEFAULT_TASK].pipeline,
        tags=[TASK_FACTS[DEFAULT_TASK].pipeline, "cascade", TAG],
        base_model=sorted(filter(is_on_the_hub, bases)) or None,
    )
    shares = [f"{one} {share:.2%}" for one, share in record.get("accuracy", {}).items()]
    accuracy = f"\nAccuracy: {', '.join(shares)}.\n" if shares else ""
    most, texts = f"{100 * record['max_disagreement']:g}%", f"{record['texts']:,}"
    return f"""---
{front_matter.to_yaml()}
---

# {small} in front of {big}

Two text classifiers that answer as one: {small} answers the texts that it is sure of, and {big} reads the others.
DistriNews wrote it.

Labels: {some_of(models[0].labels, in_markdown)}.

With {record["confidence"]:.0%} confidence, at most {most} of texts like those of
{code_span(record["dataset"])} get another label than from the big model alone.
Of the {texts} texts that certified it, {record["disagreed"]:,} got another label, and the small
model answered {1 - record["passed_on"]:.1%}.
{accuracy}
transformers cannot load two models as one. DistriNews can:

```bash
python -m inference.fetch hf://{printable(folder.name)} models/cascade
MODEL_CHECKPOINT=models/cascade python -m inference.serve
```
"""


def _teacher(metrics: dict[str, Any]) -> str:
    if "distilled_from" not in metrics:
        return ""
    more = (
        f", and to {count:,} texts without a label" if (count := metrics["unlabelled_rows"]) else ""
    )
    *others, last = (code_span(public_name(name)) for name in metrics["distilled_from"].split(","))
    names = f"{', '.join(others)} and {last}" if others else last
    return f", which learned from the answers of {names} to its rows{more}"


def _classes(test: dict[str, Any]) -> str:
    if "per_class" not in test:
        return ""
    lines = [
        f"| {in_markdown(label)} | {scores['precision']:.3f} | {scores['recall']:.3f} | "
        f"{scores['f1']:.3f} "
        f"| {scores['rows']} |"
        for label, scores in test["per_class"].items()
    ]
    return "\n".join(
        [
            "",
            "| class | precision | recall | F1 | rows |",
            "| --- | --- | --- | --- | --- |",
            *lines,
            "",
        ]
    )


def _facts(metrics: dict[str, Any]) -> TaskFacts:
    return TASK_FACTS[metrics.get("task", DEFAULT_TASK)]


def _is_news(metrics: dict[str, Any]) -> bool:
    """Whether the data are AG News or the sample: by their names, because a local folder may be called anything."""
    facts = _facts(metrics)
    return (
        facts.has_one_label
        and not facts.pair_column
        and set(metrics["test"]["labels"]) == set(AG_NEWS_LABELS)
    )


def _use(name: str, cleaning: str, metrics: dict[str, Any]) -> str:
    # The name becomes a Python string: quotes and escapes of JSON are the same there.
    quoted, facts = printable(json.dumps(name, ensure_ascii=False)), _facts(metrics)
    if not facts.has_labels:
        return f"""```python
from transformers import pipeline
pipeline("{facts.pipeline}", model={quoted})
```"""
    load = f'classify = pipeline("text-classification", model={quoted})'
    text = json.dumps(
        "Oil prices climb to a record as refineries close" if _is_news(metrics) else _ANY_TEXT
    )
    clean = f"clean_text({text})"
    if facts.pair_column:
        text, clean = (f'{{"text": {one}, "text_pair": {one}}}' for one in (text, clean))
    if cleaning == "none":
        return f"""Texts are read as they are (`--clean none`).

```python
from transformers import pipeline
{load}
classify({text})
```"""
    return f"""Texts are cleaned before they are read (`--clean news`): character references are decoded, HTML tags and
backslashes dropped, white space collapsed. DistriNews' server does so by itself; `transformers.pipeline` needs the
same, or it reads other tokens than the model was trained and tested on:

```python
from common.text import clean_text  # of DistriNews
from transformers import pipeline
{load}
classify({clean})
```"""


def _limits(metrics: dict[str, Any]) -> str:
    left_out = metrics.get("rows_left_out", 0)
    trained_on = (
        "English newswire headlines with a lead sentence"
        if _is_news(metrics)
        else "only the data above"
    )
    without = (
        f" Rows of the data that could not be used and were left out: {left_out:,}."
        if left_out
        else ""
    )
    return (
        f"Trained on {trained_on}; other styles, languages and subjects were not tested.{without}"
    )


def _front_matter(metrics: dict[str, Any], name: str) -> ModelCardData:
    base, dataset = metrics["base_model"], metrics.get("dataset", "")
    return ModelCardData(
        language="en" if _is_news(metrics) else None,
        license=_LICENSES.get(base),
        library_name="transformers",
        pipeline_tag=_facts(metrics).pipeline,
        tags=[*(["news"] if _is_news(metrics) else []), _facts(metrics).pipeline, TAG],
        base_model=base if is_on_the_hub(base) else None,
        datasets=[dataset] if is_on_the_hub(dataset) else None,
        metrics=[_HUB_METRICS[name] for name in list(metrics_of(metrics["test"]))[:2]],
        model_name=name,
        eval_results=[
            _result(
                metrics, _HUB_METRICS[name], _NAMES.get(name, metric.title), metrics["test"][name]
            )
            for name, metric in list(metrics_of(metrics["test"]).items())[:2]
        ],
    )


def _result(metrics: dict[str, Any], kind: str, name: str, value: float) -> EvalResult:
    dataset = metrics["dataset"]
    return EvalResult(
        task_type=_facts(metrics).pipeline,
        dataset_type=public_name(dataset),
        dataset_name=public_name(dataset),
        dataset_config=metrics.get("dataset_config") or None,
        dataset_split=metrics.get("test_split") or "test",
        metric_type=kind,
        metric_name=name,
        metric_value=round(value, 4),
    )


def is_on_the_hub(name: str) -> bool:
    """Whether a dataset's or a model's name is one of the hub's: not a path, nor one that is made here."""
    return name not in _MADE_HERE and bool(_HUB_NAME.fullmatch(name)) and not _is_path(name)


def public_name(name: str) -> str:
    """A dataset's or a model's name for publication: of a local path only the last part."""
    return Path(name).name if _is_path(name) else name


def recorded_name(name: str) -> str:
    """A dataset's or a model's name as ``metrics.json`` keeps it: a path can be told from a name on the hub."""
    is_bare_path = Path(name).exists() and not name.startswith(("/", ".", "~"))
    return f"./{name}" if is_bare_path and name not in _MADE_HERE else name


def _is_path(name: str) -> bool:
    return (
        name.startswith(("/", ".", "~"))
        or name.count("/") > 1
        or "\\" in name
        or Path(name).exists()
    )
