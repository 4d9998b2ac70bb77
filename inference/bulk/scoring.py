"""Scores the parts of a job: reads and tokenizes ahead, runs on all cores, writes behind."""

from __future__ import annotations

import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from common.calibration import CalibrationError
from common.errors import ForeseenError, UserError, first_line
from common.row_parts import Part
from common.text import counted, texts_in
from inference import asking
from inference.bulk.job import Claims, FileParts, Job
from inference.bulk.rows_out import Added, Answers, RowsOut
from inference.engines.base import PASSES_AT_ONCE, RAGGED_TOKENS, Engine, TokenBatch, forward_passes
from inference.engines.model_loader import Cascade, ModelLoader

# Parts whose passes are queued at the same time: while the last passes of one run, those of the
# next follow.
PARTS_IN_PASSES = 2
LINE_SECONDS = 5.0
WAIT_SECONDS = 0.25


@dataclass(slots=True)
class Tokenized:
    """The rows of a part that one model reads, ready for its forward passes."""

    stage: int = 0  # of the model in `ModelLoader.stages`
    positions: list[int] = field(default_factory=list)  # of the rows that have tokens
    token_ids: list[list[int]] = field(default_factory=list)  # of these
    truncated: list[bool] = field(default_factory=list)  # which of these were cut
    passes: list[list[int]] = field(default_factory=list)  # indices into these


@dataclass(slots=True)
class Prepared:
    """A claimed part, what its rows have been answered so far, and which of them are read next."""

    file: FileParts
    number: int
    part: Part
    values: NDArray[np.float64]  # (rows, labels), NaN where a row has no answer
    familiarity: list[float | None]  # of each row
    tokenized: Tokenized = field(default_factory=Tokenized)


# What a pass has read, and its scores (logits), (texts, labels).
Scored = tuple[TokenBatch, NDArray[np.float32]]


class Passes:
    """Forward passes on threads that share the slots of the engines."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        slots = max(engine.num_slots for engine in engines)
        # One thread per pass wastes no time on waiting for one another. Beyond PASSES_AT_ONCE each
        # pass gets several, which answers nothing differently.
        at_once = min(PASSES_AT_ONCE, *(engine.num_slots for engine in engines))
        self._threads: SimpleQueue[int] = SimpleQueue()
        for number in range(at_once):
            self._threads.put(slots // at_once + (number < slots % at_once))
        # One pool for all engines: each has a slot for every processor, so with a pool for each
        # there would be twice as many threads as processors.
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="pass")

    def submit(self, tokenized: Tokenized) -> list[Future[Scored]]:
        engine = self._engines[tokenized.stage]
        return [
            self._pool.submit(self._run, engine, [tokenized.token_ids[i] for i in chosen])
            for chosen in tokenized.passes
        ]

    def _run(self, engine: Engine, token_ids: list[list[int]]) -> Scored:
        threads = self._threads.get()
        try:
            batch = TokenBatch.of(token_ids)
            return batch, engine.logits(batch, threads)
        except ForeseenError:
            raise
        except Exception as error:  # every runtime has its own errors
            raise UserError(
                f"the model failed on {len(token_ids)} rows ({type(error).__name__}: "
                f"{first_line(error)}); try another --engine. Finished parts are kept",
                code="score-failed",
            ) from error
        finally:
            self._threads.put(threads)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class Progress:
    """What this process has done and how long the whole job will take, every few seconds."""

    def __init__(self, job: Job, *, quiet: bool) -> None:
        self._sizes = [job.inputs.version(file.path)["bytes"] for file in job.files]
        self._shares = [0.0] * len(job.files)
        self._quiet = quiet
        self._begun = self._last = time.monotonic()
        # The speed of the last minutes counts, of all processes of the job together.
        self._seen: deque[tuple[float, float]] = deque(maxlen=60)
        self.rows = self.bad_rows = self.passed_on = 0

    def finished_file(self, number: int) -> None:
        self._shares[number] = 1.0

    def part_written(self, file: FileParts, number: int, rows: int, bad_rows: int) -> None:
        self.rows += rows
        self.bad_rows += bad_rows
        now = time.monotonic()
        if self._quiet or now - self._last < LINE_SECONDS:
            return
        self._last = now
        self._shares[number] = max(self._shares[number], file.position())
        done = sum(
            share * size for share, size in zip(self._shares, self._sizes, strict=True)
        ) / sum(self._sizes)
        self._seen.append((now, done))
        speed = f"{self.rows / (now - self._begun):,.0f} rows per second"
        line = f"{counted(self.rows, 'row')}, {speed}; {done:.1%} of the input done"
        (before, at), (latest, here) = self._seen[0], self._seen[-1]
        if here > at:
            left = timedelta(seconds=round((1 - here) * (latest - before) / (here - at)))
            line += f", {left} left"
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def summary(self) -> str:
        seconds = time.monotonic() - self._begun
        if sys.stderr.isatty() and not self._quiet:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        line = f"{counted(self.rows, 'row')} in {seconds:,.1f} s, "
        line += f"{self.rows / seconds:,.0f} rows per second"
        if self.passed_on:
            share = f"{self.passed_on / self.rows:.1%}"
            line += f"; {self.passed_on:,} of them ({share}) by the big model"
        if self.bad_rows:
            line += f"; {self.bad_rows:,} of them could not be classified, the last column says why"
        return line


class Scoring:
    """Works on a job until all of its outputs are complete, by this process or others.

    Args:
        job: begun.
        model: what scores the rows.
        quiet: print no progress.

    Raises:
        UserError: the model cannot promise what the job's settings ask for.
    """

    def __init__(self, job: Job, model: ModelLoader, *, quiet: bool = False) -> None:
        self._job, self._model = job, model
        asked = {name: job.settings[name] for name in asking.NAMES if name in job.settings}
        try:
            self._wanted = model.answering.wanted(**asked)
        except CalibrationError as error:
            raise UserError(str(error), code="no-guarantee") from error
        self._stages = [(stage, stage.tokenizer.many()) for stage in model.stages]
        self._keep = job.settings["bad_rows"] == "keep"
        self.files = [FileParts(job, number) for number in range(len(job.files))]
        # What writes the rows of each input, and the joining of its parts, both by its number.
        self._outs: dict[int, RowsOut] = {}
        self._assembling: dict[int, Future[None]] = {}
        self._done: set[int] = set()
        self.progress = Progress(job, quiet=quiet)

    def check_inputs(self) -> None:
        """Open every file once, so that a wrong column is known before hours of work.

        Raises:
            UserError: a file cannot be read, has no such column, or has one with the name of a new
                one.
        """
        for number, file in enumerate(self.files):
            self._rows_out(number)
            file.close()
            del self._outs[number]

    def run(self) -> None:
        """Read, tokenize, run and write until nothing is left."""
        for file in self.files:
            file.begin()
        claims = Claims(self._job.outputs)
        passes = Passes([stage.engine for stage in self._model.stages])
        # One thread each, so that parts are read and written in order, and an output is joined
        # while other parts are still being scored.
        ahead, behind, joining = (ThreadPoolExecutor(1, name) for name in ("read", "write", "join"))
        try:
            self._score(
                self._claimed_parts(claims, joining),
                passes,
                ahead,
                lambda prepared, found: behind.submit(self._write, claims, prepared, found),
            )
        except FileNotFoundError:
            # Another process has taken over what this one was slow with, finished the job and
            # removed the parts.
            if not self._job.is_finished_on_disk():
                raise
        finally:
            passes.close()
            for pool in (ahead, behind, joining):
                pool.shutdown(cancel_futures=True)
            claims.close()
        self._job.finish(sum(file.rows_done() for file in self.files))

    def _score(
        self,
        parts: Iterator[Prepared | None],
        passes: Passes,
        ahead: ThreadPoolExecutor,
        write: Callable[[Prepared, list[Scored]], Future[None]],
    ) -> None:
        running: deque[tuple[Prepared, list[Future[Scored]]]] = deque()
        writing: deque[Future[None]] = deque()
        following = ahead.submit(next, parts, None)
        while (prepared := following.result()) is not None or self._wait(running, writing):
            if prepared is None:  # others work on all that is left: bring this process's to an end
                most_running = most_writing = 0
            else:
                running.append((prepared, passes.submit(prepared.tokenized)))
                most_running, most_writing = (PARTS_IN_PASSES - 1) * len(self._stages), 1
            following = ahead.submit(next, parts, None)
            # Now the passes of two parts are queued and a third is being prepared, so no core
            # waits for the next text; and not more than that is in memory. A cascade queues each part
            # twice: while the rows that its small model passes on are tokenized for the big one,
            # the cores run the passes of the part behind it.
            while len(running) > most_running:
                ended, futures = running.popleft()
                found = [future.result() for future in futures]
                if (cascade := self._model.cascade) and ended.tokenized.stage == 0:
                    self._pass_on(cascade, ended, found)
                    running.append((ended, passes.submit(ended.tokenized)))
                    continue
                writing.append(write(ended, found))
                while len(writing) > most_writing:
                    writing.popleft().result()

    def _pass_on(self, cascade: Cascade, prepared: Prepared, found: Sequence[Scored]) -> None:
        """Keep the answers that the small model is sure of, and tokenize the rest for the big one."""
        self._read(prepared, found)
        read = prepared.tokenized
        unsure = cascade.passed_on(prepared.values[read.positions], read.truncated)
        rest = [read.positions[i] for i in unsure]
        prepared.values[rest] = np.nan  # also of a text that then is blank to the big model
        self._tokenize(prepared, 1, rest)

    def _wait(self, running: Sequence[object], writing: Sequence[object]) -> bool:
        """Whether there is still something to do; waits a moment if others do it."""
        if len(self._done) == len(self.files):
            return False
        if not running and not writing:
            time.sleep(WAIT_SECONDS)
        return True

    def _claimed_parts(
        self, claims: Claims, joining: ThreadPoolExecutor
    ) -> Iterator[Prepared | None]:
        """Parts that are this process's to score; None when others work on all that is left."""
        while len(self._done) < len(self.files):
            # Asked once per round through the files, because it reads the record from the disk.
            if self._job.is_finished_on_disk():  # its parts may be gone already
                self._done.update(range(len(self.files)))
                return
            for number, file in enumerate(self.files):
                if self._is_done(number):
                    continue
                yield from self._claimed_of(number, claims)
                file.close()
                count = file.count()
                if number in self._assembling or not count or len(file.finished()) < count:
                    continue
                # All parts of this file are there, so one of the processes joins them.
                if claims.take(file.path("output", "claim")):
                    self._assembling[number] = joining.submit(self._join, claims, number, count)
            yield None

    def _is_done(self, number: int) -> bool:
        if number in self._done:
            return True
        if number in self._assembling and self._assembling[number].done():
            self._assembling.pop(number).result()  # raises what joining failed with
        if not self.files[number].is_done:
            return False
        self._done.add(number)
        self.progress.finished_file(number)
        return True

    def _claimed_of(self, file_number: int, claims: Claims) -> Iterator[Prepared]:
        file, number = self.files[file_number], 0
        finished, count = file.finished(), file.count()
        while count is None or number < count:
            claim = file.path(number, "claim")
            if number not in finished and claims.take(claim):
                # It may have been finished since the folder was listed.
                if self._job.outputs.exists(file.path(number)):
                    claims.release(claim)
                elif (part := file.read(number)) is None:
                    claims.release(claim)
                    return
                else:
                    self._rows_out(file_number)
                    yield self._prepared(file, number, part)
            number += 1

    def _rows_out(self, number: int) -> RowsOut:
        if number not in self._outs:
            file, settings = self.files[number], self._job.settings
            prefix, probabilities = settings["prefix"], settings["probabilities"]
            added = Added(prefix, probabilities, self._keep, self._wanted)
            self._outs[number] = RowsOut(
                file.file.path, file.file.out_suffix, file.reader, self._model.answering, added
            )
        return self._outs[number]

    def _prepared(self, file: FileParts, number: int, part: Part) -> Prepared:
        num_rows = len(part.rows)
        values = np.full((num_rows, len(self._model.labels)), np.nan)
        prepared = Prepared(file, number, part, values, [None] * num_rows)
        self._tokenize(prepared, 0, range(num_rows))
        if part.problems and not self._keep:
            raise _unusable(part.problems[min(part.problems)])
        return prepared

    def _tokenize(self, prepared: Prepared, stage: int, rows: Sequence[int]) -> None:
        """Make these rows of a part ready for a model; those that are blank to it are a problem."""
        part, (model, many) = prepared.part, self._stages[stage]
        positions, cleaned, blank = [], [], []
        for position in rows:
            if (text := part.texts[position]) is None:
                continue  # a problem already
            clean = model.tokenizer.clean_all(text)
            if all(texts_in(clean)):
                positions.append(position)
                cleaned.append(clean)
            else:
                blank.append(position)
        token_ids = many.token_ids(cleaned)
        cut = set(many.cut)
        truncated = [i in cut for i in range(len(token_ids))]
        # Backwards, so that the indices of those still to go stay right.
        for i in reversed(many.blank):
            blank.append(positions.pop(i))
            del token_ids[i], truncated[i]
        for position in blank:
            self._note(prepared, position, "the text is blank")
        if stage == len(self._stages) - 1:
            part.texts.clear()  # they are in the rows
        passes = divide(token_ids, model.engine)
        prepared.tokenized = Tokenized(stage, positions, token_ids, truncated, passes)

    def _note(self, prepared: Prepared, position: int, problem: str) -> None:
        """Note why a row has no answer."""
        row = prepared.file.place(prepared.number).rows + position + 1
        prepared.part.problems[position] = f"{prepared.file.file.path} row {row}: {problem}"

    def _read(self, prepared: Prepared, found: Sequence[Scored]) -> None:
        """Turn the scores of a part's passes into the answers of its rows."""
        if not found:
            return
        # All passes of the part at once: called for each pass, numpy would take most of the time
        # for getting started.
        batches, scores = zip(*found, strict=True)
        batch = TokenBatch(
            np.concatenate([one.ids for one in batches]),
            np.concatenate([one.lengths for one in batches]),
        )
        tokenized = prepared.tokenized
        answering = self._stages[tokenized.stage][0].answering
        positions = [tokenized.positions[i] for chosen in tokenized.passes for i in chosen]
        prepared.values[positions], known = answering.read(
            batch, np.concatenate(scores), self._wanted
        )
        for position, one in zip(positions, known, strict=True):
            prepared.familiarity[position] = one

    def _write(self, claims: Claims, prepared: Prepared, found: Sequence[Scored]) -> None:
        self._read(prepared, found)
        file, part, values = prepared.file, prepared.part, prepared.values
        for position in np.flatnonzero(~np.isfinite(values).all(axis=1)).tolist():
            if position not in part.problems:
                values[position] = np.nan
                self._note(prepared, position, "the model answers this text with NaN")
        if part.problems and not self._keep:
            raise _unusable(part.problems[min(part.problems)])
        number = self.files.index(file)
        answers = Answers(values, part.problems, prepared.familiarity)
        data = self._outs[number].part(part, answers)
        self._job.outputs.write(file.path(prepared.number), data)
        claims.release(file.path(prepared.number, "claim"))
        self.progress.part_written(file, number, len(part.rows), len(part.problems))
        if prepared.tokenized.stage > 0:
            self.progress.passed_on += len(prepared.tokenized.positions)

    def _join(self, claims: Claims, number: int, count: int) -> None:
        file, storage = self.files[number], self._job.outputs
        try:
            # Parts of an older and a newer version of the input would make an output of neither.
            self._job.check_unchanged(number)
            # The claim may have been taken over, so two processes must not write to the same file
            # aside.
            with storage.writing(
                file.file.out, file.path(f"output-{secrets.token_hex(4)}", "new")
            ) as output:
                self._rows_out(number).assemble(
                    map(self._read_part, map(file.path, range(count))), output
                )
            file.note_done(file.place(count).rows)
        finally:
            claims.release(file.path("output", "claim"))

    def _read_part(self, path: str) -> bytes:
        data = self._job.outputs.read(path)
        if data is None:
            raise FileNotFoundError(path)
        return data


def divide(token_ids: Sequence[Sequence[int]], engine: Engine) -> list[list[int]]:
    """Divide texts into forward passes: the indices of the texts in each.

    Texts of equal length go together; the longest first, so the last passes are short.
    """
    order = sorted(range(len(token_ids)), key=lambda i: (-len(token_ids[i]), i))
    lengths = [len(token_ids[i]) for i in order]
    # A padding engine also gets texts of equal length, since they are sorted.
    tokens = engine.batch_tokens if engine.pads else max(engine.batch_tokens, RAGGED_TOKENS)
    return [[order[i] for i in one] for one in forward_passes(lengths, pads=False, tokens=tokens)]


def _unusable(problem: str) -> UserError:
    return UserError(
        f"{problem}; fix it, or keep such rows without a label with --bad_rows keep; then begin "
        "again with --restart",
        code="row-unusable",
    )
