"""What one should know of a data set before training on it: python -m training.data_report DATA
[flags as in training].

Finds texts that occur more than once, equal or nearly so; test and validation rows whose text is a
training row's too (leakage); texts under two labels (conflicts); rare labels, lengths in tokens and
scripts; and predicts with a linear model of words what twice the rows would bring.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.errors import ForeseenError, OneLineParser, UserError, run_command
from common.files import write_json
from training.config import DATA_FLAGS, FAULTS, TrainConfig, add_flag, make_config
from training.facts import TASK_FACTS

CROPPED = 40  # characters before the first difference that are shown of near duplicates


def main() -> None:
    parser = OneLineParser(prog="python -m training.data_report", description=__doc__)
    parser.add_argument(
        "data", metavar="DATA", help="as --dataset in training: a file, a folder, or a name"
    )
    parser.add_argument(
        "--fail_on",
        type=_faults,
        default=(),
        metavar="FAULTS",
        help=(
            f"exit with code 1 if there are any of these: {', '.join(FAULTS)}, several separated "
            "by commas"
        ),
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything as JSON, with all rows found"
    )
    group = parser.add_argument_group("as in training")
    for name in DATA_FLAGS:
        add_flag(group, name)
    options = vars(parser.parse_args())
    fail_on, file = options.pop("fail_on"), options.pop("json")
    config = _config_of({name: value for name, value in options.items() if value is not None})
    check_faults(config, fail_on)
    # PyTorch takes seconds to import, so check the flags first.
    from training.data.report import fault_in_words, measure_files
    from training.quiet import quiet_libraries

    quiet_libraries()
    figures = measure_files(config, lambda line: print(line, file=sys.stderr, flush=True))
    # Everything is printed and written before a fault makes the command fail, because that is when
    # somebody wants to see the rows.
    show(figures)
    if file:
        try:
            write_json(file, figures)
        except OSError as error:
            raise UserError(
                f"--json {file}: cannot be written ({error.strerror})", code="not-writable"
            ) from error
    if found := [name for name in fail_on if figures[name]["count"]]:
        said = "; ".join(fault_in_words(name, figures) for name in found)
        raise ForeseenError(f"--fail_on {','.join(fail_on)}: {said}", code="data-faults")


def _faults(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names or (unknown := [name for name in names if name not in FAULTS]):
        raise argparse.ArgumentTypeError(
            f"{unknown[0] if names else text!r} is not one of {', '.join(FAULTS)}"
        )
    return names


def _config_of(options: dict[str, Any]) -> TrainConfig:
    values = {"dataset": options.pop("data"), **options}
    facts = TASK_FACTS.get(values.get("task") or "")
    # Whose vectors a text is to get does not matter here.
    teacher = {"distill": "none"} if facts and facts.needs_teacher else {}
    return make_config(values | teacher, dict.fromkeys(values, "flag"))


def check_faults(config: TrainConfig, fail_on: tuple[str, ...]) -> None:
    """Refuse to promise what cannot be looked for."""
    if "conflicts" in fail_on and not config.columns.label:
        raise UserError(
            f"--fail_on conflicts and --task {config.task}: these rows have no labels that could "
            "contradict each "
            "other; leave out conflicts",
            code="flags-conflict",
        )


def show(figures: Mapping[str, Any]) -> None:
    """Print the report."""
    from common.escaping import printable
    from training.data.report import EXAMPLES, in_words
    from training.monitoring.console import Console

    console = Console()
    console.facts(f"Data report on {printable(figures['data'])}", in_words(figures))
    for name in FAULTS:
        rows = figures.get(name, {}).get("rows", [])[:EXAMPLES]
        if not rows:
            continue
        console.examples(
            f"{name.capitalize()}: {len(rows)} of {figures[name]['count']:,}", map(_lines, rows)
        )
    repeating = [figures[name] for name in ("duplicates", "leakage") if figures[name]["count"]]
    if repeating and "labels" in figures:
        flag = "drop_near" if any(fault["near"] for fault in repeating) else "drop"
        console.say(f"A run with --duplicates {flag} leaves out training rows that repeat others")
    for note in figures["notes"]:
        console.say(note[0].upper() + note[1:])


def _lines(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Row, label and text of both rows. Of texts that begin alike, what is before their difference
    is left out.
    """
    texts = found["text"], found["other_text"]
    # Where the texts differ first, or the length of the shorter one if it begins the other.
    same = next(
        (i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts))
    )
    start = max(0, same - CROPPED) if found["near"] else 0
    return [
        (Path(found[row]).name, found.get(label, ""), "…" * bool(start) + found[text][start:])
        for row, label, text in (
            ("row", "label", "text"),
            ("other_row", "other_label", "other_text"),
        )
    ]


if __name__ == "__main__":
    run_command(main)
