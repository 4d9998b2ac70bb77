"""Classification of pairs: one label for two texts that the model reads together."""

from __future__ import annotations

from training.tasks.classification import Classification


class PairClassification(Classification):
    """Only the rows differ: they have a second text, which the tokenizer puts behind the first."""

    name = "pair"
