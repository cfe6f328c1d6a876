"""Chains the encoding of a prompt with the compilation of its grammar: one future for work on two executors."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

import msgspec

from sluice_server.engine.checks import check_params
from sluice_server.engine.request import Limits
from sluice_server.services.messages.messages import Envelope, Prompt

_T = TypeVar("_T")


def cancelling(whole: "Future[_T]", first: "Future[_T]") -> Callable[[], None]:
    """Has `first` cancelled when `whole` is, and returns what ends that.

    `first` calls what completes `whole`. Where that is never ended, both keep each other, with their results, until
    garbage is collected.
    """
    awaited = [first]

    def ended(done: "Future[_T]") -> None:
        if done.cancelled():
            for one in [*awaited]:
                one.cancel()

    whole.add_done_callback(ended)
    return awaited.clear


def chained(
    first: "Future[_T]", executor: Executor, at_once: Callable[[_T], _T | None], then: Callable[[_T], _T]
) -> "Future[_T]":
    """Returns a future of `at_once(first's result)`; where that is None, of `then(first's result)`, run in `executor`.

    When it is cancelled, nothing more is started.
    """
    whole: Future[_T] = Future()

    def go_on(done: "Future[_T]") -> None:
        forget()
        if done.cancelled() or not whole.set_running_or_notify_cancel():
            return
        if done.exception() is not None:
            whole.set_exception(done.exception())
            return
        try:
            made = at_once(done.result())
        except Exception as error:
            whole.set_exception(error)
            return
        if made is not None:
            whole.set_result(made)
        else:
            executor.submit(then, done.result()).add_done_callback(end)

    def end(done: "Future[_T]") -> None:
        if done.exception() is not None:
            whole.set_exception(done.exception())
        else:
            whole.set_result(done.result())

    forget = cancelling(whole, first)
    first.add_done_callback(go_on)
    return whole


def with_grammar(prompt: Prompt, grammar: str, limits: Limits, took: float = 0.0) -> Prompt:
    """Returns the prompt with a grammar, `took` seconds later. Raises ServiceError if its parameters exclude one."""
    params = dataclasses.replace(prompt.params, grammar=grammar)
    check_params(params, limits)
    return msgspec.structs.replace(
        prompt, envelope=later(prompt.envelope, took), params=params, tokenize_s=prompt.tokenize_s + took
    )


def later(envelope: Envelope, seconds: float) -> Envelope:
    """Returns the envelope with its time left reduced by `seconds`."""
    if envelope.time_left_s is None:
        return envelope
    return msgspec.structs.replace(envelope, time_left_s=envelope.time_left_s - seconds)
