"""What a command asks for in addition to the plain answers: its flags, and where one is not given,
what COVERAGE and MAX_ERROR say.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from common.errors import share_or_name
from inference.settings import Settings

NAMES = ("coverage", "max_error", "familiarity")


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--coverage",
        type=_coverage,
        metavar="SHARE",
        help="also the set of labels (or the interval) that holds the right one this often, such "
        "as 0.95; needs a calibrated model (default: COVERAGE, else none)",
    )
    parser.add_argument(
        "--max_error",
        type=_max_error,
        metavar="SHARE|NAME",
        help="answer only where at most this share of answers is wrong, such as 2%%, or as the "
        "model's operating point of this name says; needs a calibrated model (default: MAX_ERROR, "
        "else answer always)",
    )
    parser.add_argument(
        "--familiarity",
        action="store_true",
        help="also the share of held-out texts that are no more like the training texts; needs a "
        "calibrated model",
    )


def asked_by(options: Namespace, settings: Settings) -> dict[str, Any]:
    """What is asked for, by the names of `Answering.wanted`; what is not is left out."""
    asked = {
        "coverage": options.coverage or settings.coverage,
        "max_error": options.max_error
        or (settings.max_error and share_or_name(settings.max_error)),
        "familiarity": options.familiarity,
    }
    return {name: value for name, value in asked.items() if value}


def _coverage(text: str) -> float:
    share = _max_error(text)
    if isinstance(share, str) or share == 1:
        raise ArgumentTypeError(f"{text}: must be greater than 0 and less than 1, such as 0.95")
    return share


def _max_error(text: str) -> float | str:
    # argparse shows the message of an ArgumentTypeError only.
    try:
        return share_or_name(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
