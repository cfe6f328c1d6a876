"""What is done at once, where it comes in, as two changes of threads would take longer than the work.

Knows no tokenizer.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

from sluice_server.services.messages.messages import Append, Submit
from sluice_server.services.messages.work import Generate, TokenPrompt

MAX_BYTES = 4 * 4096  # of ids: some 50 µs on a Skylake core, a third of what the threads took for 64 ids

_P = ParamSpec("_P")
_T = TypeVar("_T")


class InlineExecutor(Executor):
    """Runs what it is given before it returns."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """What became of it."""
        future: Future[_T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def is_brief(message: Submit | Append) -> bool:
    """Whether it is a prompt of few token ids, with no text to encode beside them."""
    work = message.work if isinstance(message, Submit) else None
    return (
        isinstance(work, Generate)
        and isinstance(work.prompt, TokenPrompt)
        and len(work.prompt.ids) <= MAX_BYTES
        and not (work.more or work.bad_words or work.echo)
    )
