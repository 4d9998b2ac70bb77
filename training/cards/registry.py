"""The twelve cards, by their types, in the order of a pipeline."""

from __future__ import annotations

from training.cards.aggregation.aggregate_model import AggregateModel
from training.cards.base import BaseCard
from training.cards.checkpointing.save_checkpoint import SaveCheckpoint
from training.cards.data.load_dataset import LoadDataset
from training.cards.data.prepare_data import PrepareData
from training.cards.distributed.allreduce import AllReduce
from training.cards.distributed.backward import Backward
from training.cards.distributed.forward import Forward
from training.cards.distributed.init_strategy import InitStrategy
from training.cards.distributed.optimizer_step import OptimizerStep
from training.cards.distributed.setup_process_group import SetupProcessGroup
from training.cards.evaluation.evaluate import Evaluate
from training.cards.sharding.shard_data import ShardData

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
