from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BigBirdConfig,
    DistilBertConfig,
    MPNetConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    SqueezeBertConfig,
    XLNetConfig,
)

from common.errors import UserError
from tests.processes import here
from training.config import TrainConfig
from training.data.batching import MicroBatch
from training.model.classifier import LABEL_MAP, NewsClassifier, try_unknown_family
from training.model.dropout import RowDropout
from training.parallelism.activation_checkpointing import apply_activation_checkpointing
from training.parallelism.registry import STRATEGIES
from training.run.step import optimizer_step
from training.tasks import Classification

TOLERANCE = 1e-6  # fp32, weights of the usual size
EXACT = 1e-10  # fp64, where only another computation could differ by more
NEVER_DROPS = 1e-9  # rounds to nothing dropped, yet takes the way that training takes
BERT_SIZE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
}
DISTILBERT_SIZE = {
    "vocab_size": 96,
    "dim": 32,
    "hidden_dim": 64,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
}


def encoder_config(architecture: str, dropout: float = 0.0) -> PreTrainedConfig:
    if architecture == "distilbert":
        rates = {"dropout": dropout, "attention_dropout": dropout, "seq_classif_dropout": dropout}
        return DistilBertConfig(**DISTILBERT_SIZE, **rates)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return {"bert": BertConfig, "roberta": RobertaConfig}[architecture](**BERT_SIZE, **rates)


def save_encoder(folder: Path, architecture: str, dropout: float = 0.0) -> Path:
    torch.manual_seed(7)
    config = encoder_config(architecture, dropout)
    config.id2label = LABEL_MAP
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def batch_of(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, 96, mask.shape, generator=generator) * mask
    return ids, mask


BATCHES = {"padded": batch_of([17, 9, 3, 12, 17]), "unpadded": batch_of([11, 11, 11, 11])}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On matrices this small threads wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=sorted(BATCHES))
def batch(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor]:
    return BATCHES[request.param]


def classifier_of(folder: Path) -> NewsClassifier:
    return NewsClassifier(4, str(folder)).double()


def own_forward(folder: Path) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").double()


def gradients(model: torch.nn.Module, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    labels = torch.arange(len(logits)) % logits.shape[1]
    torch.nn.functional.cross_entropy(logits, labels).backward()
    return {
        name.removeprefix("network."): torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = EXACT) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("architecture", ["distilbert", "bert", "roberta"])
def test_logits_and_every_gradient_equal_transformers_own_in_eval(
    architecture: str, batch: tuple[torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    folder = save_encoder(tmp_path, architecture)
    classifier, reference = classifier_of(folder).eval(), own_forward(folder).eval()

    logits, expected = classifier(*batch), reference(input_ids=batch[0], attention_mask=batch[1]).logits

    torch.testing.assert_close(logits, expected, rtol=0, atol=EXACT)
    assert_same(gradients(classifier, logits), gradients(reference, expected))


@pytest.mark.parametrize("architecture", ["distilbert", "bert", "roberta"])
@pytest.mark.parametrize("dropout", [0.0, NEVER_DROPS])
def test_logits_and_every_gradient_equal_transformers_own_in_training_without_dropout(
    architecture: str, dropout: float, batch: tuple[torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    classifier = classifier_of(save_encoder(tmp_path / "ours", architecture, dropout)).train()
    reference = own_forward(save_encoder(tmp_path / "theirs", architecture)).train()

    logits, expected = classifier(*batch), reference(input_ids=batch[0], attention_mask=batch[1]).logits

    torch.testing.assert_close(logits, expected, rtol=0, atol=EXACT)
    assert_same(gradients(classifier, logits), gradients(reference, expected))


@pytest.mark.parametrize("training", [False, True])
def test_in_fp32_logits_and_gradients_of_the_tiny_model_equal_transformers_own(training: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    classifier = NewsClassifier(pretrained_model="tiny", vocab_size=96).train(training)
    classifier.network.save_pretrained(tmp_path)
    reference = own_forward(tmp_path).float().train(training)
    for module in [*classifier.modules(), *reference.modules()]:
        if isinstance(module, torch.nn.Dropout | RowDropout):
            module.p = NEVER_DROPS if isinstance(module, RowDropout) else 0.0
    ids, mask = BATCHES["padded"]

    logits, expected = classifier(ids, mask), reference(input_ids=ids, attention_mask=mask).logits

    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
    assert_same(gradients(classifier, logits), gradients(reference, expected), TOLERANCE)


@pytest.mark.parametrize("architecture", ["distilbert", "bert"])
def test_known_architectures_take_the_first_token_path(architecture: str, tmp_path: Path) -> None:
    classifier = NewsClassifier(4, str(save_encoder(tmp_path, architecture)))
    whole_calls: list[int] = []
    classifier.network.register_forward_hook(lambda *_: whole_calls.append(1))

    classifier(*BATCHES["padded"])

    assert not whole_calls


@pytest.mark.parametrize("architecture", ["distilbert", "bert", "roberta"])
def test_padding_does_not_change_a_rows_logits(architecture: str, tmp_path: Path) -> None:
    classifier = classifier_of(save_encoder(tmp_path, architecture)).eval()
    ids, mask = BATCHES["padded"]

    together = classifier(ids, mask)

    alone = [classifier(ids[i : i + 1, :length], mask[i : i + 1, :length]) for i, length in enumerate(mask.sum(dim=1))]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=EXACT)


@pytest.mark.parametrize("architecture", ["distilbert", "bert", "roberta"])
def test_a_batch_without_padding_needs_no_mask(architecture: str, tmp_path: Path) -> None:
    classifier = classifier_of(save_encoder(tmp_path, architecture)).eval()
    ids, mask = BATCHES["padded"]
    length = int(mask.sum(dim=1).min())
    ids, mask = ids[:, :length], mask[:, :length]

    assert torch.equal(classifier(ids, None), classifier(ids, mask))


@pytest.mark.parametrize("architecture", ["distilbert", "bert", "roberta"])
def test_state_dict_keeps_transformers_names(architecture: str, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, architecture)

    names = NewsClassifier(4, str(folder)).state_dict().keys()

    assert {name.removeprefix("network.") for name in names} == own_forward(folder).state_dict().keys()
    assert all(name.startswith("network.") for name in names)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("architecture", ["distilbert", "bert", "roberta"])
def test_activation_checkpointing_gives_equal_gradients_though_dropout_has_moved_on(
    architecture: str, mode: str, tmp_path: Path
) -> None:
    folder = save_encoder(tmp_path, architecture, dropout=0.2)
    plain, checkpointed = classifier_of(folder).train(), classifier_of(folder).train()
    for block in checkpointed.blocks:
        apply_activation_checkpointing(block, mode, checkpointed.dropout_stream)
    found = []

    for model in (plain, checkpointed):
        model.seed_dropout(seed=1, step=5, first_row=0)
        logits = model(*BATCHES["padded"])
        model.seed_dropout(seed=1, step=6, first_row=40)
        found.append((logits, gradients(model, logits)))

    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=EXACT)
    assert_same(found[1][1], found[0][1])


@pytest.mark.parametrize("architecture", ["distilbert", "bert", "roberta"])
def test_dropout_of_part_of_a_batch_is_that_of_the_whole_batch(architecture: str, tmp_path: Path) -> None:
    classifier = classifier_of(save_encoder(tmp_path, architecture, dropout=0.3)).train()
    ids, mask = BATCHES["padded"]
    classifier.seed_dropout(seed=1, step=5, first_row=0)
    whole = classifier(ids, mask)

    classifier.seed_dropout(seed=1, step=5, first_row=2)
    share = classifier(ids[2:], mask[2:])

    torch.testing.assert_close(share, whole[2:], rtol=0, atol=EXACT)


def test_attention_dropout_reaches_the_logits(tmp_path: Path) -> None:
    config = DistilBertConfig(**DISTILBERT_SIZE, dropout=0.0, attention_dropout=0.5, seq_classif_dropout=0.0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    classifier = NewsClassifier(4, str(tmp_path)).train()

    classifier.seed_dropout(seed=1, step=1, first_row=0)
    first = classifier(*BATCHES["padded"])
    classifier.seed_dropout(seed=1, step=2, first_row=0)
    second = classifier(*BATCHES["padded"])

    assert not torch.allclose(first, second, atol=1e-3)


def test_every_dropout_of_the_network_is_replaced_by_row_dropout(tmp_path: Path) -> None:
    classifier = NewsClassifier(4, str(save_encoder(tmp_path, "bert", dropout=0.1)))

    places = [module for module in classifier.modules() if isinstance(module, torch.nn.Dropout | RowDropout)]

    assert places
    assert all(isinstance(place, RowDropout) for place in places)
    assert len({place.site for place in places}) == len(places)


def test_predict_gives_the_most_probable_class_and_restores_the_mode(tmp_path: Path) -> None:
    classifier = NewsClassifier(4, str(save_encoder(tmp_path, "distilbert", dropout=0.5)))
    expected = classifier.eval()(*BATCHES["padded"]).argmax(dim=1)
    classifier.train()

    predicted = classifier.predict(*BATCHES["padded"])

    assert predicted.tolist() == expected.tolist()
    assert predicted.dtype == torch.int64
    assert classifier.training


def test_labels_are_those_of_ag_news_by_default() -> None:
    classifier = NewsClassifier(pretrained_model="tiny", vocab_size=64)

    assert LABEL_MAP == {0: "World", 1: "Sports", 2: "Business", 3: "Sci/Tech"}
    assert [classifier.get_label_name(i) for i in range(4)] == list(LABEL_MAP.values())
    assert classifier.network.config.id2label == LABEL_MAP


def test_other_labels_are_kept_by_name_and_number() -> None:
    classifier = NewsClassifier(3, "tiny", ["calm", "mixed", "stormy"], vocab_size=96)

    assert classifier.get_label_name(2) == "stormy"
    assert classifier.network.config.label2id == {"calm": 0, "mixed": 1, "stormy": 2}
    assert classifier(*BATCHES["unpadded"]).shape == (4, 3)


def test_a_head_of_another_size_is_initialised_and_the_encoder_kept(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, "distilbert")

    classifier = NewsClassifier(7, str(folder)).double()

    assert classifier(*BATCHES["padded"]).shape == (5, 7)
    encoder = own_forward(folder).distilbert.state_dict()
    assert_same(classifier.network.distilbert.state_dict(), encoder)


# RoBERTa's first positions, up to the id of the padding, are no token's.
@pytest.mark.parametrize(("architecture", "reserved"), [("bert", 0), ("roberta", 2)])
def test_max_positions_is_what_a_text_can_use(architecture: str, reserved: int, tmp_path: Path) -> None:
    assert NewsClassifier(4, str(save_encoder(tmp_path, architecture))).max_positions == 40 - reserved


OTHER_FAMILIES = {
    "mpnet": MPNetConfig(**BERT_SIZE),
    "squeezebert": SqueezeBertConfig(**BERT_SIZE, embedding_size=32),
    "big_bird": BigBirdConfig(**BERT_SIZE, attention_type="original_full"),
    "xlnet": XLNetConfig(vocab_size=96, d_model=32, n_layer=2, n_head=4, d_inner=64),
}


def other_classifier(family: str) -> NewsClassifier:
    torch.manual_seed(7)
    config = OTHER_FAMILIES[family]
    config.num_labels = 4
    classifier = NewsClassifier.__new__(NewsClassifier)
    torch.nn.Module.__init__(classifier)
    classifier._adopt(AutoModelForSequenceClassification.from_config(config), Classification(list("abcd")))
    return classifier


@pytest.mark.parametrize("family", ["mpnet", "squeezebert", "big_bird"])
def test_padding_changes_nothing_in_families_with_their_own_attention(family: str) -> None:
    model = other_classifier(family).eval()
    ids, mask = batch_of([6, 14])

    with torch.no_grad():
        together, alone = model(ids, mask)[:1], model(ids[:1, :6], mask[:1, :6])

    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_a_family_that_reads_padding_is_refused_before_training() -> None:
    ids, _ = batch_of([6])

    with pytest.raises(UserError, match=r"^--model acme/x: xlnet reads padding, which changes a row's logits by"):
        try_unknown_family(other_classifier("xlnet"), "--model acme/x", ids)


@pytest.mark.parametrize("family", ["mpnet", "big_bird"])
def test_trying_a_family_leaves_weights_mode_and_random_states_as_they_are(family: str) -> None:
    model = other_classifier(family).train()
    weights, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()

    unused = try_unknown_family(model, family, batch_of([6])[0])

    assert unused == {"mpnet": [], "big_bird": ["bert.pooler.weight", "bert.pooler.bias"]}[family]
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])


def _two_steps(family: str) -> float:
    model = other_classifier(family)
    try_unknown_family(model, family, batch_of([6])[0])
    strategy = STRATEGIES["ddp"](model, TrainConfig(device="cpu", precision="fp32"), here(), "fp32")
    ids, mask = batch_of([6, 9])
    batch = MicroBatch(ids, mask, torch.tensor([0, 1]), torch.full((2,), 0.25), np.arange(2), here().rank * 2, 4)
    return [float(optimizer_step(strategy, [batch], step, 1e-3).loss) for step in (1, 2)][-1]


@pytest.mark.slow
def test_a_family_with_unused_parameters_trains_on_two_ranks(
    run_on_ranks: Callable[..., list[float]],
) -> None:
    losses = run_on_ranks(2, _two_steps, "big_bird")

    assert all(math.isfinite(loss) for loss in losses)


def test_no_code_that_a_local_folder_names_runs_when_training_starts_from_it(tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    NewsClassifier(pretrained_model="tiny", vocab_size=64).network.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    code = {"auto_map": {"AutoConfig": "evil.Config"}, "attn_implementation": "somebody/kernels"}
    (folder / "config.json").write_text(json.dumps(config | code))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert NewsClassifier(pretrained_model=str(folder)).max_positions == 512
    assert not (tmp_path / "ran").exists()
