"""Writes one log line for each request that ends, if enabled; with its prompt if that is enabled too."""

import logging
from typing import NamedTuple

from sluice_server.services.messages.work import (
    ChatPrompt,
    Detokenize,
    DropAdapter,
    Embed,
    LoadAdapter,
    PairPrompt,
    PromptInput,
    TextPrompt,
    Work,
    unpack_ids,
)
from sluice_server.services.telemetry import logs
from sluice_server.services.telemetry.observed import RefusedRequest, RequestUsage, StartedRequest

logger = logging.getLogger(__name__)


class Ended(NamedTuple):
    """How many seconds a request took, and when it ended, by the wall clock."""

    took_s: float
    at_s: float


class RequestLog:
    """Writes the lines; with `is_on` false, nothing."""

    def __init__(self, *, is_on: bool, shows_prompts: bool) -> None:
        self.is_on = is_on
        self._shows_prompts = shows_prompts

    def ended(
        self, started: StartedRequest, traceparent: str, end: tuple[str, str], used: RequestUsage, when: Ended
    ) -> None:
        """Log the end of a request; `end` is the name of its status and its reason. The line's time is that of the
        end, as it may be written later."""
        if not self.is_on or not logger.isEnabledFor(logging.INFO):
            return
        code, reason = end
        envelope = started.envelope
        fields: dict[str, object] = {
            **logs.trace_of(traceparent),
            "request_id": envelope.request_id,
            "tenant": envelope.tenant,
            "model": envelope.model,
            "code": code,
            "reason": reason or used.finish_reason,
            "prompt_tokens": used.num_prompt,
            "cached_tokens": used.num_cached,
            "completion_tokens": used.num_completion,
            "engine": used.engine,
            "routing": str(used.routed.reason) if used.routed is not None else "",
            "ttft_s": round(used.ttft_s, 4),
            "duration_s": round(when.took_s, 4),
        }
        if self._shows_prompts:
            fields["prompt"] = prompt_of(started.work)
        about = {logs.FIELDS: fields}
        record = logger.makeRecord(logger.name, logging.INFO, "", 0, "%s ended", (started.method,), None, None, about)
        record.created, record.msecs = when.at_s, when.at_s % 1 * 1e3
        logger.handle(record)

    def refused(self, refused: RefusedRequest, traceparent: str) -> None:
        """Log a request that was refused at admission."""
        if self.is_on:
            about = logs.about_trace(
                traceparent, tenant=refused.tenant, code=refused.error.code.name, reason=refused.error.reason
            )
            logger.info("%s refused", refused.method, extra=about)


def prompt_of(work: Work) -> object:
    """Returns the prompt, or the token ids to detokenize, as plain values."""
    if isinstance(work, Detokenize):
        return unpack_ids(work.ids)
    if isinstance(work, Embed):
        return [plain(one) for one in work.inputs]
    if isinstance(work, LoadAdapter | DropAdapter):
        return work.name
    return plain(work.prompt)


def plain(prompt: PromptInput | PairPrompt) -> object:
    """Returns one prompt as plain values."""
    if isinstance(prompt, PairPrompt):
        return [prompt.first, prompt.second]
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if isinstance(prompt, ChatPrompt):
        return [str(message) for message in prompt.messages]
    return unpack_ids(prompt.ids)
