"""What a plugin implements: `docs/plugins.md` has a complete example.

A package of one's own registers a `ModelPlugin` in the entry-point group `sluice.models`, or a factory of a
`LogitsProcessor` in `sluice.logits_processors`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.model import Model
from sluice_server.engine.models.traits import ArchitectureTraits

API = 1  # version of this interface; a plugin states the one that it was written for


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessorContext:
    """What a logits processor may know of the server.

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
