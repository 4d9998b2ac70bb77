"""Communication: the limits of the alpha-beta model, and what each strategy sends."""

from dataclasses import replace
from math import log2

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from tests.processes import run_on_ranks
from tests.training.parallelism.small_models import small_batch, small_model
from training.parallelism.activation_checkpointing import apply_activation_checkpointing
from training.parallelism.tensor_parallel import apply_tensor_parallel
from training.planning.communication import Group, Transfer, groups, transfers
from training.planning.hardware import GPUS, Cluster
from training.planning.layouts import CHECKPOINTING_MODES, Layout, pipeline_ranks
from training.planning.models import NAMED_SHAPES, ModelShape

CLUSTER = Cluster(GPUS["a100-80gb"], nodes=4, gpus_per_node=8)
LLAMA = NAMED_SHAPES["llama-13b"]


def sent(shape: ModelShape, layout: Layout) -> dict[tuple[str, str], Transfer]:
    """What the first stage sends, by collective and dimension."""
    found = transfers(shape, layout, pipeline_ranks(shape, layout)[0], CLUSTER)
    return {(transfer.collective, transfer.dimension): transfer for transfer in found}


def test_a_large_all_reduce_is_bound_by_the_link() -> None:
    group = Group.over(8, 1, CLUSTER)
    size = 100e9

    assert group.all_reduce_seconds(size) == pytest.approx(2 * 7 / 8 * size / group.bandwidth, rel=1e-3)


@pytest.mark.parametrize(("nodes", "members"), [(1, 1), (1, 8), (4, 8), (64, 8), (16, 1)])
def test_latency_is_what_nccls_own_model_counts(nodes: int, members: int) -> None:
    cluster = replace(CLUSTER, nodes=nodes)
    intra, inter, ranks = cluster.link_latency, cluster.network_latency, nodes * members
    # src/graph/tuning.cc of NCCL, commit 5067397c26, without the constant of each call and the posting of messages.
    steps, inter_steps = 2 * (ranks - 1), 2 * (nodes - 1)
    ring = (steps - inter_steps) * intra + inter_steps * inter
    tree = 2 * ((ranks // nodes - 1) * intra + log2(nodes) * inter)

    group = Group(ranks, members, cluster)

    assert 2 * group.latency == pytest.approx(ring)
    assert group.ring_seconds(1) == pytest.approx(group.latency, rel=1e-3)
    assert group.all_reduce_seconds(1) == pytest.approx(min(ring, tree), rel=1e-3)


def test_a_group_over_nodes_uses_the_network_ports_of_all_its_members() -> None:
    whole_nodes, one_each = Group.over(32, 1, CLUSTER), Group.over(4, 8, CLUSTER)

    assert (whole_nodes.members, whole_nodes.nodes) == (8, 4)
    assert (one_each.members, one_each.nodes) == (1, 4)
    assert whole_nodes.bandwidth == 8 * one_each.bandwidth


def test_tensor_parallel_groups_stay_within_a_node_and_stages_are_farthest_apart() -> None:
    found = groups(Layout("3d", pp=2, dp_shard=2, tp=8), CLUSTER)

    assert found["tp"].nodes == 1
    assert found["pp"].members == found["dp_shard"].members == 1


def test_zero3_sends_one_and_a_half_times_what_ddp_sends() -> None:
    # arXiv 1910.02054, section 7: 2 psi without, 3 psi with; ours gathers in 16 bits and reduces in 32.
    fp32 = {"precision": "fp32"}
    ddp = sent(LLAMA, Layout("ddp", dp_replicate=32, **fp32))
    zero3 = sent(LLAMA, Layout("zero3", dp_shard=32, **fp32))

    ratio = sum(t.bytes for t in zero3.values()) / sum(t.bytes for t in ddp.values())

    # The parameters outside the blocks are gathered once.
    assert ratio == pytest.approx(1.5, abs=0.02)


def test_sharding_within_nodes_sends_only_the_shards_gradients_between_them() -> None:
    hybrid = sent(LLAMA, Layout("zero3", dp_replicate=4, dp_shard=8))

    assert hybrid["all-gather", "dp_shard"].between_nodes == 0
    between = hybrid["all-reduce", "dp_replicate"].between_nodes
    assert between == pytest.approx(2 * 3 / 4 * 4 * LLAMA.num_parameters / 8)


def test_tensor_parallelism_reduces_twice_per_block_and_pass() -> None:
    found = sent(LLAMA, Layout("tp", tp=8, accumulation=3))

    # And once for the embeddings, forward, and once for the head, backward.
    assert found["all-reduce", "tp"].calls == 3 * (4 * LLAMA.layers + 2)


FAMILIES = {"llama": "llama-13b", "bert": "bert-large"}
LAYOUTS = [
    Layout("tp", tp=2, sequence_parallel=is_cut, activation_checkpointing=mode)
    for is_cut in (False, True)
    for mode in CHECKPOINTING_MODES
]


@pytest.fixture(scope="module")
def calls_of_a_block() -> dict[tuple[str, Layout], dict[str, int]]:
    """Of each family and layout; on two ranks of their own, because DTensor remembers the meshes of its process."""
    return run_on_ranks(2, _all_calls)[0]


def _all_calls() -> dict[tuple[str, Layout], dict[str, int]]:
    mesh = init_device_mesh("cpu", (2,))
    return {(family, layout): _calls_of_a_block(family, layout, mesh) for family in FAMILIES for layout in LAYOUTS}


def _calls_of_a_block(family: str, layout: Layout, mesh: DeviceMesh) -> dict[str, int]:
    """What the first block of the trainer's network calls, forward and backward, by the planner's names."""
    model = small_model(family)
    apply_tensor_parallel(model, mesh, sequence_parallel=layout.sequence_parallel)
    block = model.blocks[0]
    if layout.activation_checkpointing != "none":
        apply_activation_checkpointing(block, layout.activation_checkpointing, model.dropout_stream)
    length = 16 // layout.tp if layout.sequence_parallel else 16
    hidden = torch.randn(4, length, 32, requires_grad=True)
    context = model.architecture.context(model.network, hidden, small_batch()[1])
    with CommDebugMode() as calls:
        block(hidden, **context).sum().backward()
    counts = {str(call).rpartition(".")[2]: count for call, count in calls.get_comm_counts().items()}
    names = {
        "all_reduce": "all-reduce",
        "all_gather_into_tensor": "all-gather",
        "reduce_scatter_tensor": "reduce-scatter",
    }
    return {names[call]: count for call, count in counts.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: f"{one.sequence_parallel}-{one.activation_checkpointing}")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_calls_what_the_trainers_block_calls(
    calls_of_a_block: dict[tuple[str, Layout], dict[str, int]], family: str, layout: Layout
) -> None:
    shape = replace(NAMED_SHAPES[FAMILIES[family]], num_labels=4)
    one, two = (sent(replace(shape, layers=layers), layout) for layers in (1, 2))

    planned = {collective: two[collective, "tp"].calls - one[collective, "tp"].calls for collective, _ in two}

    assert planned == calls_of_a_block[family, layout]


def test_each_micro_batch_gathers_and_scatters_and_replicas_are_summed_once() -> None:
    layout = Layout("zero3", dp_replicate=4, dp_shard=8)

    once, four = (sent(LLAMA, replace(layout, accumulation=count)) for count in (1, 4))

    assert four["reduce-scatter", "dp_shard"].bytes == 4 * once["reduce-scatter", "dp_shard"].bytes
    assert four["all-gather", "dp_shard"].bytes == 4 * once["all-gather", "dp_shard"].bytes
    assert four["all-reduce", "dp_replicate"].bytes == once["all-reduce", "dp_replicate"].bytes


def test_a_pipeline_sends_each_micro_batch_forward_and_its_gradient_back() -> None:
    layout = Layout("pp", pp=4, accumulation=8, micro_batch=2, seq_len=1024)
    stages = pipeline_ranks(LLAMA, layout)
    calls = [sum(t.calls for t in transfers(LLAMA, layout, stage, CLUSTER)) for stage in stages]

    assert calls == [8, 16, 16, 8]
