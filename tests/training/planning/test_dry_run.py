"""A dry run holds what a real run holds."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.real_step import measure_memory
from tests.processes import here, run_on_ranks
from training.planning.dry_run import HOST_BYTES_LIMIT, NoDryRun, dry_run
from training.planning.fake_step import worst_rank
from training.planning.live_memory import LiveMemory
from training.planning.models import NAMED_SHAPES
from training.planning.shapes import Layout, ModelShape

SHAPE = ModelShape("small", "distilbert", 4, 256, 4, 4, 1024, vocab=4000, max_positions=128, head_dim=64, num_labels=4)
SIZE = {"micro_batch": 16, "seq_len": 64, "precision": "fp32"}
LAYOUTS = {
    "ddp": Layout("ddp", dp_replicate=2, **SIZE),
    "zero1": Layout("zero1", dp_replicate=2, **SIZE),
    "zero2": Layout("zero2", dp_shard=2, **SIZE),
    "zero3": Layout("zero3", dp_shard=2, **SIZE),
    "zero3, accumulating": Layout("zero3", dp_shard=2, accumulation=3, **SIZE),
    "zero3, checkpointing": Layout("zero3", dp_shard=2, activation_checkpointing="full", **SIZE),
    "tp": Layout("tp", tp=2, **SIZE),
    "tp, sequence parallel": Layout("tp", tp=2, sequence_parallel=True, **SIZE),
    "pp": Layout("pp", pp=2, accumulation=4, **SIZE),
}


FAST = ("ddp", "zero3", "tp")


def _measure(names: Sequence[str]) -> dict[str, dict[str, float]]:
    return {name: measure_memory(SHAPE, LAYOUTS[name], here()) for name in names}


def _hold_to_real_runs(names: Sequence[str]) -> None:
    """Two gloo ranks; the worse of them counts."""
    ranks = run_on_ranks(2, _measure, names)
    for name in names:
        real = {kind: max(rank[name][kind] for rank in ranks) for kind in ranks[0][name]}
        found = worst_rank(SHAPE, LAYOUTS[name], "cpu")["memory"]
        assert sum(found.values()) == pytest.approx(real["peak"], rel=0.1), name
        assert found["parameters"] == pytest.approx(real["parameters"], rel=0.001), name
        assert found["optimizer"] == pytest.approx(real["optimizer"], rel=0.001), name


@pytest.mark.slow
def test_a_dry_run_is_within_a_tenth_of_a_real_run() -> None:
    _hold_to_real_runs(FAST)


@pytest.mark.slow
def test_a_dry_run_is_within_a_tenth_of_a_real_run_under_every_other_layout() -> None:
    _hold_to_real_runs([name for name in LAYOUTS if name not in FAST])


def test_live_memory_counts_what_torchs_own_tracker_counts() -> None:
    def peak(tracker: LiveMemory | MemTracker, tell: Callable[[nn.Module], None]) -> int:
        model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())])
        rows = torch.ones(32, 64)
        tell(model)
        with tracker:
            model(rows).sum().backward()
        return tracker.peak if isinstance(tracker, LiveMemory) else _peak_of(tracker)

    ours, theirs = LiveMemory(), MemTracker()
    weights = 3 * (64 * 64 + 64) * 4

    def tell_ours(model: nn.Module) -> None:
        for parameter in model.parameters():
            ours.count(parameter, "parameters")

    assert peak(ours, tell_ours) == pytest.approx(peak(theirs, theirs.track_external), abs=64)
    assert ours.at_peak["parameters"] == weights


def _peak_of(tracker: MemTracker) -> int:
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return snapshot["Total"]


def test_live_memory_follows_a_storage_that_is_resized_and_freed() -> None:
    with LiveMemory() as memory:
        tensor = torch.empty(100)
        tensor.untyped_storage().resize_(0)
        assert (memory.now["activations"], memory.peak) == (0, 400)
        tensor.untyped_storage().resize_(800)
        assert memory.peak == 800
        del tensor
    assert memory.now["activations"] == 0


def test_tensor_parts_are_shared_out_and_nothing_of_a_whole_matrix_counts() -> None:
    """Holds what is replaced inside torch: DTensor's question for shapes, and the joining of meshes."""
    whole = worst_rank(SHAPE, Layout("ddp", **SIZE), "gpu")["memory"]
    both = worst_rank(SHAPE, Layout("3d", dp_shard=2, tp=2, **SIZE), "gpu")["memory"]
    assert both["parameters"] < 0.26 * whole["parameters"]
    assert both["optimizer"] < 0.26 * whole["optimizer"]
    assert sum(both.values()) < 0.7 * sum(whole.values())


def test_ranks_that_are_not_here_cost_nothing_but_their_share() -> None:
    few, many = (worst_rank(SHAPE, Layout("zero3", dp_shard=n, **SIZE), "gpu")["memory"] for n in (4, 64))
    assert many["parameters"] == pytest.approx(few["parameters"] / 16, rel=0.02)
    assert many["activations"] == pytest.approx(few["activations"], rel=0.1)


def test_a_gpu_keeps_no_attention_scores() -> None:
    long = replace(SHAPE, max_positions=1024)
    layout = Layout("ddp", micro_batch=1, seq_len=1024, precision="fp32")
    on_gpu, on_cpu = (worst_rank(long, layout, device)["memory"]["activations"] for device in ("gpu", "cpu"))
    scores = 3 * 4 * 1024 * 1024 * 4  # of all blocks but the last, which looks from one token
    assert on_cpu - on_gpu > scores


def test_a_dry_run_has_a_process_of_its_own_and_says_why_there_is_none() -> None:
    roberta = replace(SHAPE, family="roberta", type_vocab=1)
    with pytest.raises(NoDryRun, match=r"^pp 2: RobertaForSequenceClassification cannot be cut into stages"):
        dry_run(roberta, Layout("pp", pp=2, accumulation=2, **SIZE), 2)
    with pytest.raises(NoDryRun, match="of 2 ranks, not 4"):
        dry_run(SHAPE, LAYOUTS["ddp"], 4)
    with pytest.raises(NoDryRun, match="took all the time there is"):
        dry_run(SHAPE, LAYOUTS["ddp"], 2, seconds=-1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout("zero3", dp_shard=32, micro_batch=4, seq_len=4096, activation_checkpointing="full"),
        Layout("3d", dp_shard=4, tp=8, micro_batch=1, seq_len=4096, sequence_parallel=True),
        Layout("3d", pp=4, dp_shard=8, accumulation=8, seq_len=4096, activation_checkpointing="selective"),
    ],
)
def test_13_billion_parameters_on_32_ranks_take_little_of_this_machine(layout: Layout) -> None:
    found = dry_run(NAMED_SHAPES["llama-13b"], layout, 32)
    assert found.memory.parameters == pytest.approx(4 * 13.016e9 / 32, rel=0.1)
    assert found.host_bytes < HOST_BYTES_LIMIT
