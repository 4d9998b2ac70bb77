"""The loaders under one short name: rows, tokenizer, tokenized rows and the order of batches."""

from training.data.batching import LengthBucketSampler, rank_share
from training.data.dataset import NewsData, load_news
from training.data.tokenized import TokenizedRows, load_tokenizer

__all__ = [
    "LengthBucketSampler",
    "NewsData",
    "TokenizedRows",
    "load_news",
    "load_tokenizer",
    "rank_share",
]
