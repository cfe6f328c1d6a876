"""What a plugin implements: `docs/plugins.md` has a complete example.

A package of one's own registers a `ModelPlugin` in the entry-point group `sluice.models`, a factory of a
`LogitsProcessor` in `sluice.logits_processors`, one of a `SamplingStrategy` in `sluice.sampling_strategies`, or an
`AttentionPlugin` in `sluice.attention`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from sluice_server.engine.models.attention import PagedAttention
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.model import Model
from sluice_server.engine.models.traits import ArchitectureTraits

API = 1  # version of this interface; a plugin states the one that it was written for


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessorContext:
    """What a logits processor or a sampling strategy may know of the server.

    Attributes:
        vocab_size: width of the logits.
        eos_ids: ids that end an output.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]


class LogitsProcessor(Protocol):
    """Changes the logits of requests that ask for it. One object serves all requests of an engine process.

    Attributes:
        api: the version of this interface, `API`.
    """

    api: int

    def check(self, arguments: Mapping[str, str]) -> None:
        """Raises ValueError saying what is wrong with a request's arguments; the request is then refused."""

    def apply(
        self, arguments: Mapping[str, str], prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Tensor
    ) -> None:
        """Changes `logits`, float32 [vocab_size] of one output, in place.

        It must depend on these arguments alone and keep nothing: outputs are computed again after preemption and
        replay, and drafts ask for tokens that may be discarded.
        """


class SamplingStrategy(Protocol):
    """Chooses the tokens of requests that ask for it. One object serves all requests of an engine process.

    Attributes:
        api: the version of this interface, `API`.
    """

    api: int

    def check(self, arguments: Mapping[str, str]) -> None:
        """Raises ValueError saying what is wrong with a request's arguments; the request is then refused."""

    def choose(
        self,
        arguments: Mapping[str, str],
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        logits: Tensor,
        uniform: float,
    ) -> int:
        """Returns the id of the next token.

        `logits`, float32 [vocab_size], are to be read only: minus infinity is what the request does not allow, and must
        not be chosen. `uniform`, between 0 and 1, is a function of the request's seed, output and position. The choice
        must depend on these arguments alone: outputs are computed again after preemption and replay, and drafts ask for
        tokens that may be discarded.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class ModelPlugin:
    """An architecture of another package; its entry point is named as in config.json.

    Attributes:
        api: the version of this interface, `API`.
        traits: returns the traits of a checkpoint.
        model: makes the model: `Model`, or a subclass that takes the same arguments.
    """

    api: int
    traits: Callable[[ModelConfig], ArchitectureTraits]
    model: type[Model] = Model


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlugin:
    """An attention of another package, which computes all layers of a model in place of the kernels' own.

    Attributes:
        api: the version of this interface, `API`.
        attend: computes it. It may read keys and values of the step's sequences from the cache, and writes none; a
            row's result must not depend on other rows.
    """

    api: int
    attend: PagedAttention
