"""The data report: what one should know of a data set before training on it.

Every run measures what costs little, for its first lines and its report.html. ``python -m
training.data_report`` also finds near duplicates, names the rows as they are in the files, and
predicts what twice the rows would bring.
"""

from __future__ import annotations

import shlex
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from common.rows import evenly_spread
from common.text import Text, TextTokenizer, in_one_line, texts_in
from training.config import DATA_FLAGS, FAULTS, STARTER, TrainConfig
from training.data.dataset import (
    TEST_SHARE,
    LoadOptions,
    TextData,
    cleaning_of_data,
    load_data,
    split_rows,
)
from training.data.duplicates import Repeats
from training.data.learning_curve import learning_curve
from training.data.stored_texts import JoinedTexts
from training.data.tokenized import TokenizedData, load_tokenizer
from training.tasks import TASKS, Task

# Rows; with fewer, a label is hardly learned, and its score on the few test rows is chance.
RARE = 10
DOMINANT = 0.9  # share of the largest label from which accuracy says little
MOST_NAMED = 5
EXAMPLES = 3
LONGEST_EXAMPLE = 1000  # characters
TEXTS_TRIED = 10_000  # whose tokens or letters are counted, evenly spread
UNCUT = 2**31 - 1  # tokens
SET_ASIDE = "set-aside test"
LANGUAGES = "languages that share a script are not told apart"

# Where a row is, for people, by its number through all splits.
PlaceOf = Callable[[int], str]


@dataclass(frozen=True)
class Fault:
    """Rows whose text an earlier row, or one of another split, has too.

    ``found`` and ``of``: how many rows it is, and how many were looked at, by split; ``rows`` and
    ``others``: numbers through all splits, (found,); ``equal``: whether the texts are equal and not
    only near, (found,).
    """

    found: dict[str, int]
    of: dict[str, int]
    rows: np.ndarray
    others: np.ndarray
    equal: np.ndarray

    @classmethod
    def among(
        cls,
        repeats: Repeats,
        rows: Mapping[str, np.ndarray],
        find: Callable[[np.ndarray], np.ndarray],
    ) -> Fault:
        """``find``: the partner of each row, or -1."""
        partners = {split: find(part) for split, part in rows.items()}
        is_found = {split: some >= 0 for split, some in partners.items()}
        numbers, others = (
            np.concatenate([some[split][is_found[split]] for split in rows])
            for some in (rows, partners)
        )
        equal = np.ones(len(numbers), dtype=bool)
        # Only near duplicates can differ; otherwise every partner has the same text.
        if repeats.near:
            equal[:] = [repeats.are_equal(*pair) for pair in zip(numbers, others, strict=True)]
        counts = {split: int(some.sum()) for split, some in is_found.items()}
        return cls(
            counts, {split: len(part) for split, part in rows.items()}, numbers, others, equal
        )

    def record(
        self, repeats: Repeats, place_of: PlaceOf, label_of: PlaceOf | None, most: int | None
    ) -> dict[str, Any]:
        """Plain values: the counts, and the first ``most`` of the rows."""
        listed = []
        columns = (one[:most].tolist() for one in (self.rows, self.others, self.equal))
        for row, other, equal in zip(*columns, strict=True):
            texts = [in_one_line(repeats.texts[one])[:LONGEST_EXAMPLE] for one in (row, other)]
            labels = {"label": label_of(row), "other_label": label_of(other)} if label_of else {}
            listed.append(
                {"row": place_of(row), "other_row": place_of(other), "near": not equal, **labels}
            )
            listed[-1] |= {"text": texts[0], "other_text": texts[1]}
        equal, count = int(self.equal.sum()), len(self.rows)
        splits = {split: {"count": self.found[split], "of": of} for split, of in self.of.items()}
        return {
            "count": count,
            "equal": equal,
            "near": count - equal,
            "splits": splits,
            "rows": listed,
        }


def find_faults(
    repeats: Repeats, train: np.ndarray, held_out: Mapping[str, np.ndarray], *, labelled: bool
) -> dict[str, Fault]:
    """What there is of each of :data:`FAULTS` that can be looked for in these rows.

    ``train`` and ``held_out``: the numbers of the rows that are trained, and validated or tested
    on, ascending.
    """
    faults = {"duplicates": Fault.among(repeats, {"training": train}, repeats.partners)}
    if held_out:
        faults["leakage"] = Fault.among(
            repeats, held_out, lambda rows: repeats.partners(rows, train)
        )
    if labelled:
        everyone = np.sort(np.concatenate([train, *held_out.values()]))
        faults["conflicts"] = Fault.among(repeats, {"labelled": everyone}, repeats.conflicts)
    return faults


def measure_files(config: TrainConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything about the data, with all rows that have a fault, as plain values for JSON.

    Raises:
        UserError: the data cannot be read, or the tokenizer of ``--model`` cannot be had.
    """
    task = TASKS[config.task]
    say(f"Reading {config.dataset} ...")
    options = replace(LoadOptions.of(config), texts_in=None, as_found=True)
    data = load_data(config.dataset, options, say)
    texts = JoinedTexts(*(rows.texts for rows in data.splits.values()))
    say(f"Comparing {len(texts):,} texts ...")
    repeats = Repeats(data, near=True)
    train, *others = repeats.rows
    held_out = {split: repeats.rows[split] for split in others if len(repeats.rows[split])}
    origins = list(chain.from_iterable(data.origins.get(split, ()) for split in data.splits))
    figures: dict[str, Any] = {
        "data": data.name,
        "task": config.task,
        "rows": {"training": len(data.train)}
        | {split: len(rows) for split, rows in held_out.items()},
        "near_duplicates": True,
    }
    faults = find_faults(repeats, repeats.rows[train], held_out, labelled=task.has_labels)
    if not data.has_test_rows:
        # A run sets test rows aside. What they have in common with the rest is leakage, wherever it
        # is in the file.
        kept, set_aside = split_rows(task.strata(data.train.labels), TEST_SHARE, config.seed)
        figures["rows"][SET_ASIDE] = len(set_aside)
        leaking = {SET_ASIDE: set_aside, **held_out}
        faults["leakage"] = Fault.among(repeats, leaking, lambda rows: repeats.partners(rows, kept))
    label_of = _label_of(repeats, task)
    figures |= {
        name: one.record(repeats, origins.__getitem__, label_of, None)
        for name, one in faults.items()
    }
    if task.has_labels:
        figures["labels"] = label_figures(data.train.labels, data.label_names)
    figures["scripts"] = script_figures(texts)
    figures["tokens"] = _measure_tokens(config, data, texts, say)
    if task.has_labels:
        say("Training a linear model on parts of the rows ...")
        # Training rows are the first of all, so their numbers are their indices too. Without
        # repeats, since a text that is on both sides of a fold makes the curve too good.
        figures["learning_curve"] = _predict(
            data, np.delete(repeats.rows[train], faults["duplicates"].rows), config
        )
    return figures | {"notes": data.notes}


def measure_run(
    repeats: Repeats | None,
    data: TextData,
    task: type[Task],
    train: np.ndarray,
    validation: np.ndarray,
) -> dict[str, Any]:
    """What costs little about the rows of a run, with :data:`EXAMPLES` of each fault.

    ``repeats``: None if the rows that repeat others are left out; ``train``: the numbers of the
    training rows that have a label; ``validation``: of rows of the validation split, or if there is
    none, of the training rows.
    """
    counts = {"training": len(train), "validation": len(validation), "test": len(data.test)}
    figures: dict[str, Any] = {"rows": {split: count for split, count in counts.items() if count}}
    figures["scripts"] = script_figures(JoinedTexts(*(rows.texts for rows in data.splits.values())))
    if task.has_labels:
        figures["labels"] = label_figures(data.train.labels[train], data.label_names)
    if repeats is None:
        return figures
    if "validation" in repeats.rows:
        validation = repeats.rows["validation"][validation]
    held_out = {"validation": validation, "test": repeats.rows["test"]}
    held_out = {split: rows for split, rows in held_out.items() if len(rows)}
    place_of, label_of = _place_of(repeats), _label_of(repeats, task)
    for name, fault in find_faults(repeats, train, held_out, labelled=task.has_labels).items():
        figures[name] = fault.record(repeats, place_of, label_of, EXAMPLES)
    return figures | {"near_duplicates": repeats.near}


def _place_of(repeats: Repeats) -> PlaceOf:
    """Where a row is in its split, such as "test row 3", by its number through all splits."""
    firsts = {split: int(rows[0]) for split, rows in repeats.rows.items() if len(rows)}

    def origin(row: int) -> str:
        split = max((split for split in firsts if firsts[split] <= row), key=firsts.__getitem__)
        return f"{split} row {row - firsts[split] + 1:,}"

    return origin


def _label_of(repeats: Repeats, task: type[Task]) -> PlaceOf | None:
    """What a row's label is called, by its number through all splits."""
    names = repeats.data.label_names

    def name(row: int) -> str:
        [label] = repeats.labels(np.array([row]))
        if np.ndim(label):
            return ", ".join(names[i] for i in np.flatnonzero(label)) or "none"
        return f"{label:g}" if isinstance(label, np.floating) else names[label]

    return name if task.has_labels else None


def _measure_tokens(
    config: TrainConfig, data: TextData, texts: Sequence[Text], say: Callable[[str], None]
) -> dict[str, Any]:
    model = config.model if "model" in config.model_fields_set else STARTER
    cleaning = cleaning_of_data(config, data)
    known = load_tokenizer(
        model, data.train.texts, config.max_length, say, cleaning, config.model_revision
    )
    # Without a limit: the question is how long texts are, and how many a limit would cut.
    tokenizer = TextTokenizer.from_json(known.backend_tokenizer.to_str(), UNCUT, cleaning)
    some = [texts[i] for i in evenly_spread(len(texts), TEXTS_TRIED)]
    ids = tokenizer.many().token_ids([tokenizer.clean_all(text) for text in some])
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return {"tokenizer": model, **length_figures([lengths], config.max_length)}


def _predict(data: TextData, rows: np.ndarray, config: TrainConfig) -> dict[str, Any]:
    """What twice the rows would bring; ``rows``: training rows with different texts."""
    if config.columns.pair:
        return {"skipped": "a linear model of words cannot compare two texts"}
    return learning_curve(
        [data.train.texts[row] for row in rows], data.train.labels[rows], config.seed
    )


def label_figures(targets: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """How many rows each label has, or how numbers are spread; see :meth:`Task.targets`."""
    if targets.dtype.kind == "f":
        low, middle, high = np.quantile(targets, (0, 0.5, 1)).tolist()
        return {
            "smallest": low,
            "median": middle,
            "largest": high,
            "deviation": float(targets.std()),
        }
    counts = targets.sum(axis=0) if targets.ndim > 1 else np.bincount(targets, minlength=len(names))
    counted = dict(zip(names, counts.tolist(), strict=True))
    none = {"without": int((targets.sum(axis=1) == 0).sum())} if targets.ndim > 1 else {}
    return {"rows": len(targets), "counts": counted, **none}


def script_figures(texts: Sequence[Text]) -> dict[str, int]:
    """How many texts have most letters of each script, the most frequent script first."""
    some = (texts[i] for i in evenly_spread(len(texts), TEXTS_TRIED))
    return dict(Counter(map(_script_of, some)).most_common())


def _script_of(text: Text) -> str:
    letters = "".join(texts_in(text))
    if letters.isascii():
        return "Latin" if any(map(str.isalpha, letters)) else "no letters"
    found = Counter(filter(None, map(_script, letters)))
    if not found:
        return "no letters"
    # Japanese is written in three scripts, one of which it shares with Chinese.
    return "Japanese" if found["Japanese"] else found.most_common(1)[0][0]


@cache
def _script(letter: str) -> str:
    """A letter's script: the first word of its name; empty for other characters."""
    if not letter.isalpha():
        return ""
    name = unicodedata.name(letter, "").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")
    first = name.split(" ")[0].split("-")[0]
    names = {"HIRAGANA": "Japanese", "KATAKANA": "Japanese", "CJK": "Chinese characters"}
    return names.get(first, first.capitalize())


def length_figures(lengths: Iterable[np.ndarray], max_length: int) -> dict[str, Any]:
    """How long texts are in tokens, and how many of them are too long."""
    counts = np.zeros(1, np.int64)
    for some in lengths:
        new = np.bincount(some, minlength=len(counts))
        # The counts of all lengths are kept and not the lengths, so any number of rows takes little
        # memory.
        new[: len(counts)] += counts
        counts = new
    total, upto = int(counts.sum()), np.cumsum(counts)
    # The smallest length up to which there are so many texts.
    median, p95 = (int(np.searchsorted(upto, share * total)) for share in (0.5, 0.95))
    cut = {"cut": int(counts[max_length + 1 :].sum()), "cut_at": f"{max_length:,} tokens"}
    return {"texts": total, "median": median, "p95": p95, "longest": len(counts) - 1, **cut}


def run_lengths(tokens: TokenizedData, config: TrainConfig) -> dict[str, Any]:
    """The same of a run, whose tokens are what is left of texts that were cut."""
    splits = [tokens.train, tokens.test, *([tokens.validation] if tokens.validation else [])]
    figures = length_figures((rows.lengths for rows in splits), config.max_length)
    longest = {"longest": None} if tokens.num_cut else {}
    return figures | longest | {"cut": tokens.num_cut, "cut_at": config.longest_text}


def in_words(figures: Mapping[str, Any]) -> dict[str, str]:
    """The figures of a report as sentences under their names."""
    rows = dict(figures["rows"])
    set_aside = rows.pop(SET_ASIDE, None)
    facts = {"Rows": ", ".join(f"{count:,} {split}" for split, count in rows.items())}
    if set_aside is not None:
        facts["Rows"] += f"; a run sets {set_aside:,} of them aside to test on"
    if "labels" in figures:
        facts["Labels"] = labels_in_words(figures["labels"])
    if "tokens" in figures:
        facts["Lengths"] = lengths_in_words(figures["tokens"])
    if "scripts" in figures:
        total = sum(figures["scripts"].values())
        shares = [f"{name} {_percent(count, total)}" for name, count in figures["scripts"].items()]
        facts["Scripts"] = f"{_some(shares)} of {total:,} texts; {LANGUAGES}"
    for name in FAULTS:
        if name in figures:
            facts[name.capitalize()] = fault_in_words(name, figures)
    if "learning_curve" in figures:
        facts["Twice the rows"] = _curve_in_words(figures["learning_curve"])
    return facts


def lines_of(figures: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """What is wrong with the rows of a run, said before its first step in five lines at most."""
    found = [name for name in FAULTS if figures.get(name, {}).get("count")]
    lines = [fault_in_words(name, figures) for name in found]
    if found:
        flags = [
            [f"--{name}", str(getattr(config, name))]
            for name in DATA_FLAGS
            if name in config.model_fields_set
        ]
        command = ["python", "-m", "training.data_report", config.dataset, *chain(*flags)]
        lines[-1] += f"; to see which: {shlex.join(command)}"
    return [*lines, *_lines_about_labels(figures.get("labels", {}))]


def _lines_about_labels(labels: Mapping[str, Any]) -> list[str]:
    lines = []
    if rare := _rare(labels):
        of = f"{len(rare):,} of {len(labels['counts']):,} labels"
        lines.append(f"Fewer than {RARE} training rows for {of}: {_some(rare)}")
    if "counts" in labels and "without" not in labels:
        name, count = max(labels["counts"].items(), key=lambda item: item[1])
        if count > DOMINANT * labels["rows"]:
            share = f"{_percent(count, labels['rows'])} of the training rows"
            lines.append(
                f"{share} have the label {name}, so a model that always answers it looks good "
                "already"
            )
    return lines


def fault_in_words(name: str, figures: Mapping[str, Any]) -> str:
    """How many rows have a fault, such as "5 of 40 test rows repeat the text of a training row"."""
    fault, near = figures[name], figures["near_duplicates"]
    counts = {split: one for split, one in fault["splits"].items() if one["count"]} or fault[
        "splits"
    ]
    rows = " and ".join(
        f"{one['count']:,} of {one['of']:,} {split} rows" for split, one in counts.items()
    )
    repeat = "repeat or nearly repeat" if near else "repeat"
    what = {
        "duplicates": "the text of an earlier one",
        "leakage": "the text of a training row"
        + ", so their scores are too good" * bool(fault["count"]),
        "conflicts": "an earlier text, but with another label",
    }[name]
    kinds = (
        f" ({fault['equal']:,} equal, {fault['near']:,} near)" if near and fault["count"] else ""
    )
    return f"{rows} {repeat} {what}{kinds}"


def labels_in_words(labels: Mapping[str, Any]) -> str:
    if "counts" not in labels:
        spread = "median {median:g}, standard deviation {deviation:.3g}".format(**labels)
        return "numbers from {smallest:g} to {largest:g}, ".format(**labels) + spread
    ordered = sorted(labels["counts"].items(), key=lambda item: -item[1])
    (most, most_rows), (fewest, fewest_rows) = ordered[0], ordered[-1]
    share = _percent(most_rows, labels["rows"])
    said = f"{len(ordered):,}; the largest is {most} with {most_rows:,} rows ({share}), "
    said += f"the smallest {fewest} with {fewest_rows:,}"
    if most_rows == fewest_rows:
        said = f"{len(ordered):,} with {most_rows:,} rows each"
    if labels.get("without"):
        said += f"; {labels['without']:,} rows have none"
    rare = _rare(labels)
    return f"{said}; fewer than {RARE} for {len(rare):,}: {_some(rare)}" if rare else said


def _rare(labels: Mapping[str, Any]) -> list[str]:
    rare = [(count, name) for name, count in labels.get("counts", {}).items() if count < RARE]
    return [f"{name} ({count})" for count, name in sorted(rare)]


def lengths_in_words(tokens: Mapping[str, Any]) -> str:
    longest = f", the longest {tokens['longest']:,}" if tokens["longest"] else ""
    percent = _percent(tokens["cut"], tokens["texts"])
    share = f"{tokens['cut']:,} of {tokens['texts']:,} texts ({percent}) are cut at"
    share = share if tokens["cut"] else "no text is longer than"
    by = f", by the tokenizer of {tokens['tokenizer']}" if "tokenizer" in tokens else ""
    said = f"{tokens['median']:,} tokens (median), 95% have at most {tokens['p95']:,}{longest}"
    return f"{said}; {share} {tokens['cut_at']}{by}"


def _curve_in_words(curve: Mapping[str, Any]) -> str:
    if "skipped" in curve:
        return f"not predicted: {curve['skipped']}"
    now, twice, metric = curve["now"], curve["twice"], curve["metric"]
    rows = f"{curve['rows']:,} different rows"
    if curve["rows_used"] < curve["rows"]:
        rows = f"{curve['rows_used']:,} of {rows}"
    points = f"{100 * (twice - now):+.1f} points of {metric}"
    what = f"would bring about {points} (from {now:.1%} to {twice:.1%})"
    if metric == "R²":
        what = f"would raise R² from about {now:.2f} to {twice:.2f}"
    return f"{what}: a prediction by a linear model of words, from its scores on {rows}"


def _percent(part: int, whole: int) -> str:
    """A share that is not rounded to none or to all."""
    share = 100 * part / max(1, whole)
    if 0 < share < 0.05 or 99.95 <= share < 100:
        return "under 0.1%" if share < 1 else "over 99.9%"
    return f"{share:.1f}%"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
