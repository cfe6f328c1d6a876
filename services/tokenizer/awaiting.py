"""A prompt that still lacks its grammar, and the wait for it: one future for what two threads do one after the other.

Knows no grammar and no stage.
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Executor, Future

import msgspec

from engine.checks import check_params
from engine.request import Limits
from services.messages import Envelope, Message, Prompt
from services.tokenizer.grammar_frames import Job


@dataclasses.dataclass(frozen=True, slots=True)
class Unconstrained:
    """A prompt that lacks its grammar."""

    prompt: Prompt
    job: Job


def chained(
    first: "Future[Message | Unconstrained]", executor: Executor, then: Callable[[Unconstrained], Message]
) -> Future[Message]:
    """What `first` makes, or what `then` makes of it in the executor; cancelled, nothing more is begun."""
    whole: Future[Message] = Future()

    def go_on(done: "Future[Message | Unconstrained]") -> None:
        if done.cancelled() or not whole.set_running_or_notify_cancel():
            return
        if done.exception() is None and isinstance(made := done.result(), Unconstrained):
            executor.submit(then, made).add_done_callback(end)
        else:
            end(done)

    def end(done: "Future[Message] | Future[Message | Unconstrained]") -> None:
        error = done.exception()
        if error is not None:
            whole.set_exception(error)
            return
        made = done.result()
        assert not isinstance(made, Unconstrained)
        whole.set_result(made)

    whole.add_done_callback(lambda whole: first.cancel() if whole.cancelled() else None)
    first.add_done_callback(go_on)
    return whole


def with_grammar(prompt: Prompt, grammar: str, limits: Limits, took: float = 0.0) -> Prompt:
    """The prompt, `took` seconds later. Raises ServiceError for parameters that do not go with a grammar."""
    params = dataclasses.replace(prompt.params, grammar=grammar)
    check_params(params, limits)
    return msgspec.structs.replace(
        prompt, envelope=later(prompt.envelope, took), params=params, tokenize_s=prompt.tokenize_s + took
    )


def later(envelope: Envelope, seconds: float) -> Envelope:
    """The envelope with its time left re-stamped after `seconds` in this stage."""
    if envelope.time_left_s is None:
        return envelope
    return msgspec.structs.replace(envelope, time_left_s=envelope.time_left_s - seconds)
