from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.batching.page import render
from benchmarks.batching.passes import ONE_TEXT, lay_out, padding
from benchmarks.batching_curve import measure_round
from common.text import TextTokenizer
from tests.inference.stand_in_engine import StandInEngine

SIZES = [ONE_TEXT, 64, 512]
TEXTS = [f"w{i} " * (1 + i % 20) for i in range(60)]


class StandInModel:
    def __init__(self, engine: StandInEngine) -> None:
        self.engine = engine
        self.max_length = 24
        self.tokens_per_second = None
        tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)}, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self.tokenizer = TextTokenizer(tokenizer, self.max_length)


@pytest.mark.parametrize(("num_slots", "pads"), [(2, False), (1, True)])
def test_a_measured_engine_gets_a_page_with_what_follows(num_slots: int, pads: bool) -> None:
    model = StandInModel(StandInEngine(num_slots=num_slots, pads=pads))
    token_ids = [np.array(one.ids, np.int32) for one in model.tokenizer.encode(TEXTS)]
    section = {
        "facts": {"Measured": "now"},
        "model": "small",
        "engine": "stand-in",
        "pads": pads,
        "num_slots": num_slots,
        "max_length": 24,
        "mean_length": 10.0,
        "dataset": "words",
        "seconds": 0.01,
        "defaults": {"max_batch_tokens": 512, "length_window": 64},
        "budgets": SIZES,
        "windows": [8, 16] if pads else [],
        "rounds": [],
    }
    for _ in range(2):
        measure_round(model, token_ids, TEXTS, section, 0.01, "round")
    page = render({"small, stand-in": section})
    assert "## small, stand-in" in page
    assert "`max_batch_tokens`: " in page
    assert ("### Near lengths" in page) == ("`length_window`: " in page) == pads
    assert ("A text alone takes" in page) == (num_slots > 1)
    assert "ait pays: " in page


def test_passes_are_laid_out_within_their_tokens() -> None:
    token_ids = [np.zeros(1 + i % 20, np.int32) for i in range(60)]
    for batch in lay_out(token_ids, 64, pads=False, window=8):
        assert len(batch.ids) <= 64
    padded = lay_out(token_ids, 64, pads=True, window=32)
    assert all(len(batch.lengths) * batch.lengths.max() <= 64 for batch in padded)
    assert 0 <= padding(padded) <= 0.25
    assert [len(batch.lengths) for batch in lay_out(token_ids, ONE_TEXT, pads=True, window=8)] == [1] * 60
