"""The loaders under one short name: rows, tokenizer, tokenized rows and the order of batches."""

from training.data.batching import LengthBucketSampler, micro_batches_of_rank
from training.data.dataset import TextData, load_data
from training.data.tokenized import TokenizedRows, load_tokenizer

__all__ = [
    "LengthBucketSampler",
    "TextData",
    "TokenizedRows",
    "load_data",
    "load_tokenizer",
    "micro_batches_of_rank",
]
