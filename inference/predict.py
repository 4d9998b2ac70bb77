"""Classify from the terminal: `python -m inference.predict "text"`, or `--file FILE` with one text
per line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from common.calibration import CalibrationError
from common.errors import OneLineParser, UserError, run_command
from common.escaping import printable
from common.text import Text, texts_in
from common.text_files import check_utf8, text_lines
from inference import asking
from inference.engines.answering import UNCERTAIN, UNFAMILIAR, Answering
from inference.engines.model_loader import ModelLoader
from inference.engines.selection import ENGINES
from inference.errors import ForwardError
from inference.settings import Settings

_BAR_WIDTH = 30
_MOST_BARS = 20
# Texts classified before their answers are printed: enough for batches of similar length.
_LINES_AT_ONCE = 256


def _parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m inference.predict", description="Classify texts.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("texts", nargs="*", default=[], metavar="TEXT", help="the texts to classify")
    what.add_argument(
        "--file",
        help="classify a file with one text per line, or, for a model that reads pairs, with two "
        "separated by a tab; - reads standard input",
    )
    parser.add_argument(
        "--pair", metavar="TEXT", help="the second text, for a model that reads pairs"
    )
    parser.add_argument(
        "--model", type=Path, help="model folder, .pt file or artefact (default: MODEL_CHECKPOINT)"
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        metavar="NAME",
        help=f"{', '.join(ENGINES)} (default: ENGINE, else the fastest that works here)",
    )
    asking.add_flags(parser)
    parser.add_argument(
        "--json", action="store_true", help="print JSON; for several texts, one object per line"
    )
    options = parser.parse_args(arguments)
    if options.file is not None and options.pair is not None:
        parser.error("--pair belongs to a single text; the lines of --file have both texts")
    if options.pair is not None and len(options.texts) > 1:
        parser.error(f"--pair belongs to a single text, and {len(options.texts)} are given")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = _parse_arguments(arguments)
    sys.stdout.reconfigure(errors="replace")  # for terminals without block characters
    try:
        if options.file is None:
            _predict_text(options)
        else:
            _predict_file(options)
    except BrokenPipeError:
        # The reader stopped early (`| head`). Without this, Python complains when it flushes stdout
        # at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise UserError(
            f"{error.filename or 'standard output'}: {error.strerror}", code="prediction-failed"
        ) from error
    except CalibrationError as error:
        raise UserError(str(error), code="no-guarantee") from error
    except (ForwardError, ValueError) as error:
        raise UserError(str(error), code="prediction-failed") from error


def _load_model(options: argparse.Namespace) -> tuple[ModelLoader, dict[str, Any]]:
    """The model, and what it is asked for in addition to the plain answers."""
    settings = Settings.from_environment()
    model = ModelLoader(
        options.model or settings.model_checkpoint,
        options.engine or settings.engine,
        settings.hardware,
    )
    return model, asking.asked_by(options, settings)


def _predict_text(options: argparse.Namespace) -> None:
    if not all(map(str.strip, options.texts)):  # before the model is loaded, which takes seconds
        raise UserError("the text is blank: there is nothing to classify", code="prediction-failed")
    model, asked = _load_model(options)
    if model.reads_pairs is (options.pair is None):
        what = "reads single texts; leave out --pair"
        if model.reads_pairs:
            what = "reads pairs of texts; give the second one with --pair"
        raise UserError(f"{model.info['path']}: {what}", code="prediction-failed")
    if len(options.texts) > 1:
        answers = cast("list[dict[str, Any]]", model.predict_batch(options.texts, **asked))
        _print_lines(
            zip(options.texts, answers, strict=True), model.answering, as_json=options.json
        )
        return
    (text,) = options.texts if options.pair is None else [(*options.texts, options.pair)]
    prediction = cast("dict[str, Any]", model.predict(text, **asked))
    if options.json:
        print(json.dumps(prediction))
        return
    lines = [_headline(prediction, model.answering, asked), *_more_lines(prediction)]
    if "probabilities" in prediction:
        lines += ["", *_chart(prediction, model.answering)]
    print("\n".join(lines))


def _headline(prediction: dict[str, Any], answering: Answering, asked: dict[str, Any]) -> str:
    if "value" in prediction:
        return f"{printable(answering.labels[0])}  {prediction['value']:.6g}"
    if prediction.get("abstained") == UNFAMILIAR:
        return "unfamiliar: this text is unlike the texts that the model was trained on"
    if prediction.get("abstained") == UNCERTAIN:
        bound = asked["max_error"]
        what = f"the operating point {printable(bound)}"
        if not isinstance(bound, str):
            what = f"at most {100 * bound:g}% wrong"
        return f"not sure: {_likeliest(prediction)} ({what} is asked for)"
    if "label" in prediction:
        return f"{printable(prediction['label'])}  {prediction['confidence']:.1%}"
    return ", ".join(map(printable, prediction["labels"])) or "no label reaches its threshold"


def _likeliest(prediction: dict[str, Any]) -> str:
    """The two most probable labels."""
    probabilities = prediction["probabilities"]
    return " or ".join(map(printable, sorted(probabilities, key=probabilities.get)[:-3:-1]))


def _more_lines(prediction: dict[str, Any]) -> Iterator[str]:
    """What was asked for in addition to the answer."""
    if "set" in prediction:
        labels = ", ".join(map(printable, prediction["set"])) or "no label"
        yield f"set with {100 * prediction['coverage']:g}% coverage: {labels}"
    if "interval" in prediction:
        low, high = prediction["interval"]
        coverage = f"{100 * prediction['coverage']:g}%"
        yield f"interval with {coverage} coverage: {low:.6g} to {high:.6g}"
    if "familiarity" in prediction:
        share = f"{prediction['familiarity']:.1%}"
        yield f"familiarity: {share} of held-out texts are no more familiar"


def _chart(prediction: dict[str, Any], answering: Answering) -> Iterator[str]:
    """A bar for each label."""
    thresholds = {}
    if "labels" in prediction:
        thresholds = dict(zip(answering.labels, answering.thresholds, strict=True))
    by_probability = sorted(prediction["probabilities"].items(), key=lambda item: -item[1])
    shown = {label: printable(label) for label, _ in by_probability[:_MOST_BARS]}
    width = max(map(len, shown.values()))
    for label, probability in by_probability[:_MOST_BARS]:
        bar = "█" * round(probability * _BAR_WIDTH)
        needed = f"  given if at least {thresholds[label]:.1%}" if thresholds else ""
        yield f"{shown[label]:{width}}  {bar:{_BAR_WIDTH}}  {probability:6.1%}{needed}"
    if len(by_probability) > _MOST_BARS:
        yield f"and {len(by_probability) - _MOST_BARS:,} labels less likely (--json prints all)"


def _predict_file(options: argparse.Namespace) -> None:
    data = sys.stdin.buffer.read() if options.file == "-" else Path(options.file).read_bytes()
    # All lines are checked before the model is loaded: a mistake in the last one is told at once,
    # and not after all others are answered.
    lines = _lines(f"--file {options.file}", data)
    if not lines:
        raise UserError(f"--file {options.file}: has no text to classify", code="prediction-failed")
    model, asked = _load_model(options)
    blank: list[int] = []
    for start in range(0, len(lines), _LINES_AT_ONCE):
        blank += _predict_lines(lines[start : start + _LINES_AT_ONCE], model, options, asked)
    # Lines of markup are not empty, and only cleaning shows that they hold no text.
    if len(blank) == len(lines):
        raise UserError(f"--file {options.file}: has no text to classify", code="prediction-failed")
    if blank:
        what = f"line {blank[0]}: is blank to the model and was left out"
        more = f", and {len(blank) - 1} more" if len(blank) > 1 else ""
        print(f"--file {options.file} {what}{more}", file=sys.stderr)


def _predict_lines(
    lines: Sequence[tuple[int, str]],
    model: ModelLoader,
    options: argparse.Namespace,
    asked: dict[str, Any],
) -> list[int]:
    """Print the answers to these lines; return the numbers of those that are blank to the model."""
    texts = [_pair(options.file, line) if model.reads_pairs else line for _, line in lines]
    # Cleaning may leave nothing of a line that is not empty, such as one of markup.
    is_blank = [one.blank for one in model.stages[0].tokenizer.encode(texts)]
    texts = [text for text, skip in zip(texts, is_blank, strict=True) if not skip]
    answers = cast("list[dict[str, Any]]", model.predict_batch(texts, **asked))
    _print_lines(zip(texts, answers, strict=True), model.answering, as_json=options.json)
    return [number for (number, _), skip in zip(lines, is_blank, strict=True) if skip]


def _pair(file: str, line: str) -> tuple[str, str]:
    first, _, second = line.partition("\t")
    if not second.strip() or "\t" in second:
        what = f"--file {file}: the model reads pairs of texts, so each line needs two, "
        what += f"separated by a tab; found {line.strip()[:60]!r}"
        raise UserError(what, code="prediction-failed")
    return first, second


def _lines(name: str, data: bytes) -> list[tuple[int, str]]:
    """The texts of a file with the numbers of their lines, without those that are empty."""
    lines = []
    for number, line in enumerate(text_lines(name, data), start=1):
        try:
            check_utf8(line)
        except ValueError as error:
            raise UserError(f"{name} line {number}: {error}", code="data-unreadable") from error
        if line.strip():
            lines.append((number, line.rstrip("\r\n")))
    return lines


def _print_lines(
    answers: Iterable[tuple[Text, dict[str, Any]]], answering: Answering, *, as_json: bool
) -> None:
    for text, prediction in answers:
        # Tabs and line breaks within a text would look like further columns and answers.
        parts = [" ".join(part.split()) for part in texts_in(text)]
        if as_json:
            named = dict(zip(("text", "text_pair"), parts, strict=False))
            print(json.dumps({**named, **prediction}, ensure_ascii=False))
        else:
            # A text from a file may hold control characters, which must not reach the terminal.
            print("\t".join([*_cells(prediction, answering), *map(printable, parts)]))
    # Whoever reads the pipe gets the answers of each group as soon as they are there.
    sys.stdout.flush()


def _cells(prediction: dict[str, Any], answering: Answering) -> Iterator[str]:
    """The answer, and what was asked for in addition to it."""
    if "value" in prediction:
        yield f"{prediction['value']:.6g}"
    elif reason := prediction.get("abstained"):
        yield f"not sure: {_likeliest(prediction)}" if reason == UNCERTAIN else reason
    elif "labels" in prediction:
        yield printable(answering.joined(prediction["labels"]))
    else:
        yield printable(prediction["label"])
    if "confidence" in prediction:
        yield f"{prediction['confidence']:.4f}"
    if "set" in prediction:
        yield printable(answering.joined(prediction["set"]))
    yield from (f"{bound:.6g}" for bound in prediction.get("interval", ()))
    if "familiarity" in prediction:
        yield f"{prediction['familiarity']:.4f}"


if __name__ == "__main__":
    run_command(main)
