"""Events that the scheduler emits for its requests: sampled tokens, and how an output or a request ended.

Frozen values. Times are plain numbers; services make spans of them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.plan import TokenLogprob
from sluice_server.engine.request import FinishReason

Failure: TypeAlias = tuple[str, ServiceError]  # request id; the whole request ends


@dataclasses.dataclass(frozen=True, slots=True)
class RequestTimes:
    """Durations in seconds of an output that ended, with counts of its request.

    Attributes:
        queue_s: from the arrival of the request to its first scheduling.
        prefill_s: from the first scheduling to the first token.
        decode_s: from the first token to the last.
        end_s: engine clock at the end.
        num_preemptions: preemptions of all outputs of the request so far.
        num_drafted, num_accepted: tokens drafted for all outputs of the request, and those of them that were kept.
        drafted_at, accepted_at: the same by position in the draft.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    end_s: float
    num_preemptions: int
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class AdmissionReport:
    """The state of a request when the engine first scheduled it, sent with the first event of each output.

    Attributes:
        num_prompt: tokens of the prompt.
        num_cached: prompt tokens found in the prefix cache.
        max_tokens: effective limit of an output.
        prompt_scores: log probabilities of the prompt's tokens from the second on, if requested; with the request's
            first event only.
    """

    num_prompt: int
    num_cached: int
    max_tokens: int
    prompt_scores: tuple[TokenLogprob, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Pooled:
    """Event: a request ended with the vector of its prompt.

    Attributes:
        vector: float32, little-endian; neither scaled nor cut.
        num_prompt: tokens of the prompt.
        num_cached: prompt tokens found in the prefix cache.
    """

    request_id: str
    vector: bytes
    num_prompt: int
    num_cached: int
    times: RequestTimes


class Sampled(NamedTuple):
    """Event: tokens of one output, contiguous from `first_index` (0 is its first token).

    A named tuple, since one is created for every token: it takes a third of a frozen dataclass's time.

    Attributes:
        logprobs: as many as token_ids, or none.
        admission: set on the first event of each output.
        finish: set if the output ends with these tokens (none if it was cancelled or cut short).
        times: set together with finish.
        is_last: the request ends with this event.
        num_drafted, num_accepted: tokens that were drafted for these, and those of them that were kept.
    """

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    admission: AdmissionReport | None
    finish: FinishReason | None
    times: RequestTimes | None
    output_index: int = 0
    is_last: bool = False
    num_drafted: int = 0
    num_accepted: int = 0


# Makes an event of all its fields: half the time of a call with eleven arguments, and a step makes hundreds.
EVENT_OF: Callable[[tuple[object, ...]], Sampled] = functools.partial(tuple.__new__, Sampled)
