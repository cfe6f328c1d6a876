"""The shape of a group of ranks, and which part of a model each rank owns. Pure arithmetic.

Ranks of the group count from the last stage, which has the head: rank 0 samples, and so has what it samples from.
Tensor ranks own heads, intermediate columns, experts and rows of the vocabulary of every layer of their stage; stages
own consecutive layers. What is row-parallel (the projections behind attention and behind an MLP) is added up over
`sum_shards` partial products, in their order: the bits of a sum then depend on that number, not on the number of ranks.
"""

import dataclasses

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class ParallelShape:
    """The sizes of a group, and one rank's place in it.

    Attributes:
        tensor_size: ranks of a stage.
        rank: this rank's number within its stage, from 0.
        pipeline_size: stages.
        stage: this rank's stage, from 0.
        sum_shards: partial products of a row-parallel projection; a multiple of `tensor_size`, which 0 stands for.
        expert_parallel: whether a rank owns whole experts, not a part of each.
    """

    tensor_size: int = 1
    rank: int = 0
    pipeline_size: int = 1
    stage: int = 0
    sum_shards: int = 0
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        """Raises ServiceError INVALID_SETTING for sizes that exclude one another."""
        for name, value in (("tensor", self.tensor_size), ("pipeline", self.pipeline_size)):
            if value < 1:
                raise unusable(f"{name}_parallel_size", f"{value} is below 1")
        if self.sum_shards < 0:
            raise unusable("sum_shards", f"{self.sum_shards} is below 0")
        if not self.sum_shards:
            object.__setattr__(self, "sum_shards", self.tensor_size)
        if self.sum_shards % self.tensor_size:
            text = f"{self.sum_shards} is no multiple of --tensor-parallel-size {self.tensor_size}"
            raise unusable("sum_shards", f"{text}: take one, such as {self.tensor_size}")
        if not 0 <= self.rank < self.tensor_size or not 0 <= self.stage < self.pipeline_size:
            raise ValueError(f"no rank {self.rank} of stage {self.stage} in {self}")

    def of_member(self, member: int) -> "ParallelShape":
        """Returns the same group from the place of a member, 0 … members - 1: those of the last stage come first."""
        later, rank = divmod(member, self.tensor_size)
        return dataclasses.replace(self, rank=rank, stage=self.pipeline_size - 1 - later)

    @property
    def members(self) -> int:
        """The number of ranks of all stages."""
        return self.tensor_size * self.pipeline_size

    @property
    def member(self) -> int:
        """This rank's number among the ranks of all stages."""
        return (self.pipeline_size - 1 - self.stage) * self.tensor_size + self.rank

    @property
    def is_whole(self) -> bool:
        """Whether one rank owns the whole model and adds nothing up."""
        return self.members == 1 and self.sum_shards == 1

    @property
    def rank_shards(self) -> int:
        """The number of partial products that one rank computes."""
        return self.sum_shards // self.tensor_size

    @property
    def is_first(self) -> bool:
        """Whether this rank's stage has the embeddings."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank's stage has the last norm and the head."""
        return self.stage == self.pipeline_size - 1

    def part(self, size: int) -> range:
        """Returns this rank's part of `size` things that its stage shares out evenly."""
        each = size // self.tensor_size
        return range(self.rank * each, (self.rank + 1) * each)

    def heads(self, config: ModelConfig) -> range:
        """Returns the query heads that this rank owns."""
        return self.part(config.num_heads)

    def kv_heads(self, config: ModelConfig) -> range:
        """Returns the key and value heads of its query heads; where there are fewer than ranks, several own one."""
        repeats = config.num_heads // config.num_kv_heads
        heads = self.heads(config)
        return range(heads.start // repeats, (heads.stop - 1) // repeats + 1)

    def experts(self, num: int) -> range:
        """Returns the experts of which this rank owns weights: all of them, in part, unless they are shared out."""
        return self.part(num) if self.expert_parallel else range(num)

    def vocabulary(self, size: int) -> range:
        """Returns the ids whose rows this rank owns: as many as the others, or one more or less."""
        return range(size * self.rank // self.tensor_size, size * (self.rank + 1) // self.tensor_size)

    def layers(self, num: int) -> range:
        """Returns the layers of this rank's stage."""
        return range(num * self.stage // self.pipeline_size, num * (self.stage + 1) // self.pipeline_size)

    def check(self, config: ModelConfig) -> None:
        """Raises ServiceError INVALID_SETTING, naming the option, for a model that cannot be shared out so."""
        size, stages, layers = self.tensor_size, self.pipeline_size, config.num_layers
        if stages > layers:
            raise unusable("pipeline_parallel_size", f"{stages} is above the model's {layers} layers")
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if heads % size:
            raise unusable("tensor_parallel_size", f"{size} does not divide the model's {heads} attention heads")
        if kv_heads % size and size % kv_heads:
            text = f"{size} neither divides the model's {kv_heads} key/value heads nor is a multiple of them"
            raise unusable("tensor_parallel_size", text)
        if size > config.vocab_size:
            raise unusable("tensor_parallel_size", f"{size} is above the model's vocabulary of {config.vocab_size}")
        self._check_shards("inputs of the projection behind attention", heads * config.head_dim)
        self._check_mlp(config)

    def _check_mlp(self, config: ModelConfig) -> None:
        own, size = config.experts, self.tensor_size
        if own is None and self.expert_parallel:
            raise unusable("expert_parallel", "the model has no experts: leave it out")
        if own is None or not all(own.layers):
            self._check_shards("intermediate size", config.intermediate_size)
        if own is None:
            return
        if own.shared_size:
            self._check_shards("intermediate size of the shared expert", own.shared_size)
        if not self.expert_parallel:
            self._check_shards("intermediate size of an expert", own.intermediate_size)
        elif own.num % size:
            raise unusable("expert_parallel", f"--tensor-parallel-size {size} does not divide {own.num} experts")
        elif own.num % self.sum_shards:
            raise unusable("sum_shards", f"{self.sum_shards} does not divide {own.num} experts, a part of them each")

    def _check_shards(self, what: str, size: int) -> None:
        """Raises ServiceError if ranks, or partial products, do not divide a size."""
        sizes = {"tensor_parallel_size": self.tensor_size, "sum_shards": self.sum_shards}
        for name, parts in sizes.items():
            if size % parts:
                raise unusable(name, f"{parts} does not divide the model's {what}, {size}")


def unusable(name: str, message: str) -> ServiceError:
    """Returns the error for an option that cannot be used; it names the flag."""
    flag = f"--{name.replace('_', '-')}"
    return ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", f"{flag}: {message}", field=name)
