"""Every piece of a state is written by one of the ranks that hold it, and all write alike much."""

import math

import pytest
import torch

from training.checkpointing.ownership import PIECE_BYTES, Chunk, assign_pieces, chunk_of


def _chunk(name: str, *shape: int, offsets: tuple[int, ...] | None = None) -> Chunk:
    return Chunk(name, offsets or (0,) * len(shape), shape, shape, torch.float32)


def _bytes(chunks: list[Chunk]) -> int:
    return sum(chunk.num_bytes for chunk in chunks)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_copies_are_written_once_and_shared_evenly_by_all_ranks(world_size: int) -> None:
    # As in DistilBERT, one tensor is a third of everything.
    copies = [_chunk("words", 30_522, 768), *(_chunk(f"layer.{i}", 768, 3072) for i in range(18)), _chunk("step")]

    owned = assign_pieces([copies] * world_size)

    assert sum(map(_bytes, owned)) == _bytes(copies)
    assert max(map(_bytes, owned)) - min(map(_bytes, owned)) <= PIECE_BYTES
    covered = sorted((piece.offsets[0], piece.shape[0]) for mine in owned for piece in mine if piece.name == "words")
    assert [start for start, _ in covered] == [0, *(start + rows for start, rows in covered[:-1])]
    assert sum(covered[-1]) == 30_522


def test_a_rank_with_data_of_its_own_writes_fewer_of_the_copies() -> None:
    mine, copies = _chunk("mine", 1000, 1000), [_chunk(f"copy.{i}", 100, 1000) for i in range(30)]

    first, second = assign_pieces([[mine, *copies], copies])

    assert mine in first
    assert _bytes(first) == pytest.approx(_bytes(second), rel=0.1)


def test_shares_do_not_depend_on_the_order_in_which_ranks_list_what_they_hold() -> None:
    chunks = [_chunk(name, 10, 10) for name in "abcdef"]

    one, other = assign_pieces([chunks, chunks]), assign_pieces([chunks[::-1], chunks[3:] + chunks[:3]])

    assert [set(mine) for mine in one] == [set(mine) for mine in other]


def test_a_shard_that_an_uneven_split_left_empty_is_written_by_nobody() -> None:
    empty = Chunk("weight", (3, 0), (0, 4), (3, 4), torch.float32)

    assert assign_pieces([[_chunk("weight", 3, 4)], [empty]])[1] == []


def test_pieces_are_cut_from_a_tensor_without_a_copy() -> None:
    tensor = torch.arange(12_000_000, dtype=torch.float32).view(3_000_000, 4)
    pieces = chunk_of("t", tensor).pieces()

    cut = [piece.cut_from(tensor) for piece in pieces]

    assert len(pieces) > 1
    assert max(piece.num_bytes for piece in pieces) <= PIECE_BYTES
    assert torch.equal(torch.cat(cut), tensor)
    assert cut[1].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert math.prod(cut[1].shape) == pieces[1].num_bytes // 4
