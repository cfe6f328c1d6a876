"""Renders chat templates in child processes that can be killed, so that a bad template fails its own request only.

Takes prompts, gives text or a `ServiceError`. Thread-safe.
"""

from typing import assert_never

import msgspec

from sluice_server.engine.errors import Code, ServiceError, invalid, unsupported
from sluice_server.services.messages.work import ChatPrompt
from sluice_server.services.tokenizer.child_pool import (
    PATIENCE,
    ChildPool,
    CpuTimeLimit,
    DiedError,
    OverdueError,
    UnreadyError,
)
from sluice_server.services.tokenizer.render_frames import (
    Answer,
    NoPlaceForTools,
    Rendered,
    RenderJob,
    RenderSetup,
    TemplateError,
    TemplateRefusal,
    TooLong,
)

MEMORY_BYTES = 512 << 20  # of address space; an idle child maps about 60 MiB
MAX_REFUSAL = 1024  # characters of a template's error message
MODULE = "sluice_server.services.tokenizer.render_child"
FIELD = "prompt.chat"
_CANNOT = "the model's chat template cannot render these messages"


class Renderers:
    """A pool of at most `num` renderer processes."""

    def __init__(self, setup: RenderSetup, num: int = 1, patience: CpuTimeLimit = PATIENCE) -> None:
        self._children: ChildPool[Answer] = ChildPool(MODULE, setup, _decode, num, patience)

    def render(self, prompt: ChatPrompt, max_bytes: int) -> Rendered:
        """Returns the prompt as text. Raises ServiceError INVALID_ARGUMENT: rejected by the template, or a limit."""
        answer = self._ask(RenderJob(prompt, max_bytes))
        match answer:
            case Rendered():
                return answer
            case TemplateRefusal():
                raise invalid(FIELD, f"the model's chat template refuses: {answer.message[:MAX_REFUSAL]}")
            case TooLong():
                raise invalid(
                    FIELD,
                    f"the model's chat template writes more than {max_bytes} bytes for these messages",
                    limit=max_bytes,
                )
            case TemplateError():
                raise invalid(FIELD, f"{_CANNOT}: {answer.message}")
            case NoPlaceForTools():
                raise unsupported(
                    "chat.tools", "chat.tools: the model's chat template has no place for tools: leave them out"
                )
            case _:
                assert_never(answer)

    def close(self) -> None:
        """Ends the children. No render may be running."""
        self._children.close()

    def _ask(self, job: RenderJob) -> Answer:
        try:
            return self._children.ask(job)
        except OverdueError as error:
            limit = error.limit_s
            message = f"the model's chat template did not end within {limit:g} s for these messages"
            raise invalid(FIELD, message, limit=limit) from error
        except DiedError as error:
            raise invalid(FIELD, _CANNOT) from error
        except UnreadyError as error:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "MODEL_INVALID",
                "prompt.chat: the model's chat template cannot be compiled; send the prompt as text",
                field=FIELD,
            ) from error


def _decode(answer: bytes) -> Answer:
    decoded: Answer = msgspec.msgpack.decode(answer, type=Answer)
    return decoded
