"""A linear layer whose inputs are shared out: ranks multiply a part of them each, and add up the partial products.

Every shard has a packed matrix and activations of its own, also where several shards are one rank's: the bits of the
result depend on the number of shards, not on that of ranks.
"""

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from sluice_server.engine.parallel.sums import RankSums
from sluice_server.kernels import ops
from sluice_server.kernels.formats.linear import Matrix, PackedLinear


class SummedLinear(PackedLinear):
    """The shards of one rank: of a weight [N, K], those with the rank's inputs. Results are float32.

    Attributes:
        shards: in the order of their inputs, and of equally many each. Only the first of rank 0 has the bias.
    """

    def __init__(self, shards: Sequence[PackedLinear], sums: RankSums) -> None:
        first = shards[0]
        super().__init__(first.weight, first.bias)
        self.shards = tuple(shards)
        self.sums = sums
        self.features = first.features
        self.dtype = first.dtype
        self.kernel = first.kernel
        self.batch_invariant = all(one.batch_invariant for one in shards)

    @property
    def matrices(self) -> Sequence[Matrix]:
        return self.shards

    def fixed(self) -> Self:
        found = copy.copy(self)
        found.shards = tuple(one.fixed() for one in self.shards)
        found.batch_invariant = all(one.batch_invariant for one in found.shards)
        return found

    def apply(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x), self.features, device=x.device)
        return self.add_to(total, x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        partials = self.sums.room(len(x), self.features)
        for shard, part, inputs in zip(self.shards, partials, x.chunk(len(self.shards), 1), strict=True):
            shard.store_in(part, inputs)
        self.sums.add(residual, partials)
        return residual

    def add_normed_to(self, residual: Tensor, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return residual.add_(ops.rms_norm(self.apply(x), norm, eps, residual.dtype))

    def apply_normed(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        raise NotImplementedError("a norm of all inputs takes more than a rank's part of them")
