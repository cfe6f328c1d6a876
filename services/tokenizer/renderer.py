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
    Closed,
    NoPlace,
    Rendered,
    RenderJob,
    RenderSetup,
    TemplateError,
    TemplateRefusal,
    TemplateSetup,
    TooLong,
)

MEMORY_BYTES = 512 << 20  # of address space; an idle child maps about 60 MiB
MAX_REFUSAL = 1024  # characters of a template's error message
MODULE = "sluice_server.services.tokenizer.render_child"
FIELD = "prompt.chat"
THE_MODELS = "the model's chat template"
THE_REQUESTS = "the request's chat template"


class Renderers:
    """A pool of at most `num` renderer processes for the checkpoint's templates, or for those of requests."""

    def __init__(self, templates: TemplateSetup | None, num: int = 1, patience: CpuTimeLimit = PATIENCE) -> None:
        """`templates`: the checkpoint's; None: each call of `render` brings its own."""
        setup = RenderSetup(MEMORY_BYTES, templates)
        self._template, self._field = (THE_MODELS, FIELD) if templates else (THE_REQUESTS, "chat.template")
        self._children: ChildPool[Answer] = ChildPool(MODULE, setup, _decode, num, patience)

    def render(self, prompt: ChatPrompt, max_bytes: int, templates: TemplateSetup | None = None) -> Rendered:
        """Returns the prompt as text. Raises ServiceError: rejected by the template, or a limit."""
        answer = self._ask(RenderJob(prompt, max_bytes, templates))
        template, field = self._template, self._field
        match answer:
            case Rendered():
                return answer
            case TemplateRefusal():
                raise invalid(field, f"{template} refuses: {answer.message[:MAX_REFUSAL]}")
            case TooLong():
                message = f"{template} writes more than {max_bytes} bytes for these messages"
                raise invalid(field, message, limit=max_bytes)
            case TemplateError():
                raise invalid(field, f"{template} cannot render these messages: {answer.message}")
            case Closed():
                text = f"{template} leaves out the last message, or a part of it, which cannot be continued"
                raise invalid("chat.continue_final_message", text)
            case NoPlace(name, what):
                text = f"chat.{name}: {template} has no place for {what or name}: leave them out"
                raise unsupported(f"chat.{name}", text)
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
            message = f"{self._template} did not end within {limit:g} s for these messages"
            raise invalid(self._field, message, limit=limit) from error
        except DiedError as error:
            raise invalid(self._field, f"{self._template} cannot render these messages") from error
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
