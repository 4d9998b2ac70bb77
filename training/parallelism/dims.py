"""ParallelDims: how many ways each kind of parallelism splits the run, checked against the ranks there are."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.errors import UserError
from training.config import TrainConfig

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class ParallelDims:
    """The degrees of a run; their product is the number of ranks.

    ``pp``: pipeline stages, in ranks; ``dp_replicate``: copies of the state, each on its own ``dp_shard`` ranks that
    share it out; ``tp``: parts of each matrix. Tensor-parallel ranks are neighbours, since they speak most; stages lie
    farthest apart, since they speak least.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int

    @classmethod
    def from_config(cls, config: TrainConfig, world_size: int, ranks_per_machine: int) -> ParallelDims:
        """Degrees as asked for; those left at 0 follow from the strategy and the number of ranks.

        Args:
            ranks_per_machine: neighbouring ranks that share a machine; where machines have different numbers of ranks,
                what divides them all.

        Raises:
            UserError: their product is not the number of ranks, ``dp_shard`` does not divide ``dp``, tensor parts would
            lie on several machines, or a flag is for a kind of parallelism that is not there.
        """
        tp, pp, dp = config.tp or 1, config.pp or 1, config.dp
        if config.strategy == "tp" and not config.tp:
            tp = world_size // dp if dp else ranks_per_machine
        if config.strategy == "pp" and not config.pp:
            pp = world_size // (dp or 1)
        dp = dp or max(1, world_size // (tp * pp))
        if pp * dp * tp != world_size:
            raise UserError(
                f"--pp ({pp}) x --dp ({dp}) x --tp ({tp}) = {pp * dp * tp}, and there are {world_size} ranks: "
                "choose degrees whose product is the number of processes, or leave --dp at 0",
                code="mesh-degrees",
            )
        if ranks_per_machine % tp:
            raise UserError(
                f"--tp {tp}: tensor-parallel ranks exchange activations in every block and must share a machine, and "
                f"there are {ranks_per_machine} ranks per machine: use a divisor of {ranks_per_machine}",
                code="mesh-degrees",
            )
        if config.sequence_parallel and tp == 1:
            raise UserError("--sequence_parallel: does nothing without --tp of 2 or more", code="flags-conflict")
        if pp == 1 and config.pp_schedule != TrainConfig.model_fields["pp_schedule"].default:
            raise UserError(
                f"--pp_schedule {config.pp_schedule}: does nothing without --pp of 2 or more", code="flags-conflict"
            )
        shard = config.dp_shard or (dp if config.strategy in ("zero2", "zero3", "3d") else 1)
        if dp % shard:
            raise UserError(
                f"--dp_shard {shard}: must divide the data-parallel degree, which is {dp}", code="mesh-degrees"
            )
        return cls(pp, dp // shard, shard, tp)

    @property
    def dp(self) -> int:
        """Ranks or groups of ranks that have different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """All ranks."""
        return prod(self.degrees)

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """In the order of :data:`MESH_DIMS`."""
        return self.pp, self.dp_replicate, self.dp_shard, self.tp

    def data_rank(self, rank: int) -> int:
        """Which share of each global batch a rank works on."""
        return rank // self.tp % self.dp

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """One mesh of all ranks with the dimensions :data:`MESH_DIMS`; a collective call."""
        return init_device_mesh(device_type, self.degrees, mesh_dim_names=MESH_DIMS)

    def __str__(self) -> str:
        """The product in words, for the banner."""
        words = ("pipeline", "replicated", "sharded", "tensor")
        parts = [f"{word}({degree})" for word, degree in zip(words, self.degrees, strict=True) if degree > 1]
        return f"{' x '.join(parts) or 'one process'} = {self.world_size} rank{'s' * (self.world_size > 1)}"
