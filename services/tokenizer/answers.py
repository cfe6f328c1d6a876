"""Answers one message of the tokenizer: a prompt as token ids, a result, or an error.

Runs in a thread of the tokenizer process or in a process of its own; no queues, no I/O but the encoder's. Compiles no
grammar; see `GrammarJob`.
"""

import dataclasses
import time
from collections.abc import Sequence

import msgspec

from sluice_server.engine.checks import check_embeds, check_num_images, check_params, check_pooled, check_prompt
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.prompt_embeds import PLACEHOLDER
from sluice_server.engine.request import Limits, SamplingParams
from sluice_server.services.messages.details import Detokenized, Tokenized
from sluice_server.services.messages.messages import (
    AdapterCall,
    Append,
    Envelope,
    Failed,
    Inputs,
    Prompt,
    Result,
    Submit,
    failed,
)
from sluice_server.services.messages.work import (
    ChatPrompt,
    Detokenize,
    DropAdapter,
    Embed,
    Generate,
    LoadAdapter,
    PromptInput,
    Sections,
    TextOptions,
    TextPrompt,
    Tokenize,
    TokenPrompt,
    Work,
    pack_ids,
)
from sluice_server.services.text_bound import check_bytes
from sluice_server.services.tokenizer.awaiting import later
from sluice_server.services.tokenizer.constrained import job_of
from sluice_server.services.tokenizer.encoding import RenderedChat, TextEncoder, unpack_checked
from sluice_server.services.tokenizer.grammar_frames import GrammarJob
from sluice_server.services.tokenizer.image_places import check_places


class EncodedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of encoding one message."""

    answer: Prompt | Inputs | AdapterCall | Result | Append | Failed
    prompt_report: Result | None = None  # the prompt's tokens, sent ahead of the answer
    job: GrammarJob | None = None  # the grammar that the prompt still needs
    images_s: tuple[float, float] | None = None  # when its images were begun, and when all were prepared


class Answers:
    """Answers messages with one tokenizer. Thread-safe."""

    def __init__(self, encoder: TextEncoder, limits: Limits) -> None:
        self.encoder = encoder
        self._limits = limits
        self._longest = encoder.longest_token

    def answer(self, message: Submit | Append, start: float, rendered: RenderedChat | None = None) -> EncodedMessage:
        """Answers a message that arrived at `start`; errors become `Failed`.

        `rendered` is the message's chat, if it is rendered already.
        """
        try:
            if isinstance(message, Append):
                ids = pack_ids(self._encode_more(message.piece))
                return EncodedMessage(Append(message.envelope, TokenPrompt(ids), message.index))
            return self._do(message, message.work, start, rendered)
        except ServiceError as error:
            return EncodedMessage(failed(message.envelope, error))

    def prepare(self, message: Submit | Append) -> RenderedChat | None:
        """Renders the message's chat, if it has one, and checks the prompt's length in bytes; encodes nothing.

        Raises ServiceError for a prompt that is certain to be rejected.
        """
        work = message.work if isinstance(message, Submit) else None
        if not isinstance(work, Generate | Tokenize):
            return None
        chat = self.encoder.render(work.prompt, self._limits) if isinstance(work.prompt, ChatPrompt) else None
        if isinstance(work, Generate):
            self._check_bytes(work, chat)
        return chat

    def _do(self, submit: Submit, work: Work, start: float, rendered: RenderedChat | None) -> EncodedMessage:
        envelope = submit.envelope
        match work:
            case Generate():
                return self._prompt(submit, work, start, rendered)
            case Tokenize():
                return EncodedMessage(Result(envelope, self._tokenize(work, rendered)))
            case Embed():
                return EncodedMessage(self._inputs(envelope, work, start))
            case LoadAdapter() | DropAdapter():
                return EncodedMessage(AdapterCall(envelope, work))
            case Detokenize():
                decoded = self.encoder.decode(work.ids, self._limits, work.skip_special_tokens)
                return EncodedMessage(Result(envelope, Detokenized(decoded)))

    def _prompt(self, submit: Submit, work: Generate, start: float, rendered: RenderedChat | None) -> EncodedMessage:
        check_params(work.params, self._limits)
        ids, sections = self._encode(work, rendered)
        ids = ids[-work.keep_last :]
        if work.images:  # their sizes, and so their tokens, are known when they are decoded: see `PromptImages`
            form = check_num_images(len(work.images), self._limits, "prompt.chat")
            check_places(ids, len(work.images), form, "prompt.chat")
        if work.embeds is not None:
            check_embeds(work.embeds, self._limits)
            ids = [PLACEHOLDER] * work.embeds.num_tokens + ids
        for piece in work.more:
            ids = ids + self._encode_more(piece)
        check_prompt(len(ids), work.params, self._limits)
        prompt_report = Result(submit.envelope, self._tokenized(ids)) if work.echo else None
        params = self._params(work)
        took = time.monotonic() - start
        envelope, text = later(submit.envelope, took), _text(work.text, sections)
        prompt = Prompt(
            *(envelope, pack_ids(ids), params, work.stops, work.scheduling, took, text, submit.resume, work.embeds),
            adapter=work.adapter,
        )
        return EncodedMessage(prompt, prompt_report, job_of(work, sections, self.encoder.mark))

    def _inputs(self, envelope: Envelope, work: Embed, start: float) -> Inputs:
        """Encodes all inputs; an error names the input."""
        packed, num_first = [], []
        for at, one in enumerate(work.inputs):
            field = f"{work.field}[{at}]"
            ids, first = self.encoder.encode_input(one, self._limits, field, work.instruction, work.truncation)
            check_pooled(len(ids), self._limits, field)
            packed.append(pack_ids(ids))
            num_first.append(len(ids) if first is None else first)
        took = time.monotonic() - start
        has_second = any(4 * num < len(ids) for num, ids in zip(num_first, packed, strict=True))
        split = tuple(num_first) if has_second else ()
        return Inputs(later(envelope, took), tuple(packed), work.options, work.scheduling, took, work.field, split)

    def _encode(self, work: Generate, rendered: RenderedChat | None) -> tuple[list[int], Sections]:
        """Returns the token ids of a prompt, and the sections that its output may have."""
        if not isinstance(work.prompt, ChatPrompt):
            self._check_bytes(work, None)
            return self.encoder.encode(work.prompt, self._limits), Sections()
        chat = rendered or self.encoder.render(work.prompt, self._limits)
        self._check_bytes(work, chat)
        form = self._limits.images if work.images else None
        return self.encoder.encode_chat(chat, self._limits, form), chat.sections

    def _check_bytes(self, work: Generate, chat: RenderedChat | None) -> None:
        """Raises ServiceError for a text that is certain to exceed the context, unless the prompt is truncated."""
        text = work.prompt.text if isinstance(work.prompt, TextPrompt) else chat.text if chat else ""
        if not work.keep_last:  # a character has at least one byte
            check_bytes(len(text), self._longest, work.params, self._limits)

    def _encode_more(self, piece: TextPrompt | TokenPrompt) -> list[int]:
        """Encodes a further piece of a prompt."""
        if isinstance(piece, TextPrompt):
            return self.encoder.encode_more(piece.text, self._limits)
        return unpack_checked(piece.ids, self._limits, "append.token_ids")

    def _tokenize(self, work: Tokenize, rendered: RenderedChat | None) -> Tokenized:
        prompt = self._rendered(work.prompt, rendered)
        if work.offsets and not isinstance(prompt, TokenPrompt):
            ids, starts, ends = self.encoder.place(prompt, self._limits)
            text = prompt.text if isinstance(prompt, RenderedChat) else ""
            return msgspec.structs.replace(
                self._tokenized(ids), starts=pack_ids(starts), ends=pack_ids(ends), text=text
            )
        if isinstance(prompt, RenderedChat):
            ids = self.encoder.encode_chat(prompt, self._limits)
        else:
            ids = self.encoder.encode(prompt, self._limits)
        return Tokenized(b"", {}, num_tokens=len(ids)) if work.count_only else self._tokenized(ids)

    def _rendered(self, prompt: PromptInput, rendered: RenderedChat | None) -> TextPrompt | TokenPrompt | RenderedChat:
        if isinstance(prompt, ChatPrompt):
            return rendered or self.encoder.render(prompt, self._limits)
        return prompt

    def _tokenized(self, ids: Sequence[int]) -> Tokenized:
        distinct = list(dict.fromkeys(ids))
        return Tokenized(pack_ids(ids), dict(zip(distinct, self.encoder.pieces(distinct), strict=True)))

    def _params(self, work: Generate) -> SamplingParams:
        """Returns the sampling parameters with the token ids of the bad words."""
        if not work.bad_words:
            return work.params
        params = dataclasses.replace(work.params, bad_words=self.encoder.encode_words(work.bad_words, self._limits))
        check_params(params, self._limits)
        return params


def _text(asked: TextOptions, sections: Sections) -> TextOptions:
    """Returns the text options with the sections that are to be split, or None for no split."""
    found = sections if asked.split_sections and (sections.reasoning or sections.tools) else None
    return msgspec.structs.replace(asked, sections=found)
