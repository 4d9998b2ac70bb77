"""The twelve cards, by their types, in the order of a pipeline, and cards of the user's own."""

from __future__ import annotations

from pathlib import Path

from common.errors import UserError, first_line
from common.own_code import import_by_path
from learn.cards.base import BaseCard
from learn.cards.data import LoadDataset, PrepareData, ShardData
from learn.cards.strategy import InitStrategy, SetupProcessGroup
from learn.cards.trained_model import AggregateModel, Evaluate, SaveCheckpoint
from learn.cards.training_step import AllReduce, Backward, Forward, OptimizerStep

CARDS: dict[str, BaseCard] = {
    card.card_type: card
    for card in (
        LoadDataset(),
        PrepareData(),
        ShardData(),
        InitStrategy(),
        SetupProcessGroup(),
        Forward(),
        Backward(),
        AllReduce(),
        OptimizerStep(),
        SaveCheckpoint(),
        AggregateModel(),
        Evaluate(),
    )
}


def load_card(name: str, where: str, *folders: Path) -> BaseCard:
    """A card of the user's own, by its import path, ``module:name``.

    Args:
        name: the import path.
        where: begins the error message.
        folders: in which its module is looked for, after the installed packages and the working
            directory.

    Raises:
        UserError: it cannot be imported, or is not a card.
    """
    card_class = import_by_path(name, where, "my_cards:ClipGradients", folders)
    if not (isinstance(card_class, type) and issubclass(card_class, BaseCard)):
        problem = "must be a class that derives from learn.cards.base.BaseCard"
        raise UserError(f"{where}: {problem}", code="own-code")
    if missing := sorted(card_class.__abstractmethods__):
        raise UserError(f"{where}: the class lacks {' and '.join(missing)}", code="own-code")
    if getattr(card_class, "execution_mode", None) not in ("local", "distributed"):
        problem = "the class must set execution_mode to 'local' or 'distributed'"
        raise UserError(f"{where}: {problem}", code="own-code")
    if card_class.in_training_loop and card_class.execution_mode == "local":
        problem = "a card of the training loop must be 'distributed'"
        raise UserError(f"{where}: {problem}", code="own-code")
    try:
        card = card_class()
        card.config_schema.model_json_schema()
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        problem = f"the class or its config_schema cannot be used ({what})"
        raise UserError(f"{where}: {problem}", code="own-code") from error
    card.card_type = name
    return card


def named_card(card_type: str) -> BaseCard:
    """One of the twelve, or a card that this process's parent has found by its import path."""
    return CARDS.get(card_type) or load_card(card_type, f"card {card_type}")
