"""User-facing errors, each one line that says what is wrong and what to do; the flag parser."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from common.escaping import printable, without_secrets

EXIT_USER_ERROR = 2
SECONDS_FOR_RANK_0 = 10.0


class ForeseenError(Exception):
    """An error that the user can understand: its message is printed in one line, without a
    traceback.

    Args:
        message: what is wrong, where, and what to do.
        code: a stable slug, such as ``checkpoint-damaged``, for which docs/TROUBLESHOOTING.md has
            an entry; by default that of the class.
        quiet: another rank prints it.
    """

    exit_code = 1
    code = ""

    def __init__(self, message: str, *, code: str = "", quiet: bool = False) -> None:
        super().__init__(message)
        self.code = code or self.code
        self.quiet = quiet

    @property
    def line(self) -> str:
        return printable(without_secrets(f"{self} [{self.code}]" if self.code else str(self)))

    def say(self) -> None:
        if not self.quiet:
            print(f"error: {self.line}", file=sys.stderr, flush=True)
        self.quiet = True


class UserError(ForeseenError):
    """Bad input or a bad environment; retrying only helps after someone has changed it."""

    exit_code = EXIT_USER_ERROR


class HubUnavailable(ForeseenError):
    """The hub did not respond to any attempt. It may next time, so a launcher restarts the run."""

    code = "hub-unreachable"


class TrainingFailure(ForeseenError):
    """Training itself failed: a non-finite loss, no memory, a lost rank, a full disk."""


class LostRank(TrainingFailure):
    """Another rank is gone or missing. Which one, and why, is found out before this is printed."""

    exit_code = 69  # EX_UNAVAILABLE: nothing is wrong with this rank itself
    code = "rank-lost"


class ModelLoadError(UserError):
    """A model cannot be loaded; the message says which, what is wrong, and what to do."""

    code = "model-unusable"

    def __init__(self, where: Path | str, what: str = "", remedy: str = "", **details: Any) -> None:
        # A rank that repeats the error of another has the whole message already.
        remedy = remedy or _how_to_replace(Path(where))
        super().__init__(f"{where}: {what}; {remedy}" if what else str(where), **details)


def _how_to_replace(model: Path) -> str:
    """What makes a damaged model whole: that depends on who wrote it."""
    folder = model if model.is_dir() else model.parent
    if (folder / "manifest.json").is_file():
        return "export the model again"
    if model.suffix == ".pt" or (folder / "metrics.json").is_file():
        return "copy the model from its training run again, or train it again"
    return "download the model again, or write it with save_pretrained of transformers"


class StopAsked(BaseException):
    """The process was asked to stop before there was anything to save.

    Derives from ``BaseException`` so that ``except Exception`` cannot swallow it.

    Args:
        exit_code: of the process.
        quiet: another rank prints the line.
    """

    def __init__(self, exit_code: int, *, quiet: bool) -> None:
        super().__init__(
            "Stopped before the first step, nothing to save. To resume, rerun the same command."
        )
        self.exit_code = exit_code
        self.quiet = quiet

    def say(self) -> None:
        if not self.quiet:
            print(self, flush=True)


@contextlib.contextmanager
def rank0_only_output() -> Iterator[None]:
    """Before the process group exists: only rank 0 prints, and the others stay until it has printed
    its error.
    """
    rank = int(os.environ.get("RANK", 0))
    try:
        with contextlib.redirect_stdout(io.StringIO()) if rank else contextlib.nullcontext():
            yield
    except ForeseenError as error:
        if rank:
            error.quiet = True
            # torchrun ends all ranks once one exits, so if this rank were first, rank 0 could not
            # print.
            time.sleep(SECONDS_FOR_RANK_0)
        raise


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error message; the error's type if there is none."""
    lines = without_secrets(str(error)).splitlines()
    return next((line.strip() for line in lines if line.strip()), type(error).__name__)


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """At most two known names that ``name`` abbreviates or misspells; unlike names mislead."""
    name, known = name.lower(), list(known)
    longer = [one for one in known if re.match(rf"{re.escape(name)}[^a-z0-9]", one)]
    # Two letters that are swapped weigh much in a short name.
    swapped = [one for one in known if sorted(one) == sorted(name)]
    return (longer or swapped or difflib.get_close_matches(name, known, cutoff=0.81))[:2]


class HelpFormatter(argparse.HelpFormatter):
    """As wide as the terminal, at most 110 columns; keeps paragraphs, and indented ones as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(
            prog, max_help_position=30, width=min(110, shutil.get_terminal_size((100, 24)).columns)
        )

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            part
            if part.startswith("  ")
            else super(HelpFormatter, self)._fill_text(part, width, indent)
            for part in text.split("\n\n")
        )


def in_one_line(error: BaseException) -> str:
    """The whole message in one line; NCCL names the cause in the last of several lines."""
    return " ".join(without_secrets(str(error)).split())


def reason_to_record(error: BaseException) -> str:
    """An error as one line for a log; unforeseen ones say little without their type."""
    if isinstance(error, ForeseenError):
        return printable(in_one_line(error) + f" [{error.code}]" * bool(error.code))
    if isinstance(error, StopAsked):
        return in_one_line(error)
    return f"{type(error).__name__}: {in_one_line(error)}"


_INVALID = {
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "greater_than": "must be greater than {gt}",
    "less_than": "must be less than {lt}",
    "literal_error": "must be {expected}",
    "string_too_short": "must not be empty",
    "value_error": "{error}",  # of a validator's own
} | {
    f"{kind}_{problem}": f"must be {what}"
    for kind, what in (
        ("int", "a whole number"),
        ("float", "a number"),
        ("bool", "true or false"),
        ("string", "text"),
    )
    for problem in ("parsing", "type", "from_float")
}


def invalid_value(problem: Mapping[str, Any]) -> str:
    """What is wrong with a value, as one of pydantic's ``ValidationError.errors()`` says it."""
    limits = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in problem.get("ctx", {}).items()
    }
    return _INVALID.get(problem["type"], problem["msg"]).format_map(limits)


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports errors in one line, and accepts flags with ``_`` or ``-``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**({"formatter_class": HelpFormatter, "allow_abbrev": False} | settings))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        args = sys.argv[1:] if args is None else args
        return super().parse_known_args(
            [self._as_defined(argument) for argument in args], namespace
        )

    def _as_defined(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        known = self._option_string_actions  # argparse has no public list of its flags
        if name.startswith("--") and name not in known:
            flat = name.replace("-", "_")
            name = next((flag for flag in known if flag.replace("-", "_") == flat), name)
        return name + equals + value

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)", code="usage")


def share_or_name(text: str) -> float | str:
    """``2%`` and ``0.02`` are shares; anything else is the name of an operating point.

    Raises:
        ValueError: it is empty, or a share that is not between 0 and 1.
    """
    text = text.strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        if not text:
            raise ValueError("must not be empty") from None
        return text
    if not 0 < share <= 1:
        raise ValueError(f"{text}: must be greater than 0, and at most 1 or 100%")
    return share


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return int(text)


def above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number greater than 0")
    return number


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's main function; foreseen errors become one line and an exit code."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # started with the stream closed, as by `>&-`
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    try:
        code = main() or 0
    except ForeseenError as error:
        error.say()
        code = error.exit_code
    except StopAsked as stop:
        stop.say()
        code = stop.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = 130
    # Who reads the output has had enough, such as `| head`. Closing it here keeps Python from
    # complaining when it flushes at its end.
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            sys.stdout.close()
        code = 1
    sys.exit(code)
