"""What the scheduler tells of its requests: tokens that were sampled, and how an output or a request ended.

Frozen values. Plain numbers for times; services make spans of them.
"""

import dataclasses
from typing import NamedTuple, TypeAlias

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.plan import TokenLogprob
from sluice_server.engine.request import FinishReason

Failure: TypeAlias = tuple[str, ServiceError]  # request id; the whole request ends


@dataclasses.dataclass(frozen=True, slots=True)
class RequestTimes:
    """Plain durations in seconds of an output that ended.

    Attributes:
        queue_s: arrival of the request to first scheduled.
        prefill_s: first scheduled to first token.
        decode_s: first token to the last.
        end_s: engine clock at the end.
        num_preemptions: of all outputs of the request so far.
        num_drafted, num_accepted: tokens of the same that were drafted for them, and those of these that were kept.
        drafted_at, accepted_at: the same by their place in the draft.
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
    """What the engine found when it first scheduled a request.

    Attributes:
        prompt_scores: log probabilities of the prompt's tokens from the second on, where they are asked for; with the
            request's first event only.
    """

    num_prompt: int
    num_cached: int
    max_tokens: int
    prompt_scores: tuple[TokenLogprob, ...] | None = None


class Sampled(NamedTuple):
    """Event: tokens of one output, contiguous from `first_index` (0 is its first token).

    A named tuple, as one is made for every token: a third of a frozen dataclass's time.

    Attributes:
        logprobs: as many as token_ids, or none.
        admission: on the first event of each output.
        finish: the output ends with these tokens (there may be none: it was cancelled or cut short).
        times: with finish.
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
