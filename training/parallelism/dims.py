"""ParallelDims: how many ways each kind of parallelism splits a run, checked against its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.errors import UserError
from training.config import TrainConfig
from training.facts import STRATEGY_FACTS

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class ParallelDims:
    """The degrees of a run; their product is the number of ranks.

    ``pp``: ranks per pipeline; ``dp_replicate``: copies of the state; ``dp_shard``: ranks that
    shard each copy; ``tp``: parts of each matrix. Tensor-parallel ranks are neighbors because they
    communicate most; pipeline stages are farthest apart because they communicate least.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int

    @classmethod
    def from_config(
        cls, config: TrainConfig, world_size: int, ranks_per_machine: int
    ) -> ParallelDims:
        """The degrees that were asked for; those left at 0 follow from the strategy and the number
        of ranks.

        Args:
            ranks_per_machine: neighboring ranks on the same machine; if machines differ, their
                greatest common divisor.

        Raises:
            UserError: the product does not divide the number of ranks, ``dp_shard`` does not divide
                what is left, a tensor-parallel group would span machines, or a flag belongs to a
                kind of parallelism that is not used.
        """
        # What was not asked for follows from the strategy: `tp` alone fills a machine, `pp` alone
        # takes all ranks, and whatever is left over is data parallelism.
        tp = config.tp or (ranks_per_machine if config.strategy == "tp" else 1)
        pp = config.pp or (world_size if config.strategy == "pp" else 1)
        if world_size % (pp * tp):
            raise UserError(
                f"--pp ({pp}) x --tp ({tp}) = {pp * tp}, and there are {world_size} ranks: choose "
                "degrees whose "
                "product divides the number of processes",
                code="mesh-degrees",
            )
        dp = world_size // (pp * tp)
        if ranks_per_machine % tp:
            raise UserError(
                f"--tp {tp}: tensor-parallel ranks exchange activations in every block and must "
                "share a machine, and "
                f"there are {ranks_per_machine} ranks per machine: use a divisor of "
                f"{ranks_per_machine}",
                code="mesh-degrees",
            )
        if config.sequence_parallel and tp == 1:
            raise UserError(
                "--sequence_parallel: does nothing without --tp of 2 or more", code="flags-conflict"
            )
        if pp == 1 and config.pp_schedule != TrainConfig.model_fields["pp_schedule"].default:
            raise UserError(
                f"--pp_schedule {config.pp_schedule}: does nothing without --pp of 2 or more",
                code="flags-conflict",
            )
        # ZeRO-2 and ZeRO-3 shard over all data ranks unless told otherwise; a smaller --dp_shard
        # gives hybrid sharding.
        shard = config.dp_shard or (dp if STRATEGY_FACTS[config.strategy].shards else 1)
        if dp % shard:
            raise UserError(
                f"--dp_shard {shard}: must divide the data-parallel degree, which is {dp}",
                code="mesh-degrees",
            )
        return cls(pp, dp // shard, shard, tp)

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return prod(self.degrees)

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        return self.pp, self.dp_replicate, self.dp_shard, self.tp

    def data_rank(self, rank: int) -> int:
        # Ranks are numbered (pp, dp_replicate, dp_shard, tp) with tp innermost: tensor-parallel
        # neighbors, and the stages of a pipeline, work on the same rows.
        return rank // self.tp % self.dp

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """One mesh of all ranks with the dimensions :data:`MESH_DIMS`; a collective call."""
        return init_device_mesh(device_type, self.degrees, mesh_dim_names=MESH_DIMS)

    def __str__(self) -> str:
        words = ("pipeline", "replicated", "sharded", "tensor")
        parts = [
            f"{word}({degree})"
            for word, degree in zip(words, self.degrees, strict=True)
            if degree > 1
        ]
        return (
            f"{' x '.join(parts) or 'one process'} = {self.world_size} "
            f"rank{'s' * (self.world_size > 1)}"
        )
