"""Model FLOPs utilization: the operations of a language model's tokens over those of the devices."""

from __future__ import annotations

import pytest
import torch
from transformers import DistilBertConfig, DistilBertForMaskedLM, LlamaConfig, LlamaForCausalLM

from training.distributed.group import join_ranks
from training.model.classifier import NewsClassifier
from training.run.utilization import flops_per_token, peak_flops, peak_of_device
from training.tasks import MASKED_SHARE, CausalLanguageModel, MaskedLanguageModel

VOCABULARY, WIDTH, WIDE, BLOCKS, LENGTH = 100, 16, 40, 3, 32
ATTENTION = 12 * BLOCKS * WIDTH * LENGTH  # its scores, and what they weigh, forward and backward


def test_a_token_costs_six_operations_for_each_weight_that_multiplies_it_and_attention() -> None:
    sizes = {"num_hidden_layers": BLOCKS, "num_attention_heads": 2, "intermediate_size": WIDE}
    network = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, **sizes))
    block = 4 * WIDTH**2 + 3 * WIDTH * WIDE

    found = flops_per_token(NewsClassifier.around(network, CausalLanguageModel([])), LENGTH)

    assert found == 6 * (BLOCKS * block + VOCABULARY * WIDTH) + ATTENTION


def test_a_table_that_is_also_the_head_multiplies_for_what_is_predicted_but_positions_do_not() -> None:
    sizes = {"dim": WIDTH, "hidden_dim": WIDE, "n_layers": BLOCKS, "n_heads": 2, "max_position_embeddings": 64}
    network = DistilBertForMaskedLM(DistilBertConfig(vocab_size=VOCABULARY, **sizes))
    block = 4 * WIDTH**2 + 2 * WIDTH * WIDE

    found = flops_per_token(NewsClassifier.around(network, MaskedLanguageModel([])), LENGTH)

    assert found == 6 * (BLOCKS * block + WIDTH**2 + MASKED_SHARE * VOCABULARY * WIDTH) + ATTENTION


def test_the_peak_of_a_known_gpu_is_that_of_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")

    assert peak_of_device(torch.device("cuda"), "bf16") == 989e12


def test_the_peak_of_a_processor_is_measured_and_that_of_all_ranks_added_up() -> None:
    with join_ranks("cpu") as ranks:
        assert peak_flops(ranks, "fp32") > 1e8
