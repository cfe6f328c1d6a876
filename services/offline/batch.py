"""Runs requests to their ends: a batch at once, or one request whose text is streamed. Releases them on every path."""

import functools
from collections.abc import Callable, Iterator, Sequence

from sluice_server.engine.errors import ServiceError, invalid
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.requests.open_request import OpenRequest, Outcome
from sluice_server.services.offline.errors import PromptError
from sluice_server.services.offline.pipeline import Pipeline

Progress = Callable[[int, int], None]  # called with the number of ended requests and of their tokens


def run(pipeline: Pipeline, asked: Sequence[TranslatedRequest], progress: Progress) -> list[OpenRequest]:
    """Runs all requests and returns them in order, all finished.

    Raises PromptError for the first one that failed: before the first step where the error is known by then.
    """
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
    """Yields the text of the single output as it becomes certain. Raises PromptError."""
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
            if request.outcome is None:  # otherwise a turn of another call has ended it
                pipeline.turn()
            is_over = request.outcome is not None
            text = "".join([one.text for one in request.delivery.take_all(0)])
            if text:
                yield text
        _check(request, 0)
    finally:
        pipeline.close(*opened)


def answer(pipeline: Pipeline, asked: TranslatedRequest) -> Outcome:
    """Returns the result of a request that needs no engine. Raises ServiceError."""
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
    """Adds a request to `ended` if it has ended; called when its state changes."""
    if request.outcome is not None:
        ended.append(index)


def _check(request: OpenRequest, index: int) -> None:
    """Raises PromptError if the request failed."""
    if isinstance(request.outcome, ServiceError):
        raise PromptError(index, request.outcome.with_traceback(None))
