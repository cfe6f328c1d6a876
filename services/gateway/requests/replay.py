"""A request as it would be asked for now: as it was opened, with what its client has said since. Pure.

What a process that is new needs to go on with it: the changes are part of the work, so that prompt and bounds are whole
before the first token is sampled again.
"""

import dataclasses

import msgspec

from services.gateway.requests.open_requests import OpenRequest
from services.messages.messages import Append, Cancel, CloseInput, Update
from services.messages.work import Generate, TextPrompt, TokenPrompt, Work


def work_now(request: OpenRequest) -> Work:
    """The work with every change in it."""
    work = request.asked.work
    if not isinstance(work, Generate):
        return work
    params, scheduling = work.params, work.scheduling
    more: list[TextPrompt | TokenPrompt] = []
    for change in request.changes:
        match change:
            case Append(piece=piece):
                more.append(piece)
            case CloseInput():
                scheduling = msgspec.structs.replace(scheduling, is_open=False)
            case Update(max_tokens=max_tokens, priority=priority):
                if max_tokens is not None:
                    params = dataclasses.replace(params, max_tokens=max_tokens)
                if priority is not None:
                    scheduling = msgspec.structs.replace(scheduling, priority=priority)
    if request.allowed is not None:  # credit counts what will be sampled from now on
        scheduling = msgspec.structs.replace(scheduling, credit=max(0, request.allowed - request.num_tokens))
    return msgspec.structs.replace(work, params=params, scheduling=scheduling, more=tuple(more))


def cancels(request: OpenRequest) -> list[Cancel]:
    """Ends of single outputs that were asked for and have not come, for the present attempt."""
    asked = [one.output_index for one in request.changes if isinstance(one, Cancel)]
    return [
        Cancel(request.envelope, index)
        for index in dict.fromkeys(asked)
        if index is not None and request.outputs[index].last is None
    ]
