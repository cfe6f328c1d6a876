"""The memory that the ranks of a group share: that of the sums of each stage, and that between stages."""

import os
from collections.abc import Sequence
from typing import NamedTuple

from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.stages import Stages
from sluice_server.engine.parallel.stages_shared import SharedMemoryStages, new_stages
from sluice_server.engine.parallel.sums import LocalSums, TimedSums
from sluice_server.engine.parallel.sums_shared import SharedMemorySums, new_segment


class RankConnections(NamedTuple):
    """One rank's sums with the ranks of its stage, and its connections with other stages if there are any."""

    sums: TimedSums
    stages: Stages | None


def new_memory(shape: ParallelShape) -> list[int]:
    """Returns descriptors: of the sums of each stage, from the last one, if it has several ranks; then of the stages,
    if there are several."""
    files = [new_segment(shape.tensor_size) for _ in range(shape.pipeline_size)] if shape.tensor_size > 1 else []
    return [*files, new_stages(shape)] if shape.pipeline_size > 1 else files


def connect(files: Sequence[int], shape: ParallelShape, timeout_s: float) -> RankConnections:
    """Returns one rank's connections over `new_memory`, and closes what belongs to other stages alone."""
    of_sums = list(files)
    stages = SharedMemoryStages(of_sums.pop(), shape, timeout_s) if shape.pipeline_size > 1 else None
    sums: TimedSums = LocalSums(shape.sum_shards)
    where = f" of stage {shape.stage}" if stages is not None else ""
    for at, file in enumerate(of_sums):
        if at == shape.pipeline_size - 1 - shape.stage:
            sums = SharedMemorySums(file, shape.rank, shape.sum_shards, timeout_s, where)
        else:
            os.close(file)
    return RankConnections(sums, stages)
