"""Runs requests to their ends: all at once, or one whose text is told as it comes. Releases them on every path."""

import functools
from collections.abc import Callable, Iterator, Sequence

from sluice_server.engine.errors import ServiceError, invalid
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.requests.open_request import OpenRequest, Outcome
from sluice_server.services.offline.errors import PromptError
from sluice_server.services.offline.pipeline import Pipeline

Progress = Callable[[int, int], None]  # requests that have ended, tokens that there are


def run(pipeline: Pipeline, asked: Sequence[TranslatedRequest], progress: Progress) -> list[OpenRequest]:
    """Each ended well, in their order. Raises PromptError for the first that did not: before the first step where that
    can be known."""
    requests: list[OpenRequest] = []
    ended: list[int] = []
    num_ended = num_tokens = 0
    try:
        for index, one in enumerate(asked):
            pipeline.open(one, requests)
            requests[index].delivery.on_news = functools.partial(_note, requests[index], index, ended)
            _check(requests[index], index)
        pipeline.wait_encoded()
        while num_ended < len(requests):
            for index in sorted(ended):
                _check(requests[index], index)
            pipeline.close(*(requests[index] for index in ended))
            num_ended += len(ended)
            num_tokens += sum([requests[index].num_tokens for index in ended])
            ended.clear()
            progress(num_ended, num_tokens)
            if num_ended < len(requests):
                pipeline.turn()
        return requests
    finally:
        pipeline.close(*requests)


def stream(pipeline: Pipeline, asked: TranslatedRequest) -> Iterator[str]:
    """The text of its one output as it becomes certain. Raises PromptError."""
    if asked.num_outputs > 1:
        raise PromptError(
            0, invalid("n", f"{asked.num_outputs} outputs, and a stream is of one: use generate", limit=1)
        )
    opened: list[OpenRequest] = []
    try:
        pipeline.open(asked, opened)
        (request,) = opened
        pipeline.wait_encoded()
        is_over = False
        while not is_over:
            if request.outcome is None:  # else a turn of another call has ended it
                pipeline.turn()
            is_over = request.outcome is not None
            text = "".join([one.text for one in request.delivery.take_all(0)])
            if text:
                yield text
        _check(request, 0)
    finally:
        pipeline.close(*opened)


def answer(pipeline: Pipeline, asked: TranslatedRequest) -> Outcome:
    """Of what needs no engine. Raises ServiceError."""
    opened: list[OpenRequest] = []
    try:
        pipeline.open(asked, opened)
        (request,) = opened
        if isinstance(request.outcome, ServiceError):
            raise request.outcome.with_traceback(None)
        assert request.outcome is not None, "the tokenizer answers at once"
        return request.outcome
    finally:
        pipeline.close(*opened)


def _note(request: OpenRequest, index: int, ended: list[int]) -> None:
    """There is news of it, which may be its end."""
    if request.outcome is not None:
        ended.append(index)


def _check(request: OpenRequest, index: int) -> None:
    """Raise PromptError if it failed."""
    if isinstance(request.outcome, ServiceError):
        raise PromptError(index, request.outcome.with_traceback(None))
