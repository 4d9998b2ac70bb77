"""The twelve cards, by their types, in the order of a pipeline."""

from __future__ import annotations

from learn.cards.aggregation.aggregate_model import AggregateModel
from learn.cards.base import BaseCard
from learn.cards.checkpointing.save_checkpoint import SaveCheckpoint
from learn.cards.data.load_dataset import LoadDataset
from learn.cards.data.prepare_data import PrepareData
from learn.cards.distributed.allreduce import AllReduce
from learn.cards.distributed.backward import Backward
from learn.cards.distributed.forward import Forward
from learn.cards.distributed.init_strategy import InitStrategy
from learn.cards.distributed.optimizer_step import OptimizerStep
from learn.cards.distributed.setup_process_group import SetupProcessGroup
from learn.cards.evaluation.evaluate import Evaluate
from learn.cards.sharding.shard_data import ShardData

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
