"""Two sampling strategies: one that draws one of the two likeliest ids, and one that chooses what it must not."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from sluice_server.engine.plugins.interface import API, ProcessorContext


class Second:
    """Chooses the likeliest id, or with probability `p` the one behind it, if it is allowed."""

    api = API

    def __init__(self, context: ProcessorContext) -> None:
        pass

    def check(self, arguments: Mapping[str, str]) -> None:
        """Raises ValueError unless `p` is a number from 0 to 1, and the only argument."""
        if arguments.keys() != {"p"} or not 0 <= float(arguments["p"]) <= 1:
            raise ValueError("'p' must be 0 to 1, and there is nothing else")

    def choose(
        self,
        arguments: Mapping[str, str],
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        logits: Tensor,
        uniform: float,
    ) -> int:
        """Returns one of the two."""
        values, ids = logits.topk(2)
        is_second = uniform < float(arguments["p"]) and not bool(values[1].isneginf())
        return int(ids[1 if is_second else 0])


class Broken:
    """Raises, or returns `id`."""

    api = API

    def __init__(self, context: ProcessorContext) -> None:
        pass

    def check(self, arguments: Mapping[str, str]) -> None:
        """Takes anything."""

    def choose(
        self,
        arguments: Mapping[str, str],
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        logits: Tensor,
        uniform: float,
    ) -> int:
        """Never returns what it should."""
        if "id" not in arguments:
            raise RuntimeError("a secret of this process")
        return int(arguments["id"])
