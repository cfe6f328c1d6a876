"""The logits processors and sampling strategies that slots ask for, with the tokens that these see.

Slots without one cost nothing. `reset` drops the state of the slot's former sequence.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.plan import Placement
from sluice_server.engine.plugins.sampling import SamplingPlugins
from sluice_server.engine.request import ProcessorCall
from sluice_server.engine.sampling.sampler import SampledRows
from sluice_server.engine.sampling.strategies import Strategy


@dataclasses.dataclass(slots=True)
class PluginOutput:
    """One output whose logits are processed, or whose tokens a strategy chooses."""

    processors: tuple[ProcessorCall, ...]
    strategy: ProcessorCall | None
    prompt: tuple[int, ...]
    output: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class SlotSamplingPlugins:
    """Outputs by slot, for the slots that ask for a processor or a strategy."""

    def __init__(self, plugins: SamplingPlugins) -> None:
        self._plugins = plugins
        self._outputs: dict[int, PluginOutput] = {}

    def reset(self, placement: Placement) -> None:
        """Replaces the state of the slot's former sequence."""
        self._outputs.pop(placement.slot, None)
        params, tokens, num = placement.params, placement.tokens, placement.num_prompt
        if params.logits_processors or params.strategy is not None:
            self._outputs[placement.slot] = PluginOutput(
                params.logits_processors, params.strategy, tokens[:num], list(tokens[num:])
            )

    def listens(self, slot: int) -> bool:
        """Returns whether the slot's tokens must be passed to `note`."""
        return slot in self._outputs

    def note(self, slot: int, position: int, computed: Sequence[int]) -> None:
        """Records that the slot now samples the token at `position`; `computed` are the tokens right before it."""
        found = self._outputs.get(slot)
        if found is not None and found.num_tokens < position:
            found.output += computed[found.num_tokens - position :]

    def apply(
        self, logits: Tensor, slots: Sequence[int], ahead: Mapping[int, Sequence[int]]
    ) -> dict[int, ServiceError]:
        """Changes the rows of logits [R, V] whose slots ask for it; returns the errors by row.

        `ahead`: by row of a draft, the drafts up to it.
        """
        if not self._outputs:
            return {}
        errors = {}
        with torch.inference_mode():
            for row, slot in enumerate(slots):
                found = self._outputs.get(slot)
                if found is not None and found.processors:
                    seen = (*found.output, *ahead.get(row, ()))
                    error = self._plugins.apply(found.processors, found.prompt, seen, logits[row])
                    if error is not None:
                        errors[row] = error
                        logits[row] = 0.0  # something to draw from: what is drawn is not used
        return errors

    def strategies(self, slots: Sequence[int], ahead: Mapping[int, Sequence[int]]) -> dict[int, Strategy]:
        """Returns what chooses the token of each row whose slot asks for a strategy; `ahead` as for `apply`."""
        found: dict[int, Strategy] = {}
        for row, slot in enumerate(slots) if self._outputs else ():
            output = self._outputs.get(slot)
            if output is not None and output.strategy is not None:
                seen = (*output.output, *ahead.get(row, ()))
                found[row] = functools.partial(self._plugins.choose, output.strategy, output.prompt, seen)
        return found


def with_errors(sampled: SampledRows, errors: Mapping[int, ServiceError]) -> SampledRows:
    """Returns what was sampled, without the rows whose processors failed."""
    if not errors:
        return sampled
    return dataclasses.replace(
        sampled,
        bad=sorted({*sampled.bad, *errors}),
        errors={**sampled.errors, **errors},
        logprobs={row: one for row, one in sampled.logprobs.items() if row not in errors},
    )
