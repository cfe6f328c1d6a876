"""The place of a model's code among ranks: the shape of its group, and its sums with the others."""

import dataclasses

from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.sums import RankSums


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """What layers must know of a group whose ranks share them out."""

    shape: ParallelShape
    sums: RankSums

    def __post_init__(self) -> None:
        """Raises ValueError for sums of another rank or group."""
        shape, sums = self.shape, self.sums
        told, has = (shape.rank, shape.tensor_size, shape.sum_shards), (sums.rank, sums.size, sums.shards)
        if told != has:
            raise ValueError(f"rank, ranks and shards are {told}, and those of the sums {has}")
