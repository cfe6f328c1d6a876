"""The place of a model's code among ranks: the shape of its group, its sums with the others, and its stages."""

import dataclasses

from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.stages import Stages
from sluice_server.engine.parallel.sums import RankSums


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """What layers must know of a group whose ranks share them out.

    Attributes:
        sums: of the ranks of one stage.
        stages: the connections with other stages; None where there is one stage.
    """

    shape: ParallelShape
    sums: RankSums
    stages: Stages | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for sums of another rank or group."""
        shape, sums = self.shape, self.sums
        told, has = (shape.rank, shape.tensor_size, shape.sum_shards), (sums.rank, sums.size, sums.shards)
        if told != has:
            raise ValueError(f"rank, ranks and shards are {told}, and those of the sums {has}")
        if (self.stages is None) != (shape.pipeline_size == 1):
            raise ValueError(f"{shape.pipeline_size} stages, and connections {self.stages}")

    @property
    def adding(self) -> "Ranks | None":
        """These ranks, if layers have sums; None where each layer is whole on one rank and adds nothing up."""
        return self if self.shape.sum_shards > 1 else None
