"""SPACE.yaml: what a search may vary, read and checked before the first trial."""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Mapping
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from common.errors import UserError, in_one_line, invalid_value, near_names
from training.config import (
    BATCH_SIZE,
    ENVIRONMENT_PREFIX,
    TrainConfig,
    check_fields,
    make_config,
    on_resume,
    read_yaml,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

DATABASE = "trials.db"
SAMPLERS = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "grid": "GridSampler",
    "gp": "GPSampler",
    "qmc": "QMCSampler",
}
PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "hyperband": "HyperbandPruner",
    "halving": "SuccessiveHalvingPruner",
}
# Fields that the search sets itself for each trial.
OURS = ("output_dir", "resume", "checkpoint_dir", "best_metric")
# Fields that change which rows are judged, so that figures of two trials could not be compared.
CHANGE_THE_VALIDATION = (
    *("dataset", "task", "validation_fraction", "duplicates", "max_train_rows", "seed"),
    *("dataset_config", "dataset_revision", "train_split", "validation_split", "test_split"),
)
NOT_LEARNED = ("device", "deterministic", "metric", "best_metric")
MOST_COMBINATIONS = 2000  # of the ends of all ranges and lists, checked before the first trial


class Range(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    low: float
    high: float
    log: bool = False
    step: float | None = Field(None, gt=0)


Values = Annotated[
    Annotated[Range, Tag("range")] | Annotated[list[Any], Tag("list"), Field(min_length=1)],
    Discriminator(lambda given: "list" if isinstance(given, list) else "range"),
]
Named = str | dict[str, dict[str, Any]]


class SearchSpace(BaseModel):
    """What SPACE.yaml may hold. The descriptions are the help texts of the keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: dict[str, Any] = Field(
        {}, description="fields of the training configuration, the same in all trials"
    )
    search: dict[str, Values] = Field(
        description="fields to search: a list, or {low, high}, with log: true or a step",
        min_length=1,
    )
    metric: str = Field(
        "",
        description="the one that decides, at the best epoch on the validation rows, as in "
        "--best_metric; unset = the first of the task",
    )
    trials: int = Field(20, description="how many in all, failed and pruned ones included", ge=1)
    at_once: int = Field(
        1,
        description="trials that run at the same time, each on its share of cores and GPUs",
        ge=1,
    )
    processes: int = Field(1, description="ranks of each trial", ge=1)
    sampler: Named = Field(
        "tpe",
        description=f"{', '.join(SAMPLERS)}; with Optuna's arguments: "
        "{tpe: {n_startup_trials: 5}}",
    )
    pruner: Named = Field(
        "none",
        description=f"{', '.join(PRUNERS)}; with Optuna's arguments: "
        "{median: {n_startup_trials: 3}}",
    )
    seed: int = Field(
        42,
        description="of the sampler; the seed of training is a field of config",
        ge=0,
        lt=2**32,
    )
    storage: str = Field(
        "", description=f"address of a database for Optuna; unset = OUTPUT_DIR/{DATABASE}"
    )
    output_dir: Path = Field(
        Path("checkpoints/search"), description="folder of the search and its trials"
    )


def read_space(path: Path) -> SearchSpace:
    """Read and check a search space, together with the configurations at the ends of its ranges."""
    values = read_yaml(path, str(path))
    try:
        space = SearchSpace.model_validate(values)
    except ValidationError as error:
        raise UserError(
            "; ".join(f"{path}: {_describe(one)}" for one in error.errors()), code="flag-value"
        ) from None
    check_fields(space.config, f"{path}: config")
    check_fields(space.search, f"{path}: search")
    _check_config(space, path)
    _check_searched(space, path)
    dimensions = make_dimensions(space, str(path))
    config = _check_ends(space, dimensions, path)
    # Made only to find out whether Optuna takes their arguments.
    make_sampler(space, dimensions, 0)
    make_pruner(space)
    return space.model_copy(update={"metric": config.best_metric})


def _check_config(space: SearchSpace, path: Path) -> None:
    for name in (name for name in space.config if name in OURS):
        instead = "it follows from the output_dir of the search"
        if name == "best_metric":
            instead = "write it as metric"
        raise UserError(
            f"{path}: config.{name}: every trial has its own; {instead}", code="search-invalid"
        )
    if space.at_once > 1 and space.config.get("metrics_port"):
        raise UserError(
            f"{path}: config.metrics_port and at_once: trials would share it; drop one",
            code="flags-conflict",
        )


def _check_searched(space: SearchSpace, path: Path) -> None:
    for name in space.search:
        if name in space.config:
            raise UserError(
                f"{path}: {name} is in config and in search; drop one", code="flags-conflict"
            )
        if why := _why_not_searched(name):
            raise UserError(f"{path}: search.{name}: {why}", code="search-invalid")
    for name in (*OURS, *space.search):
        # In a run, variables win over the file, so all trials would have the same value.
        if (variable := f"{ENVIRONMENT_PREFIX}{name.upper()}") in os.environ:
            raise UserError(
                f"environment variable {variable}: would be used by all trials; unset it",
                code="flags-conflict",
            )


def _why_not_searched(name: str) -> str:
    if name in CHANGE_THE_VALIDATION:
        return "trials with other validation rows cannot be compared"
    if name in NOT_LEARNED or on_resume(name) == "any":
        return "it does not change what the model learns; set it in config"
    return ""


def _check_ends(
    space: SearchSpace, dimensions: Mapping[str, BaseDistribution], path: Path
) -> TrainConfig:
    """Make the configurations at the ends of all ranges and lists, and return the last of them."""
    # A value between two allowed ones is allowed, so the ends tell whether any trial would be
    # refused. Without this, it would show hours into the search.
    ends = [getattr(one, "choices", None) or (one.low, one.high) for one in dimensions.values()]
    for values in islice(product(*ends), MOST_COMBINATIONS):
        chosen = dict(zip(dimensions, values, strict=True))
        config = config_of(space, chosen, space.output_dir / "any", str(path))
    if not config.validation_fraction:
        raise UserError(
            f"{path}: config.validation_fraction 0: trials are compared on the validation rows; "
            "leave it out",
            code="search-invalid",
        )
    return config


def _describe(problem: Mapping[str, Any]) -> str:
    path = [
        str(part)
        for part in problem["loc"]
        if part not in ("range", "list", "str") and "[" not in str(part)
    ]
    if problem["type"] == "extra_forbidden":
        known = SearchSpace.model_fields if len(path) == 1 else Range.model_fields
        near = near_names(path[-1], known)
        return f"no key {'.'.join(path)!r}{f'; did you mean {near[0]!r}?' if near else ''}"
    what = "is missing" if problem["type"] == "missing" else invalid_value(problem)
    if problem["type"] == "model_type":
        what = "must be a list of values, or {low: ..., high: ...}"
    return f"{'.'.join(path)}: {what}"


def make_dimensions(space: SearchSpace, where: str) -> dict[str, BaseDistribution]:
    """Optuna's distribution of each searched field: whole numbers for fields that are, lists in
    their fields' types.
    """
    optuna = import_optuna()
    dimensions: dict[str, BaseDistribution] = {}
    for name, values in space.search.items():
        try:
            if isinstance(values, list):
                read = [config_of(space, {name: one}, space.output_dir, where) for one in values]
                # Once each, as their field reads them: "32" and 32 are the same choice.
                choices = list(dict.fromkeys(getattr(config, name) for config in read))
                dimensions[name] = optuna.distributions.CategoricalDistribution(choices)
            else:
                dimensions[name] = _numbers(TrainConfig.model_fields[name].annotation, values)
        except ValueError as error:
            raise UserError(
                f"{where}: search.{name}: {in_one_line(error)}", code="search-invalid"
            ) from None
    return dimensions


def _numbers(kind: Any, values: Range) -> BaseDistribution:
    """The distribution of a range, for a field of this type.

    Raises:
        ValueError: the field takes no numbers, or no such ones.
    """
    distributions = import_optuna().distributions
    if kind in (float, float | None):
        return distributions.FloatDistribution(**values.model_dump())
    if kind not in (int, int | None, BATCH_SIZE):
        raise ValueError("takes a list of values, not low and high")
    given = {"low": values.low, "high": values.high, "step": values.step or 1}
    for part, number in given.items():
        if number != int(number):
            raise ValueError(f"{part} must be a whole number")
    whole = {part: int(number) for part, number in given.items()}
    return distributions.IntDistribution(**whole, log=values.log)


def config_of(
    space: SearchSpace, values: Mapping[str, Any], output_dir: Path, where: str
) -> TrainConfig:
    given = {**space.config, **values, "best_metric": space.metric, "output_dir": output_dir}
    origins = dict.fromkeys(space.config, f"{where}: config") | dict.fromkeys(
        values, f"{where}: search"
    )
    try:
        return make_config(given, origins)
    except UserError as error:
        prefix = "" if str(error).startswith(where) else f"{where}: "
        raise UserError(f"{prefix}{error}", code=error.code) from None


def make_sampler(space: SearchSpace, dimensions: Mapping[str, BaseDistribution], trial: int) -> Any:
    """The sampler that chooses the values of a trial.

    A sampler draws random numbers, and one that is made again after a restart would repeat its
    first ones. So every trial has a sampler of its own, seeded by the trial's number: a resumed
    search chooses what it would have chosen.
    """
    name = space.sampler if isinstance(space.sampler, str) else next(iter(space.sampler), "")
    seed = random.Random(f"{space.seed} {trial}").getrandbits(32)
    ours: dict[str, Any] = {"seed": seed}
    if name in ("grid", "qmc"):  # one sequence for the whole search, at the trial's place
        ours["seed"] = space.seed
    if name == "grid":
        ours["search_space"] = {key: grid_values(key, one) for key, one in dimensions.items()}
    return _make(import_optuna().samplers, "sampler", space.sampler, SAMPLERS, ours)


def make_pruner(space: SearchSpace) -> Any:
    epochs = space.config.get("epochs", TrainConfig.model_fields["epochs"].default)
    name = space.pruner if isinstance(space.pruner, str) else next(iter(space.pruner), "")
    # Otherwise Optuna waits for a complete trial to know it.
    is_known = name == "hyperband" and "epochs" not in space.search
    longest = {"max_resource": int(epochs)} if is_known else {}
    return _make(import_optuna().pruners, "pruner", space.pruner, PRUNERS, longest)


def _make(
    module: Any, key: str, named: Named, classes: Mapping[str, str], ours: Mapping[str, Any]
) -> Any:
    # One name, alone or as the only key of its arguments.
    [(name, arguments), *more] = (
        [(named, {})] if isinstance(named, str) else named.items() or [("", {})]
    )
    if name not in classes or more:
        raise UserError(f"{key} {name}: must be one of {', '.join(classes)}", code="search-invalid")
    made = getattr(module, classes[name])
    ours_alone = ("seed", "search_space")
    known = [one for one in inspect.signature(made).parameters if one not in ours_alone]
    if unknown := [one for one in arguments if one not in known]:
        raise UserError(
            f"{key} {name}: no argument {unknown[0]!r}; Optuna knows {', '.join(known)}",
            code="search-invalid",
        )
    try:
        return made(**{**ours, **arguments})
    except (ValueError, TypeError, ImportError) as error:  # Optuna's: some samplers need a package
        code = "package-missing" if isinstance(error, ImportError) else "search-invalid"
        raise UserError(f"{key} {name}: {in_one_line(error)}", code=code) from None


def grid_values(name: str, dimension: Any) -> list[Any]:
    if (choices := getattr(dimension, "choices", None)) is not None:
        return list(choices)
    if dimension.step is None or dimension.log:
        raise UserError(
            f"sampler grid: search.{name} needs a list of values, or a step", code="search-invalid"
        )
    # Each value is computed from the first one. Adding up the step would add up its rounding
    # errors.
    count = round((dimension.high - dimension.low) / dimension.step) + 1
    return [type(dimension.low)(dimension.low + i * dimension.step) for i in range(count)]


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError(
            'Optuna is not installed: pip install "distrinews[search]"', code="package-missing"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
