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
from inference.engines.model_loader import ModelLoader

# Parts whose passes are queued at the same time: while the last passes of one run, those of the
# next follow.
PARTS_IN_PASSES = 2
LINE_SECONDS = 5.0
WAIT_SECONDS = 0.25


@dataclass(slots=True)
class Prepared:
    """A claimed part, ready for its forward passes."""

    file: FileParts
    number: int
    part: Part
    positions: list[int]  # of the rows that have tokens
    token_ids: list[list[int]]  # of these
    passes: list[list[int]] = field(default_factory=list)  # indices into these


# What a pass has read, and its scores (logits), (texts, labels).
Scored = tuple[TokenBatch, NDArray[np.float32]]


class Passes:
    """Forward passes on threads that share the engine's slots."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        slots = engine.num_slots
        # One thread per pass wastes no time on waiting for one another. Beyond PASSES_AT_ONCE each
        # pass gets several, which answers nothing differently.
        at_once = min(slots, PASSES_AT_ONCE)
        self._threads: SimpleQueue[int] = SimpleQueue()
        for number in range(at_once):
            self._threads.put(slots // at_once + (number < slots % at_once))
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="pass")
        # A padding engine also gets texts of equal length, since they are sorted.
        self._tokens = (
            engine.batch_tokens if engine.pads else max(engine.batch_tokens, RAGGED_TOKENS)
        )

    def divide(self, token_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Texts of equal length go together; the longest first, so the last passes are short."""
        order = sorted(range(len(token_ids)), key=lambda i: (-len(token_ids[i]), i))
        lengths = [len(token_ids[i]) for i in order]
        return [
            [order[i] for i in one]
            for one in forward_passes(lengths, pads=False, tokens=self._tokens)
        ]

    def submit(self, prepared: Prepared) -> list[Future[Scored]]:
        return [
            self._pool.submit(self._run, [prepared.token_ids[i] for i in chosen])
            for chosen in prepared.passes
        ]

    def _run(self, token_ids: list[list[int]]) -> Scored:
        threads = self._threads.get()
        try:
            batch = TokenBatch.of(token_ids)
            return batch, self._engine.logits(batch, threads)
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
        self.rows = self.bad_rows = 0

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
        bad = f"; {self.bad_rows:,} of them could not be classified, the last column says why"
        bad = bad if self.bad_rows else ""
        speed = f"{self.rows / seconds:,.0f} rows per second"
        return f"{counted(self.rows, 'row')} in {seconds:,.1f} s, {speed}{bad}"


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
        self._tokenize = model.tokenizer.many()
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
        passes = Passes(self._model.engine)
        # One thread each, so that parts are read and written in order, and an output is joined
        # while other parts are still being scored.
        ahead, behind, joining = (ThreadPoolExecutor(1, name) for name in ("read", "write", "join"))
        try:
            self._score(
                self._claimed_parts(claims, passes, joining),
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
                running.append((prepared, passes.submit(prepared)))
                most_running, most_writing = PARTS_IN_PASSES - 1, 1
            following = ahead.submit(next, parts, None)
            # Now the passes of two parts are queued and a third is being prepared, so no core
            # waits for the next text; and not more than that is in memory.
            while len(running) > most_running:
                ended, futures = running.popleft()
                writing.append(write(ended, [future.result() for future in futures]))
                while len(writing) > most_writing:
                    writing.popleft().result()

    def _wait(self, running: Sequence[object], writing: Sequence[object]) -> bool:
        """Whether there is still something to do; waits a moment if others do it."""
        if len(self._done) == len(self.files):
            return False
        if not running and not writing:
            time.sleep(WAIT_SECONDS)
        return True

    def _claimed_parts(
        self, claims: Claims, passes: Passes, joining: ThreadPoolExecutor
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
                yield from self._claimed_of(number, claims, passes)
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

    def _claimed_of(self, file_number: int, claims: Claims, passes: Passes) -> Iterator[Prepared]:
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
                    yield self._prepared(file, number, part, passes)
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

    def _prepared(self, file: FileParts, number: int, part: Part, passes: Passes) -> Prepared:
        tokenizer = self._model.tokenizer
        positions, cleaned, blank = [], [], []
        for position, text in enumerate(part.texts):
            if text is None:
                continue
            clean = tokenizer.clean_all(text)
            if all(texts_in(clean)):
                positions.append(position)
                cleaned.append(clean)
            else:
                blank.append(position)
        token_ids = self._tokenize.token_ids(cleaned) if cleaned else []
        # Backwards, so that the indices of those still to go stay right.
        for i in reversed(self._tokenize.blank if cleaned else []):
            blank.append(positions.pop(i))
            del token_ids[i]
        for position in blank:
            row = file.place(number).rows + position + 1
            part.problems[position] = f"{file.file.path} row {row}: the text is blank"
        if part.problems and not self._keep:
            raise _unusable(part.problems[min(part.problems)])
        part.texts.clear()  # they are in the rows
        return Prepared(file, number, part, positions, token_ids, passes.divide(token_ids))

    def _write(self, claims: Claims, prepared: Prepared, found: Sequence[Scored]) -> None:
        file, part = prepared.file, prepared.part
        num_rows = len(part.rows)
        # (rows, labels). NaN stays where a row has no answer, because its text is blank.
        values = np.full((num_rows, len(self._model.labels)), np.nan)
        familiarity: list[float | None] = [None] * num_rows
        if found:
            # All passes of the part at once: called for each pass, numpy would take most of the
            # time for getting started.
            batches, scores = zip(*found, strict=True)
            batch = TokenBatch(
                np.concatenate([one.ids for one in batches]),
                np.concatenate([one.lengths for one in batches]),
            )
            positions = [prepared.positions[i] for chosen in prepared.passes for i in chosen]
            values[positions], known = self._model.answering.read(
                batch, np.concatenate(scores), self._wanted
            )
            for position, one in zip(positions, known, strict=True):
                familiarity[position] = one
        for position in prepared.positions:
            if not np.isfinite(values[position]).all():
                values[position] = np.nan
                row = file.place(prepared.number).rows + position + 1
                problem = f"{file.file.path} row {row}: the model answers this text with NaN"
                part.problems[position] = problem
        if part.problems and not self._keep:
            raise _unusable(part.problems[min(part.problems)])
        number = self.files.index(file)
        data = self._outs[number].part(part, Answers(values, part.problems, familiarity))
        self._job.outputs.write(file.path(prepared.number), data)
        claims.release(file.path(prepared.number, "claim"))
        self.progress.part_written(file, number, num_rows, len(part.problems))

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


def _unusable(problem: str) -> UserError:
    return UserError(
        f"{problem}; fix it, or keep such rows without a label with --bad_rows keep; then begin "
        "again with --restart",
        code="row-unusable",
    )
