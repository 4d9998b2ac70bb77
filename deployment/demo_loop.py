"""Show the whole loop: a served model meets new topics, the alarm is raised, 100 texts are reviewed,
and a better model takes its place.

python deployment/demo_loop.py [--output_dir FOLDER]. The texts are the sample news of this
repository; no network is needed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console

from common.commands import run_module
from common.errors import TrainingFailure, UserError, run_command
from common.files import write_csv, write_whole
from common.rows import SAMPLE_NEWS
from deployment.client import attempts, fetch, fetch_json
from inference.observing.alarm import ALARM_AT, Alarm
from inference.observing.estimates import Estimate, estimate
from inference.observing.reference import Reference
from inference.observing.store import Store

ROOT = Path(__file__).resolve().parents[1]
# The first model knows only these topics. Whatever else a label has comes later, as if a newsroom
# had opened new desks. (From fewer than 160 rows, some runs end in REJECT: a model of so few rows
# answers World when in doubt, and a better one then loses more of World's recall than the verdict
# allows.)
EARLY_TOPICS = {
    "World": "iraq|baghdad|fallujah|israel|gaza|palestin|kabul|afghan|hostage|militan|insurgent|bomb"
    "|troops|soldier|rebel|army",
    "Sports": "quarterback|touchdown|inning|pitcher|homer|nba|nfl|yankee|red sox|playoff|yard|basket"
    "|coach|season|league",
    "Business": r"\boil\b|crude|barrel|stocks|\bdow\b|nasdaq|dollar|euro|\byen\b|investor"
    r"|wall street|\bbank",
    "Sci/Tech": r"software|microsoft|google|internet|browser|virus|linux|server|worm|\bweb\b|computer"
    "|online|chip|phone",
}
SEED = 1
EARLY = {"train": 200, "reference": 260, "week 1": 200}
LATE = {"week 2": 250, "golden": 520, "week 3": 280}
AT_ONCE = 32  # texts per request
DEADLINE = 120.0  # seconds for the server to start, to count, or to end
STORE = "observed.sqlite"
MARK = "loop_demo.txt"

Counts = dict[tuple[str, str], tuple[int, float]]  # by kind and key

console = Console(width=80, highlight=False, markup=False)


@dataclass(frozen=True)
class Row:
    """A text as the server gets it, and the label that only the reviewer and the demo know."""

    text: str
    label: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=ROOT / "checkpoints" / "loop_demo",
        help="a new folder, or that of an earlier demonstration, which is removed "
        "(default: %(default)s)",
    )
    folder: Path = parser.parse_args().output_dir.resolve()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.chdir(ROOT)
    if folder.is_relative_to(ROOT):  # so that the commands that are printed stay short
        folder = folder.relative_to(ROOT)
    begin(folder)
    try:
        show(folder)
    except KeyboardInterrupt:
        say(
            "Stopped; nothing runs any more. make loop-demo starts again from the beginning, "
            f"and rm -r {folder} removes what is there."
        )
        return 130
    return 0


def begin(folder: Path) -> None:
    """Make the folder, in place of an earlier demonstration's; anything else is refused."""
    if shlex.quote(str(folder)) != str(folder):  # the commands could not be typed as printed
        raise UserError(
            f"--output_dir {folder}: a shell would have to quote it; name a folder without "
            "spaces or special characters",
            code="flag-value",
        )
    if folder.exists() and not (folder / MARK).is_file():
        raise UserError(
            f"--output_dir {folder}: is not from an earlier demonstration; name a new folder",
            code="output-not-empty",
        )
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"--output_dir {folder}: cannot be written again ({error.strerror}); name another one",
            code="not-writable",
        ) from error
    write_whole(folder / MARK, b"Written by deployment/demo_loop.py, which may delete this.\n")


def show(folder: Path) -> None:
    parts = split_news()
    first, live, new = folder / "first", folder / "live", folder / "new"
    rows, store = folder / "rows", f"--store {folder / STORE}"
    write_parts(folder, parts)
    title(f"1/7  Train a model on {EARLY['train']} texts about its first topics")
    flags = f"--model starter --method head --device cpu --output_dir {first}"
    run(f"training.train_single --dataset {rows} {flags}", quiet=True)
    run(f"inference.export {first} --rows {rows / 'test.csv'}", quiet=True)
    run(f"loop.promote {first} --live {live}")

    title("2/7  Serve it, count what it sees, keep its texts for a day")
    with Server(folder, live) as server:
        title("3/7  Two weeks of texts that nobody has labelled")
        say("Only this script knows how many answers are right; the server estimates it.\n")
        say(f"{'':21} {'right':>6}   estimated, 90% interval    evidence of a change")
        week(server, "week 1", "known topics", parts["week 1"])
        alarm = week(server, "week 2", "new topics", parts["week 2"])
        if not alarm:
            raise TrainingFailure(
                f"week 2 raised no alarm; see {folder / 'server.log'}, and run it again",
                code="demo-failed",
            )
        say(f"\nThe alarm: {alarm}.")
        say("Wrong answers of which the model is sure do not show; a review finds them.")

        title("4/7  Review 100 of the texts (a script in place of a person)")
        run(f"loop.review {store} queue")
        run(f"loop.review {store} export {folder}/to_label.jsonl --queue")
        label(folder, parts["week 1"] + parts["week 2"])
        run(f"loop.review {store} import {folder}/labelled.jsonl --by ann")
        run(f"loop.review {store} export {folder}/reviewed.jsonl")

        title("5/7  Retrain on the old rows and the reviewed ones, and compare")
        given = f"--rows {rows / 'train.csv'} --reviewed {folder}/reviewed.jsonl"
        held_out = f"--golden {folder}/golden.csv --output_dir {new}"
        run(f"loop.retrain {first} {given} {held_out}", quiet=True, also_good=(10, 11))

        title("6/7  The verdict, on rows that neither model has seen")
        if run(f"loop.verdict {first} {new} --rows {new}.rows/test.csv", also_good=(10, 11)):
            raise TrainingFailure(
                "this time the verdict is not PROMOTE: a tenth of the reviewed texts is drawn at "
                "random; the old model stays. Run it again",
                code="demo-failed",
            )

        title("7/7  Promote it to the running server, under traffic")
        with Traffic(server, parts["week 1"]) as traffic:
            run(f"loop.promote {new} --live {live} --server {server.address} --pid {server.pid}")
        say(f"{traffic.answered:,} requests were answered meanwhile; {traffic.failed:,} failed.")
        server.observed()  # from here on, only the next week counts
        say("\nThe next week:\n")
        before = accuracy_of(folder, first, parts["week 3"])
        say(f"{'week 3, the old model':21} {before:6.1%}")
        week(server, "week 3", "new topics", parts["week 3"])
    say(f"\nEverything is in {folder}: the models, {STORE}, the reviews and the rows.")
    say("The same commands do it for your own model: docs/loop.md.")


# ---------------------------------------------------------------- the texts


def split_news() -> dict[str, list[Row]]:
    """The sample news in parts that share no row: those about the first topics, then the others."""
    early: list[Row] = []
    late: list[Row] = []
    for text, label in load_sample():
        known = re.search(EARLY_TOPICS[label], text.lower())
        (early if known else late).append(Row(text, label))
    parts = {}
    for rows, sizes in ((early, EARLY), (late, LATE)):
        random.Random(SEED).shuffle(rows)
        for name, size in sizes.items():
            parts[name], rows = rows[:size], rows[size:]
    return parts


def load_sample() -> list[tuple[str, str]]:
    """Text and label of each row."""
    names = (SAMPLE_NEWS / "classes.txt").read_text(encoding="utf-8").split()
    found = []
    for name in ("train.csv", "test.csv"):
        with (SAMPLE_NEWS / name).open(encoding="utf-8", newline="") as file:
            found += [
                (f"{headline} {lead}", names[int(number) - 1])
                for number, headline, lead in csv.reader(file)
            ]
    return found


def write_parts(folder: Path, parts: Mapping[str, Sequence[Row]]) -> None:
    (folder / "rows").mkdir()
    files = {"train": "rows/train.csv", "reference": "rows/test.csv", "golden": "golden.csv"}
    for name, file in files.items():
        write_csv(folder / file, ("text", "label"), [(row.text, row.label) for row in parts[name]])


# ---------------------------------------------------------------- the server and its stream


class Server:
    """The server of the live model, which ends with the block."""

    def __init__(self, folder: Path, live: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self._live, self._store, self._log = live, folder / STORE, folder / "server.log"
        self._words = f"inference.serve --model {live} --host 127.0.0.1 --port {port}"
        self._asked = 0
        self._before: dict[tuple[str, str], Counts] = {}  # by model and revision

    def __enter__(self) -> Server:
        settings = {"OBSERVE": str(self._store), "KEEP_TEXTS": "1d"}
        print_command(self._words, settings)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *shlex.split(self._words)],
                env=os.environ | settings | {"PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
            )
        self.pid = self._process.pid
        try:
            self._wait_until_healthy()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_until_healthy(self) -> None:
        for _ in attempts(DEADLINE, pause=0.2):
            if self._process.poll() is not None:
                break
            try:
                fetch(f"{self.address}/health", timeout=5)
                return
            except OSError:
                pass  # it does not listen yet, or still loads
        what = f"the server does not answer at {self.address}; see {self._log}"
        raise TrainingFailure(what, code="demo-failed")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def ask(self, rows: Sequence[Row]) -> int:
        """How many of the texts get their right label."""
        body = {"texts": [row.text for row in rows]}
        answers = fetch_json(f"{self.address}/predict/batch", body)
        self._asked += len(rows)
        return sum(one["label"] == row.label for one, row in zip(answers, rows, strict=True))

    def observed(self) -> tuple[Estimate, float, str]:
        """Of the texts since the last call, once they are counted: the estimated accuracy, the
        alarm's evidence, and what it reports if it was raised.

        `GET /model` has the same for the last hour. Here a week takes seconds, so what was counted
        before is subtracted.
        """
        model = fetch_json(f"{self.address}/model")
        key = model["name"], model["revision"]
        store = Store(str(self._store))
        try:
            counts = self._all_counted(store, key)
            state = json.loads(store.alarm(*key) or "{}")
        finally:
            store.close()
        before, self._before[key] = self._before.get(key, {}), counts
        new = {
            name: (number - before.get(name, (0, 0.0))[0], total - before.get(name, (0, 0.0))[1])
            for name, (number, total) in counts.items()
        }
        reference = Reference.of(json.loads((self._live / "native/manifest.json").read_text()))
        if reference is None:
            raise TrainingFailure(f"{self._live} has no reference", code="demo-failed")
        cells = {int(name): value for (kind, name), value in new.items() if kind == "cell"}
        games = Alarm(reference).start(json.dumps(state["games"]) if "games" in state else None)
        found = estimate(reference, cells, (), new.get(("unfamiliar", ""), (0, 0.0))[0])
        return found, games.evidence, state.get("told", "") if state.get("raised") else ""

    def _all_counted(self, store: Store, key: tuple[str, str]) -> Counts:
        """Of this model and revision, once every text is counted that any of them got."""
        for _ in attempts(DEADLINE, pause=0.2):
            # The counts of the last revision may still grow when the next one answers already.
            last = [store.counts(*one, 0, 2**31, ("texts",)) for one in self._before if one != key]
            counts = store.counts(*key, 0, 2**31, ("texts", "cell", "unfamiliar"))
            texts = sum(one.get(("texts", ""), (0, 0.0))[0] for one in (counts, *last))
            if texts >= self._asked:  # more if an answer was lost on its way
                return counts
        what = f"not all texts were counted within {DEADLINE:.0f} s; see {self._log}"
        raise TrainingFailure(what, code="demo-failed")


class Traffic:
    """Requests to the server, one after the other, for as long as the block lasts."""

    def __init__(self, server: Server, rows: Sequence[Row]) -> None:
        self.answered = self.failed = 0
        self._server, self._rows = server, rows
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _send(self) -> None:
        while not self._ended.is_set():
            try:
                self._server.ask(self._rows[:1])
                self.answered += 1
            except (OSError, ValueError, LookupError):
                self.failed += 1


def week(server: Server, name: str, kind: str, rows: Sequence[Row]) -> str:
    """Send the texts of a week and print what is known of them; returns what the alarm reports."""
    with console.status(f"{name}: {len(rows)} texts about {kind} ..."):
        batches = range(0, len(rows), AT_ONCE)
        right = sum(server.ask(rows[first : first + AT_ONCE]) for first in batches)
        found, evidence, alarm = server.observed()
    known = "not known, see below"
    if found.value is not None and found.low is not None and found.high is not None:
        known = f"{found.value:6.1%} ({found.low:.1%} to {found.high:.1%})"
    shown = "ALARM" if alarm else f"{evidence:,.0f} of {ALARM_AT:,.0f}"
    say(f"{f'{name}, {kind}':21} {right / len(rows):6.1%}   {known:26} {shown}")
    if found.value is None:
        say(f"  {found.reason}")
    return alarm


def label(folder: Path, rows: Sequence[Row]) -> None:
    """In place of a person: write the right labels into the file of texts to review."""
    labels = {row.text: row.label for row in rows}
    lines = (folder / "to_label.jsonl").read_text("utf-8").splitlines()
    asked = [json.loads(line) for line in lines]
    done = [json.dumps(one | {"label": labels[one["text"]]}) for one in asked]
    write_whole(folder / "labelled.jsonl", ("\n".join(done) + "\n").encode())


def accuracy_of(folder: Path, model: Path, rows: Sequence[Row]) -> float:
    """Of a model that is no longer served."""
    asked, answers = folder / "week3.csv", folder / "week3_old.jsonl"
    write_csv(asked, ("text",), [(row.text,) for row in rows])
    run(f"inference.score {asked} {answers} --model {model} --prefix old_", quiet=True)
    answered = [json.loads(line)["old_label"] for line in answers.read_text("utf-8").splitlines()]
    return sum(one == row.label for one, row in zip(answered, rows, strict=True)) / len(rows)


# ---------------------------------------------------------------- what is printed


def title(text: str) -> None:
    console.print(f"\n{text}", style="bold")


def say(line: str) -> None:
    console.print(line, soft_wrap=True)


def print_command(words: str, settings: Mapping[str, str] | None = None) -> None:
    """As it can be typed, in lines of at most 80 columns."""
    set_before = [f"{name}={value}" for name, value in (settings or {}).items()]
    text = " ".join([*set_before, "python -m", words])
    lines = textwrap.wrap(text, 74, break_long_words=False, break_on_hyphens=False)
    console.print("$ " + " \\\n    ".join(lines), style="cyan", soft_wrap=True)


def run(words: str, *, quiet: bool = False, also_good: Collection[int] = ()) -> int:
    """Run a command of the product as a user would; ``quiet``: only report how long it took."""
    print_command(words)
    module, *arguments = shlex.split(words)
    if not quiet:
        return run_module(module, arguments, module, say, also_good=also_good)
    began = time.monotonic()
    with console.status("... this takes some seconds"):
        code = run_module(
            module, arguments, module, lambda line: None, quiet=True, also_good=also_good
        )
    say(f"  done in {time.monotonic() - began:.0f} s")
    return code


if __name__ == "__main__":
    run_command(main)
