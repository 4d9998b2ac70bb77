from __future__ import annotations

import numpy as np
import pytest
import torch

from common.text import TextTokenizer
from training.data.batching import (
    DataShard,
    LengthBucketSampler,
    MicroBatch,
    Padding,
    Targets,
    micro_batches_of_rank,
    pad,
)
from training.data.dataset import load_data
from training.data.teacher import TeacherAnswers
from training.data.tokenized import TokenizedRows, encode_rows, load_tokenizer
from training.model.architectures import mask_of


def random_rows(count: int, seed: int = 0) -> TokenizedRows:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, 40, count)
    ids = generator.integers(1, 500, lengths.sum()).astype(np.int32)
    return TokenizedRows(ids, np.concatenate([[0], np.cumsum(lengths)]), generator.integers(0, 4, count), num_cut=0)


@pytest.fixture(scope="module")
def sample_rows() -> TokenizedRows:
    data = load_data("sample")
    tokenizer = load_tokenizer("tiny", data.train.texts, 128).backend_tokenizer.to_str()
    return encode_rows(TextTokenizer.from_json(tokenizer, 128), data.train)


def epoch(lengths: np.ndarray, size: int, seed: int, number: int) -> list[list[int]]:
    sampler = LengthBucketSampler(lengths, size, seed)
    sampler.set_epoch(number)
    return [batch.tolist() for batch in sampler]


@pytest.mark.parametrize(("count", "size"), [(1, 1), (7, 8), (100, 8), (1000, 16), (1600, 16)])
def test_each_row_comes_once_an_epoch(count: int, size: int) -> None:
    lengths = random_rows(count).lengths

    batches = epoch(lengths, size, seed=1, number=1)

    assert sorted(row for batch in batches for row in batch) == list(range(count))
    assert len(batches) == len(LengthBucketSampler(lengths, size, 1)) == -(-count // size)
    assert sorted(map(len, batches), reverse=True)[:-1] == [size] * (len(batches) - 1)


def test_the_order_is_a_function_of_seed_epoch_and_global_batch_size() -> None:
    lengths = random_rows(500).lengths
    first = epoch(lengths, 16, seed=1, number=1)
    np.random.seed(99)
    torch.manual_seed(99)

    assert epoch(lengths, 16, seed=1, number=1) == first
    assert epoch(lengths, 16, seed=2, number=1) != first
    assert epoch(lengths, 16, seed=1, number=2) != first
    assert epoch(lengths, 8, seed=1, number=1) != first


def test_epochs_do_not_depend_on_those_before() -> None:
    sampler = LengthBucketSampler(random_rows(200).lengths, 16, seed=3)
    for number in (1, 2):
        sampler.set_epoch(number)
        list(sampler)

    sampler.set_epoch(3)

    assert [batch.tolist() for batch in sampler] == epoch(sampler.lengths, 16, seed=3, number=3)


def test_balanced_sampling_draws_as_many_rows_of_each_label_and_every_rare_row_before_one_repeats() -> None:
    labels = np.array([0] * 90 + [1] * 7 + [2] * 3)
    lengths = random_rows(100).lengths
    sampler = LengthBucketSampler(lengths, 8, 1, labels)

    def drawn(number: int) -> list[list[int]]:
        sampler.set_epoch(number)
        return [batch.tolist() for batch in sampler]

    for number in (1, 2, 3):
        rows = np.concatenate(drawn(number))
        counts, times = np.bincount(labels[rows]), np.bincount(rows, minlength=100)
        assert len(rows) == 100
        assert counts.max() - counts.min() <= 1
        assert times[:90].max() == 1
        assert all(of_label.max() - of_label.min() <= 1 for of_label in (times[90:97], times[97:]))
    assert drawn(1) == drawn(1) != drawn(2)
    assert all((np.diff(lengths[batch]) >= 0).all() for batch in map(np.array, drawn(1)))


def test_class_weights_give_the_weighted_mean_whatever_the_shares() -> None:
    rows = random_rows(40)
    batch, class_weights = np.arange(5, 38), np.array([1.0, 4.0, 0.5, 2.0])
    expected = class_weights[rows.labels[batch]] / class_weights[rows.labels[batch]].sum()

    for size, stages in ((1, 1), (3, 1), (2, 2)):
        found: dict[int, float] = {}
        for rank in range(size):
            shard, targets = DataShard(rank, size, stages=stages), Targets(class_weights=class_weights)
            for part in micro_batches_of_rank(rows, batch, shard, 2, targets=targets):
                real = part.rows >= 0
                found |= dict(zip(part.rows[real].tolist(), part.weights[real].tolist(), strict=True))
                assert not part.weights[~real].any()
        assert found == pytest.approx(dict(zip(batch.tolist(), expected.tolist(), strict=True)))


def test_the_longest_row_is_in_the_first_batch() -> None:
    lengths = random_rows(500).lengths

    first, *_ = epoch(lengths, 16, seed=1, number=1)

    assert lengths[first].max() == lengths.max()


def test_batches_of_like_length_do_not_come_in_order_of_length() -> None:
    lengths = random_rows(3000).lengths

    means = np.array([lengths[batch].mean() for batch in epoch(lengths, 16, seed=1, number=1)])

    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3


@pytest.mark.parametrize("size", [16, 32, 64])
def test_padding_wastes_less_than_12_percent_on_the_sample(sample_rows: TokenizedRows, size: int) -> None:
    lengths = sample_rows.lengths

    padded = sum(lengths[batch].max() * len(batch) for batch in epoch(lengths, size, seed=42, number=1))

    assert 1 - lengths.sum() / padded < 0.12


def shares(rows: TokenizedRows, batch: np.ndarray, world_size: int, accumulation: int) -> list[MicroBatch]:
    parts = (
        micro_batches_of_rank(rows, batch, DataShard(rank, world_size), accumulation) for rank in range(world_size)
    )
    return [micro_batch for part in parts for micro_batch in part]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("size", [32, 31, 13])
def test_the_shares_of_all_ranks_are_the_global_batch(world_size: int, accumulation: int, size: int) -> None:
    rows = random_rows(200)
    batch = np.random.default_rng(5).permutation(200)[:size]
    whole_ids, whole_mask = pad(rows, batch, int(rows.lengths[batch].max()))

    found = [share for share in shares(rows, batch, world_size, accumulation) if share.rows[0] >= 0]

    assert np.concatenate([share.rows for share in found]).tolist() == batch.tolist()
    assert torch.equal(torch.cat([share.input_ids for share in found]), whole_ids)
    masks = [mask_of(share.input_ids, share.attention_mask) for share in found]
    assert torch.equal(torch.cat(masks), mask_of(whole_ids, whole_mask))
    assert torch.cat([share.labels for share in found]).tolist() == rows.labels[batch].tolist()
    starts = np.cumsum([0, *(len(share.rows) for share in found)])[:-1]
    assert [share.first_row for share in found] == starts.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("size", [32, 13, 5, 1])
def test_weights_sum_to_one_over_all_ranks(world_size: int, accumulation: int, size: int) -> None:
    rows = random_rows(64)

    found = shares(rows, np.arange(size), world_size, accumulation)

    assert len(found) == world_size * accumulation
    assert sum(share.weights.sum().item() for share in found) == pytest.approx(1, abs=1e-6)
    assert sum(share.num_tokens for share in found) == rows.lengths[:size].sum()


def test_no_rank_has_over_one_row_more_than_another() -> None:
    for size in range(4, 40):
        counts = [int((share.rows >= 0).sum()) for share in shares(random_rows(64), np.arange(size), 4, 1)]

        assert max(counts) - min(counts) <= 1


def test_a_rank_without_rows_gets_a_stand_in_that_weighs_nothing() -> None:
    found = shares(random_rows(64), np.array([7]), world_size=4, accumulation=1)

    stand_ins = [share for share in found if share.rows[0] < 0]
    assert len(stand_ins) == 3
    for share in stand_ins:
        assert share.input_ids.shape[0] == 1
        assert share.weights.tolist() == [0.0]
        assert share.num_tokens == 0


def test_the_summed_shares_give_the_whole_batchs_gradient() -> None:
    rows, batch = random_rows(64), np.arange(13)
    table = torch.randn(500, 4)

    def gradient(world_size: int, accumulation: int) -> torch.Tensor:
        weight = table.clone().requires_grad_()
        for share in shares(rows, batch, world_size, accumulation):
            mask = mask_of(share.input_ids, share.attention_mask)
            logits = (weight[share.input_ids] * mask[..., None]).sum(dim=1)
            losses = torch.nn.functional.cross_entropy(logits, share.labels, reduction="none")
            (losses * share.weights).sum().backward()
        return weight.grad

    whole = gradient(1, 1)

    torch.testing.assert_close(gradient(4, 1), whole)
    torch.testing.assert_close(gradient(2, 3), whole)
    torch.testing.assert_close(gradient(4, 5), whole)


@pytest.mark.parametrize("multiple", [1, 8])
def test_all_ranks_pad_to_the_same_length(multiple: int) -> None:
    rows, batch = random_rows(64), np.arange(30)

    lengths = {
        share.input_ids.shape[1]
        for rank in range(4)
        for share in micro_batches_of_rank(rows, batch, DataShard(rank, 4), 2, padding=Padding(multiple))
    }

    (length,) = lengths
    assert length % multiple == 0
    assert 0 <= length - rows.lengths[batch].max() < multiple


def test_pad_keeps_every_id_and_masks_the_rest() -> None:
    rows = random_rows(20)

    ids, mask = pad(rows, np.array([4, 0, 19]), 50)

    for row, index in enumerate([4, 0, 19]):
        expected = rows.ids[rows.offsets[index] : rows.offsets[index + 1]].tolist()
        assert ids[row][mask[row] == 1].tolist() == expected
        assert mask[row].tolist() == [1] * len(expected) + [0] * (50 - len(expected))
        assert ids[row][len(expected) :].sum() == 0


def test_without_padding_there_is_no_mask() -> None:
    rows = random_rows(20)
    longest = int(rows.lengths.argmax())

    assert pad(rows, np.array([longest, longest]), int(rows.lengths[longest]))[1] is None
    assert pad(rows, np.array([longest, longest]), int(rows.lengths[longest]) + 1)[1] is not None
    (share,) = micro_batches_of_rank(rows, np.array([longest]), DataShard(0, 1))
    assert share.attention_mask is None


def test_a_rough_copy_has_the_label_and_the_number_of_its_row_and_its_teachers_answer() -> None:
    rows = random_rows(10)
    copies = np.array([2, 7])
    ids = np.concatenate([rows.ids, np.array([1, 2, 3, 4, 5])]).astype(np.int32)
    offsets = np.concatenate([rows.offsets, rows.offsets[-1] + np.array([2, 5])])
    read = TokenizedRows(ids, offsets, np.concatenate([rows.labels, rows.labels[copies]]), 0, copies_of=copies)
    teacher = TeacherAnswers("key", [np.eye(10)], np.arange(10), [np.arange(10)], num_labelled=5)

    [batch] = micro_batches_of_rank(read, np.array([10, 2, 11]), DataShard(0, 1), targets=Targets(teacher=teacher))

    assert batch.rows.tolist() == [2, 2, 7]
    assert batch.labels.tolist() == rows.labels[[2, 2, 7]].tolist()
    assert batch.teacher.argmax(dim=1).tolist() == [2, 2, 7]
    assert batch.is_labelled.tolist() == [True, True, False]
    assert batch.input_ids[0, :2].tolist() == [1, 2]
    assert read.with_copies(np.array([0, 7])).tolist() == [0, 7, 11]  # of a row for validation, no copy is trained on
    assert read.without_copies().lengths.tolist() == rows.lengths.tolist()
