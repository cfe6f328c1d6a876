"""The logits processors and sampling strategies of an engine: they refuse arguments, change logits, and choose tokens.

An exception of one ends the request that asked for it and no other; its text is for the log alone.
"""

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sluice_server.engine.errors import ServiceError, invalid, processor_failed, strategy_failed
from sluice_server.engine.plugins.interface import LogitsProcessor, SamplingStrategy
from sluice_server.engine.request import ProcessorCall, SamplingParams

PROCESSORS_FIELD, STRATEGY_FIELD = "sampling.logits_processors", "sampling.strategy"
logger = logging.getLogger(__name__)


class Checks(Protocol):
    """What refuses a request's arguments by a ValueError."""

    def check(self, arguments: Mapping[str, str]) -> None: ...


class SamplingPlugins:
    """Logits processors and sampling strategies by name."""

    def __init__(self, processors: Mapping[str, LogitsProcessor], strategies: Mapping[str, SamplingStrategy]) -> None:
        self._processors = processors
        self._strategies = strategies

    def check(self, params: SamplingParams) -> None:
        """Raises ServiceError for arguments that a plugin refuses; INTERNAL if it fails otherwise. Names and sizes must
        have been checked."""
        for at, call in enumerate(params.logits_processors):
            _check(call, self._processors[call.name], f"{PROCESSORS_FIELD}[{at}]", processor_failed)
        if params.strategy is not None:
            _check(params.strategy, self._strategies[params.strategy.name], STRATEGY_FIELD, strategy_failed)

    def apply(
        self, calls: Sequence[ProcessorCall], prompt: Sequence[int], output: Sequence[int], logits: Tensor
    ) -> ServiceError | None:
        """Changes the logits [V] of one output in place, by one processor after the other.

        Returns the error INTERNAL if one fails.
        """
        for call in calls:
            try:
                self._processors[call.name].apply(dict(call.arguments), prompt, output, logits)
            except Exception as error:
                return _caused(processor_failed(call.name, f"raised {type(error).__name__}"), error)
            # Of those that ask for one: NaN would be drawn as any other number.
            if not bool(torch.isfinite(logits).any()) or bool(torch.isnan(logits).any()):
                return processor_failed(call.name, "left no number to choose a token by")
        return None

    def choose(
        self, call: ProcessorCall, prompt: Sequence[int], output: Sequence[int], logits: Tensor, uniform: float
    ) -> int | ServiceError:
        """Returns the id that a strategy chooses by the adjusted logits [V] of one output, or the error INTERNAL."""
        try:
            found = self._strategies[call.name].choose(dict(call.arguments), prompt, output, logits, uniform)
        except Exception as error:
            return _caused(strategy_failed(call.name, f"raised {type(error).__name__}"), error)
        if not isinstance(found, int) or not 0 <= found < len(logits):
            return strategy_failed(call.name, f"returned {found!r:.80}, which is no id")
        if bool(logits[found].isneginf()):
            return strategy_failed(call.name, f"chose the id {found}, which the request does not allow")
        return int(found)


def _check(call: ProcessorCall, plugin: Checks, field: str, failed: Callable[[str, str], ServiceError]) -> None:
    try:
        plugin.check(dict(call.arguments))
    except ValueError as error:
        text = f"{call.name!r} refuses them: {error}".splitlines()[0]
        raise invalid(f"{field}.arguments", text) from error
    except Exception as error:
        logger.exception("the plugin %s failed to check its arguments", call.name)
        raise failed(call.name, f"raised {type(error).__name__}") from error


def _caused(made: ServiceError, error: Exception) -> ServiceError:
    """Returns an error with its cause, for the caller's log, which has the request's name."""
    traceback.clear_frames(error.__traceback__)  # the frames' locals hold tensors
    made.__cause__ = error
    return made


NO_SAMPLING = SamplingPlugins({}, {})
