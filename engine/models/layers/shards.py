"""Cuts a rank's part of a weight into shards: equal parts that are packed and multiplied by themselves."""

import dataclasses

import torch
from torch import Tensor

from sluice_server.kernels.formats.packed_weights import Packed, num_inputs, take_columns, take_rows


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One of `num` equal parts of a projection.

    Attributes:
        of_inputs: whether its inputs are cut, else rows: those of gate and of up, which are stacked.
        has_bias: whether its products include the bias where inputs are cut: it is added once.
    """

    index: int
    num: int
    of_inputs: bool = False
    has_bias: bool = True

    def part(self, size: int) -> range:
        """Returns this shard's part of `size` things."""
        each = size // self.num
        return range(self.index * each, (self.index + 1) * each)

    def of_weight(self, weight: Tensor | Packed) -> Tensor | Packed:
        """Returns the shard of a weight. Raises ValueError for inputs that cut a group with one scale."""
        if not self.of_inputs:
            rows = self._rows(len(weight if isinstance(weight, Tensor) else weight[0]))
            if isinstance(weight, Tensor):
                return weight[rows.to(weight.device)]
            return take_rows(weight, rows.to(weight[0].device))
        if isinstance(weight, Tensor):
            inputs = self.part(weight.shape[1])
            return weight[:, inputs.start : inputs.stop]
        inputs = self.part(num_inputs(weight))
        return take_columns(weight, inputs.start, inputs.stop)

    def of_bias(self, bias: Tensor | None) -> Tensor | None:
        """Returns the shard of a bias; None without, and where another shard adds it."""
        if bias is None or (self.of_inputs and not self.has_bias):
            return None
        return bias if self.of_inputs else bias[self._rows(len(bias)).to(bias.device)]

    def _rows(self, num: int) -> Tensor:
        half = torch.tensor(self.part(num // 2))
        return torch.cat((half, num // 2 + half))
