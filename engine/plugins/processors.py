"""The logits processors of an engine: refuses arguments, changes logits, and names the processor that fails.

A processor's exception ends the request that asked for it and no other; its text is for the log alone.
"""

import logging
import traceback
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sluice_server.engine.errors import ServiceError, invalid, processor_failed
from sluice_server.engine.plugins.interface import LogitsProcessor
from sluice_server.engine.request import ProcessorCall

FIELD = "sampling.logits_processors"
logger = logging.getLogger(__name__)


class LogitsProcessors:
    """Logits processors by name."""

    def __init__(self, each: Mapping[str, LogitsProcessor]) -> None:
        self._each = each

    def check(self, calls: Sequence[ProcessorCall]) -> None:
        """Raises ServiceError for arguments that a processor refuses; INTERNAL if it fails otherwise. Names and sizes
        must have been checked."""
        for at, call in enumerate(calls):
            try:
                self._each[call.name].check(dict(call.arguments))
            except ValueError as error:
                text = f"{call.name!r} refuses them: {error}".splitlines()[0]
                raise invalid(f"{FIELD}[{at}].arguments", text) from error
            except Exception as error:
                logger.exception("logits processor %s failed to check its arguments", call.name)
                raise processor_failed(call.name, f"raised {type(error).__name__}") from error

    def apply(
        self, calls: Sequence[ProcessorCall], prompt: Sequence[int], output: Sequence[int], logits: Tensor
    ) -> ServiceError | None:
        """Changes the logits [V] of one output in place, by one processor after the other.

        Returns the error INTERNAL if one fails.
        """
        for call in calls:
            try:
                self._each[call.name].apply(dict(call.arguments), prompt, output, logits)
            except Exception as error:
                traceback.clear_frames(error.__traceback__)  # the frames' locals hold tensors
                made = processor_failed(call.name, f"raised {type(error).__name__}")
                made.__cause__ = error  # for the caller's log, which has the request's name
                return made
            # Of those that ask for one: NaN would be drawn as any other number.
            if not bool(torch.isfinite(logits).any()) or bool(torch.isnan(logits).any()):
                return processor_failed(call.name, "left no number to choose a token by")
        return None


NO_PROCESSORS = LogitsProcessors({})
