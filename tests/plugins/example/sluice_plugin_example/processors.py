"""Two logits processors: one that counts, and one that fails."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sluice_server.engine.plugins.interface import API, ProcessorContext


class Counting:
    """Leaves the ids that are, divided by `of`, as far from a multiple as the output has tokens."""

    api = API

    def __init__(self, context: ProcessorContext) -> None:
        self._ids = torch.arange(context.vocab_size)

    def check(self, arguments: Mapping[str, str]) -> None:
        """Raises ValueError unless `of` is a whole number from 2 to 9, and the only argument."""
        if arguments.keys() != {"of"} or arguments["of"] not in tuple("23456789"):
            raise ValueError("'of' must be 2 to 9, and there is nothing else")

    def apply(
        self, arguments: Mapping[str, str], prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Tensor
    ) -> None:
        """Bars the other ids."""
        of = int(arguments["of"])
        logits.masked_fill_(self._ids.to(logits.device) % of != len(output_ids) % of, float("-inf"))


class Failing:
    """Fails at token `at`: by an exception, or by leaving no number."""

    api = API

    def __init__(self, context: ProcessorContext) -> None:
        self._context = context

    def check(self, arguments: Mapping[str, str]) -> None:
        """Fails otherwise than by a ValueError if there is no `at`."""
        int(arguments["at"])

    def apply(
        self, arguments: Mapping[str, str], prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Tensor
    ) -> None:
        """Fails, or changes nothing."""
        if len(output_ids) < int(arguments["at"]):
            return
        if "by" not in arguments:
            raise RuntimeError("a secret of this process")
        logits.fill_(float(arguments["by"]))
