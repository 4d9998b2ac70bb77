"""The loop over trials: ask Optuna, start a run, report its epochs, prune it, record its end; and
the results.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from common.errors import EXIT_USER_ERROR, TrainingFailure, UserError, first_line
from common.escaping import printable
from common.files import lock_run_folder, write_csv, write_whole
from training.config import TrainConfig
from training.fault_tolerance.interruption import Interruption
from training.monitoring.events import read_metrics
from training.monitoring.records import SMALLER_IS_BETTER, SearchedTrial, score_of
from training.search.processes import Process, Start, command_of, wait_for_earlier_process
from training.search.space import (
    DATABASE,
    Range,
    SearchSpace,
    config_of,
    grid_values,
    import_optuna,
    make_dimensions,
    make_pruner,
    make_sampler,
)

if TYPE_CHECKING:
    from optuna import Study, Trial

# What decides the figures of a trial. Everything else in SPACE.yaml may change when a search is
# resumed.
SAME_ON_RESUME = ("config", "search", "metric", "processes")
POLL_SECONDS = 1.0
MOST_IN_TABLE = 20
_ERROR = re.compile(r"^error: (?P<message>.+) \[(?P<code>[a-z0-9-]+)\]$", re.MULTILINE)


@dataclass
class Running:
    trial: Trial
    config: TrainConfig
    slot: int
    process: Process
    log: Path
    log_start: int  # bytes that earlier starts of the trial have printed
    reported: set[int]  # epochs
    is_pruned: bool = False
    is_stopped: bool = False


def search(space: SearchSpace, start: Start, poll_seconds: float = POLL_SECONDS) -> int:
    """Run the trials that are left and write the results; returns the exit code: 75 if asked to
    stop before the end.

    Raises:
        UserError: the search cannot start or go on as asked.
        TrainingFailure: no trial finished.
    """
    space.output_dir.mkdir(parents=True, exist_ok=True)
    with (
        lock_run_folder(space.output_dir, "output_dir"),
        Interruption(os.EX_TEMPFAIL, is_first=True) as interruption,
    ):
        with _database_errors():
            found = Search(space, open_study(space), start, poll_seconds)
            with interruption.saving():
                found.run(interruption)
            found.write_results()
        if interruption.asked and len(found.results()) < found.num_trials:
            print(
                "Stopped; what the trials have done is saved. To resume, rerun the same command.",
                flush=True,
            )
            return os.EX_TEMPFAIL
    return 0


def open_study(space: SearchSpace) -> Study:
    """Optuna's record of this search, made if there is none; one of other trials is refused."""
    optuna = import_optuna()
    url = space.storage or f"sqlite:///{space.output_dir.absolute() / DATABASE}"
    # A database of one's own may be moved with its folder; another one has many searches in it.
    name = str(space.output_dir.absolute()) if space.storage else "search"
    direction = "minimize" if space.metric in SMALLER_IS_BETTER else "maximize"
    definition = space.model_dump(mode="json", include=set(SAME_ON_RESUME))
    # Only asking needs the sampler. GridSampler would end a loop that is not there when it is told
    # of its last trial.
    resting = optuna.samplers.RandomSampler()
    settings = {"study_name": name, "sampler": resting, "direction": direction}
    settings |= {"pruner": make_pruner(space)}
    storage = optuna.storages.RDBStorage(url)
    study = optuna.create_study(storage=storage, load_if_exists=True, **settings)
    before = study.user_attrs.get("definition", definition)
    if changed := [key for key in definition if before.get(key) != definition[key]]:
        if any(space.output_dir.glob("trial_*/model.run")):
            raise UserError(
                f"{space.output_dir}: was searched with another {' and '.join(changed)}, so "
                "trials cannot be compared; "
                "name another output_dir",
                code="search-changed",
            )
        # The trials were refused, and someone has put that right: nothing was trained yet.
        optuna.delete_study(study_name=name, storage=storage)
        study = optuna.create_study(storage=storage, **settings)
    study.set_user_attr("definition", definition)
    return study


@contextmanager
def _database_errors() -> Iterator[None]:
    import_optuna()
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    # ModuleNotFoundError is that of a database's driver.
    except (StorageInternalError, SQLAlchemyError, ModuleNotFoundError) as error:
        message = (
            f"the database of the trials does not answer ({first_line(error)}); check the "
            "storage, then rerun"
        )
        raise UserError(message, code="search-storage") from error


class Search:
    def __init__(self, space: SearchSpace, study: Study, start: Start, poll_seconds: float) -> None:
        self.space, self.study, self.start, self.poll_seconds = space, study, start, poll_seconds
        self.states = import_optuna().trial.TrialState
        self.dimensions = make_dimensions(space, str(space.output_dir))
        self.running: list[Running] = []
        self.num_trials = space.trials
        if "grid" in space.sampler:
            points = math.prod(len(grid_values(*one)) for one in self.dimensions.items())
            self.num_trials = min(space.trials, points)

    def run(self, interruption: Interruption) -> None:
        space, study = self.space, self.study
        # Trials that an earlier search has left without an end come first.
        unfinished = [trial.number for trial in study.get_trials(states=(self.states.RUNNING,))]
        known = len(study.trials)
        done = f", {known - len(unfinished)} of them done" if known else ""
        what = f"{self.num_trials} trials by validation {space.metric}"
        print(f"Search {space.output_dir}: {what}{done}", flush=True)
        try:
            while True:
                self._begin_as_many_as_fit(unfinished, interruption)
                if not self.running:
                    return
                for running in list(self.running):
                    # Asked once, then followed to its end: the trial saves first, and the next
                    # search resumes it.
                    if interruption.asked and not running.is_stopped:
                        running.is_stopped = True
                        running.process.terminate()
                    self._follow(running)
                time.sleep(self.poll_seconds)
        finally:
            self._stop_all()  # after an error

    def _begin_as_many_as_fit(self, unfinished: list[int], interruption: Interruption) -> None:
        while len(self.running) < self.space.at_once and not interruption.asked:
            if not unfinished and len(self.study.trials) >= self.num_trials:
                return
            self._begin(unfinished.pop(0) if unfinished else None)

    def _begin(self, number: int | None) -> None:
        """Ask for the next trial, or take up the unfinished one with this number, and start its
        run.
        """
        optuna, study = import_optuna(), self.study
        frozen, resting = None if number is None else study.trials[number], study.sampler
        study.sampler = make_sampler(
            self.space, self.dimensions, frozen.number if frozen else len(study.trials)
        )
        # There is no public way to go on with a trial that was asked for before (Optuna 5.0).
        trial = optuna.trial.Trial(study, frozen._trial_id) if frozen else study.ask()
        # Values that were already chosen stay.
        values = {
            name: _suggest(trial, name, dimension) for name, dimension in self.dimensions.items()
        }
        study.sampler = resting
        folder = self.space.output_dir / f"trial_{trial.number:03}"
        folder.mkdir(exist_ok=True)
        config = config_of(self.space, values, folder / "model", f"trial {trial.number}")
        write_whole(folder / "trial.yaml", _given(config))
        if config.run_dir.exists():
            wait_for_earlier_process(config.run_dir, trial.number)
        log = folder / "output.txt"
        log.touch()
        # The lowest free slot decides which cores and GPUs the trial gets.
        slot = min(set(range(self.space.at_once)) - {running.slot for running in self.running})
        reported = set(frozen.intermediate_values) if frozen else set()
        running = Running(trial, config, slot, _Ended(), log, log.stat().st_size, reported)
        # A killed search may have left a trial that is complete, or that was about to be pruned.
        self._prune_if_behind(running)
        if not running.is_pruned and not config.output_dir.exists():
            running.process = self.start(slot, command_of(self.space, folder / "trial.yaml"), log)
        self.running.append(running)

    def _follow(self, running: Running) -> None:
        """Report a trial's new epochs, stop it if it is to be pruned, and record its end."""
        # Before the epochs are read, not after: once it has ended, no epoch can be missing from the
        # file.
        code = running.process.poll()
        self._report(running)
        if code is None:
            return
        self.running.remove(running)
        trial, epochs = running.trial, _epochs(running.config)
        if epochs:
            trial.set_user_attr("epoch", epochs[-1]["epoch"])
            trial.set_user_attr("seconds", epochs[-1]["seconds"])
        # The model folder appears as a whole, when the model is tested. So the trial is complete,
        # also if it was to be pruned or stopped just then.
        if running.config.output_dir.exists() and epochs:
            best = max(epochs, key=lambda epoch: score_of(epoch["validation"], self.space.metric))
            trial.set_user_attr("epoch", best["epoch"])
            self.study.tell(trial, best["validation"][self.space.metric])
        elif running.is_pruned:
            self.study.tell(trial, state=self.states.PRUNED)
        elif running.is_stopped:
            return  # resumed by the next start
        else:
            self._record_failure(running, code)
        self._say(trial.number)

    def _record_failure(self, running: Running, exit_code: int) -> None:
        trial = running.trial
        message, code = _error_of(running, exit_code)
        if exit_code == EXIT_USER_ERROR and code and not self._is_of_this_value(message):
            # Every trial would end the same. This one stays unfinished, to be tried again once that
            # is put right.
            raise UserError(f"trial {trial.number}: {message}", code=code)
        trial.set_user_attr("error", f"{message} [{code}]" if code else message)
        self.study.tell(trial, state=self.states.FAIL)

    def _is_of_this_value(self, message: str) -> bool:
        """Whether a refusal is about a value that is searched, while others could be trained with."""
        is_searched = any(message.startswith(f"--{name} ") for name in self.dimensions)
        return is_searched and any(
            trial.intermediate_values for trial in self.study.get_trials(deepcopy=False)
        )

    def _report(self, running: Running) -> None:
        # Only the ends of epochs, at which trials of any batch size can be compared.
        ends = [epoch for epoch in _epochs(running.config) if epoch["epoch"] == int(epoch["epoch"])]
        new = [epoch for epoch in ends if epoch["epoch"] not in running.reported]
        for epoch in new:
            running.trial.report(epoch["validation"][self.space.metric], epoch["epoch"])
            running.reported.add(epoch["epoch"])
        if new:
            self._prune_if_behind(running)

    def _prune_if_behind(self, running: Running) -> None:
        # After its last epoch a trial has nothing left to save by being pruned.
        last = max(running.reported, default=running.config.epochs)
        if last < running.config.epochs and not running.is_pruned and running.trial.should_prune():
            running.is_pruned = True
            running.process.terminate()

    def _stop_all(self) -> None:
        # All are asked before any is waited for, so that they save at the same time.
        for running in self.running:
            running.process.terminate()
        while any(running.process.poll() is None for running in self.running):
            time.sleep(self.poll_seconds)

    def _say(self, number: int) -> None:
        trials = self.results()
        trial, best = next(one for one in trials if one.number == number), trials[0]
        what = f"{trial.state}{': ' if trial.error else ''}{trial.error}"
        if trial.value is not None:
            what += f" {self.space.metric} {trial.value:.4f} in epoch {trial.epoch}"
        so_far = ""
        if best.state == "finished":
            so_far = f"; best so far: trial {best.number}, {best.value:.4f}"
        print(printable(f"trial {number} {what} ({_listed(trial.values)}){so_far}"), flush=True)

    def results(self) -> list[SearchedTrial]:
        """The trials that have ended, the best first, then the pruned and the failed."""
        # In the order of the table.
        names = {
            self.states.COMPLETE: "finished",
            self.states.PRUNED: "pruned",
            self.states.FAIL: "failed",
        }
        sign = 1 if self.space.metric in SMALLER_IS_BETTER else -1
        trials = [
            SearchedTrial(
                number=one.number,
                state=names[one.state],
                value=one.value if one.state != self.states.FAIL else None,
                epoch=one.user_attrs.get("epoch"),
                seconds=one.user_attrs.get("seconds"),
                values=one.params,
                error=one.user_attrs.get("error", ""),
            )
            for one in self.study.get_trials(states=tuple(names))
        ]
        order = list(names.values())
        return sorted(
            trials, key=lambda one: (order.index(one.state), sign * (one.value or 0), one.number)
        )

    def write_results(self) -> None:
        """Write trials.csv, search.png and best.yaml, and print the table; none without a trial
        that has ended.
        """
        trials, folder, metric = self.results(), self.space.output_dir, self.space.metric
        if not trials:
            return
        self._write_table(trials, folder / "trials.csv")
        best = trials[0]
        if best.state != "finished":
            if len(trials) < self.num_trials:
                return  # stopped before the first of them was done
            raise TrainingFailure(
                f"{folder}: none of the {len(trials)} trials finished; "
                f"{trials[-1].error or 'all were pruned'}",
                code="search-without-result",
            )
        # Here and not at the top, because matplotlib takes a second to import.
        from training.monitoring.plots import LIGHT, draw_search

        searched = self.space.search.items()
        logs = {name for name, values in searched if isinstance(values, Range) and values.log}
        write_whole(folder / "search.png", draw_search(trials, metric, logs, LIGHT))
        config = config_of(self.space, best.values, folder / "best", str(folder))
        write_whole(folder / "best.yaml", _given(config))
        print(
            f"\nBest: trial {best.number}, {metric} {best.value:.4f} on the validation rows "
            f"({_listed(best.values)})\n"
            f"Its model: {folder / f'trial_{best.number:03}' / 'model'}\n"
            f"All trials: {folder / 'trials.csv'}, {folder / 'search.png'}\n"
            f"To train it again: training/run_ddp.sh {self.space.processes} --config "
            f"{shlex.quote(str(folder / 'best.yaml'))}",
            flush=True,
        )

    def _write_table(self, trials: Sequence[SearchedTrial], file: Path) -> None:
        names = ["trial", "state", self.space.metric, "epoch", "seconds", *self.dimensions, "error"]
        rows = []
        for one in trials:
            searched = map(one.values.get, self.dimensions)
            figures = (one.number, one.state, one.value, one.epoch, one.seconds)
            rows.append([*figures, *searched, one.error])
        write_csv(file, names, rows)
        # On the terminal without the errors, which each trial has printed when it ended.
        shown = [names[:-1], *([_text(cell) for cell in row[:-1]] for row in rows[:MOST_IN_TABLE])]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        print()
        for row in shown:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        if len(rows) > MOST_IN_TABLE:
            print(f"and {len(rows) - MOST_IN_TABLE} more in {file}")


class _Ended:
    """The process of a trial that has already ended."""

    def poll(self) -> int | None:
        return 0

    def terminate(self) -> None: ...


def _suggest(trial: Trial, name: str, dimension: Any) -> Any:
    if (choices := getattr(dimension, "choices", None)) is not None:
        return trial.suggest_categorical(name, choices)
    suggest = trial.suggest_int if isinstance(dimension.low, int) else trial.suggest_float
    return suggest(name, dimension.low, dimension.high, step=dimension.step, log=dimension.log)


def _given(config: TrainConfig) -> bytes:
    """The fields that the search has set, as YAML; the others have their defaults."""
    fields = config.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True).encode()


def _epochs(config: TrainConfig) -> list[dict[str, Any]]:
    """The validated epochs of a run; a figure that is not finite counts as the worst one."""
    epochs = [record for record in read_metrics(config.run_dir) if record["kind"] == "epoch"]
    metric = config.best_metric
    for epoch in epochs:
        if epoch["validation"][metric] is None:
            epoch["validation"][metric] = math.inf if metric in SMALLER_IS_BETTER else -math.inf
    return epochs


def _error_of(running: Running, exit_code: int) -> tuple[str, str]:
    """Message and code of a run that has failed."""
    # Only what this start has printed: errors of earlier ones, which somebody has put right since,
    # are in the same file.
    printed = running.log.read_bytes()[running.log_start :].decode(errors="replace")
    if found := _ERROR.search(printed):
        return found["message"], found["code"]
    if exit_code < 0:
        return f"its process was ended by {signal.Signals(-exit_code).name}", "rank-killed"
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return (
        f"{lines[-1] if lines else 'it printed nothing'} (exit code {exit_code}, see "
        f"{running.log})",
        "",
    )


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_text(value)}" for name, value in values.items())


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
