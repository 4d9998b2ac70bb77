from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.model.test_classifier import (
    BATCHES,
    EXACT,
    assert_same,
    batch_of,
    classifier_of,
    gradients,
    save_encoder,
)
from training.config import TrainConfig
from training.distributed.ranks import Ranks
from training.model import attention
from training.model.classifier import NewsClassifier
from training.model.packing import CPU, Packing
from training.parallelism.activation_checkpointing import apply_activation_checkpointing
from training.parallelism.ddp import DDPStrategy

# Neighbours of equal length, which attention takes together, and rows of one token.
LENGTHS = [1, 4, 4, 4, 9, 17, 17, 1]


def packed_and_padded(folder: Path) -> tuple[NewsClassifier, NewsClassifier]:
    packed, padded = classifier_of(folder).train(), classifier_of(folder).train()
    packed.packs_rows = True
    return packed, padded


def assert_equal_steps(one: NewsClassifier, other: NewsClassifier, ids: torch.Tensor, mask: torch.Tensor) -> None:
    found = []
    for model in (one, other):
        model.seed_dropout(seed=1, step=5, first_row=3)
        logits = model(ids, mask)
        found.append((logits, gradients(model, logits)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=EXACT)
    assert_same(found[0][1], found[1][1])


@pytest.mark.parametrize("weights_at_once", [1, 1 << 17])
@pytest.mark.parametrize("architecture", ["distilbert", "bert"])
def test_packed_rows_have_the_logits_gradients_and_dropout_masks_of_padded_ones(
    architecture: str, weights_at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "WEIGHTS_AT_ONCE", weights_at_once)
    packed, padded = packed_and_padded(save_encoder(tmp_path, architecture, dropout=0.3))
    ids, mask = batch_of(LENGTHS)

    assert_equal_steps(packed, padded, ids, mask)

    assert packed.dropout_stream.packing.tokens == sum(LENGTHS)
    assert padded.dropout_stream.packing is None


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("architecture", ["distilbert", "bert"])
def test_recomputed_activations_of_packed_rows_get_the_same_masks(architecture: str, mode: str, tmp_path: Path) -> None:
    packed, padded = packed_and_padded(save_encoder(tmp_path, architecture, dropout=0.2))
    for block in packed.blocks:
        apply_activation_checkpointing(block, mode, packed.dropout_stream)

    assert_equal_steps(packed, padded, *batch_of(LENGTHS))


def test_rows_stay_padded_where_packing_saves_nothing(tmp_path: Path) -> None:
    _, mask = BATCHES["padded"]
    drops, _ = packed_and_padded(save_encoder(tmp_path / "drops", "bert", dropout=0.1))
    never_drops, _ = packed_and_padded(save_encoder(tmp_path / "never", "bert"))

    assert drops._packing(mask, CPU)
    assert drops._packing(None, CPU) is None  # nothing is padded
    assert drops._packing(mask[:1], CPU) is None
    assert drops.eval()._packing(mask, CPU) is None
    assert never_drops._packing(mask, CPU) is None


def test_other_families_stay_padded(tmp_path: Path) -> None:
    packed, padded = packed_and_padded(save_encoder(tmp_path, "roberta", dropout=0.3))

    assert_equal_steps(packed, padded, *batch_of(LENGTHS))

    assert packed.dropout_stream.packing is None


def test_ddp_packs_rows_unless_blocks_are_compiled(tmp_path: Path) -> None:
    ranks = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")
    for compiled in (False, True):
        model = NewsClassifier(4, str(save_encoder(tmp_path / str(compiled), "bert")))
        DDPStrategy(model, TrainConfig(compile=compiled), ranks, "fp32")
        assert model.packs_rows is not compiled


def test_groups_are_consecutive_rows_of_equal_length_up_to_a_limit() -> None:
    _, mask = batch_of([4, 4, 4, 9, 9, 2])

    groups = Packing(mask).groups(tokens_at_once=9)

    assert groups == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5), slice(5, 6)]
