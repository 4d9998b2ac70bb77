"""The twelve cards, by their types, in the order of a pipeline."""

from __future__ import annotations

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
# Repeated in this order, they are the training loop.
LOOP = (Forward.card_type, Backward.card_type, AllReduce.card_type, OptimizerStep.card_type)
