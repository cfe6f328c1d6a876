"""Wraps a checkpoint's tokenizer: prompts of every form to token ids, ids to text, ids to bytes.

Checks its input against the limits before and after encoding. Thread-safe: `tokenizers` releases the GIL and keeps no
state between calls.
"""

import functools
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, assert_never

import msgspec
from tokenizers import Encoding, Tokenizer

from sluice_server.engine.checks import check_ids
from sluice_server.engine.errors import Code, ServiceError, invalid, unsupported
from sluice_server.engine.images import ImageForm
from sluice_server.engine.models.fields import is_file
from sluice_server.engine.request import Limits
from sluice_server.services.messages.work import (
    ChatMessage,
    ChatPrompt,
    PairPrompt,
    PromptInput,
    Sections,
    TextPrompt,
    TokenPrompt,
    Truncation,
    unpack_ids,
)
from sluice_server.services.text_bound import longest_token
from sluice_server.services.tokenizer.chat import ChatTemplate, TemplateSource, read_template
from sluice_server.services.tokenizer.found_sections import DETECTED, Parsers
from sluice_server.services.tokenizer.image_places import with_words, words_of
from sluice_server.services.tokenizer.pieces import Pieces
from sluice_server.services.tokenizer.places import PlacedTokens, placed

_PROBE_BYTES = 1 << 20


class RenderedChat(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A conversation as text, and the sections that its output may have.

    Attributes:
        cuts: places at which the text is cut before it is encoded, so that content makes no control token.
        add_special_tokens: the tokenizer adds those of its own template.
    """

    text: str
    sections: Sections
    cuts: tuple[int, ...] = ()
    add_special_tokens: bool = False


class EncodedInput(NamedTuple):
    """The token ids of an input of Embed.

    Attributes:
        num_first: how many of them are of the first of two texts, where the tokenizer gives both different types.
    """

    ids: list[int]
    num_first: int | None = None


class TextEncoder:
    """The `tokenizers` library's tokenizer of one checkpoint, with its chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, path: Path | None = None) -> None:
        """`path`: the tokenizer.json that `tokenizer` was read from."""
        self.tokenizer = tokenizer
        self.pieces = Pieces(tokenizer)
        self._path = path
        self._template = template

    @functools.cached_property
    def longest_token(self) -> int:
        """The most bytes of text that one token stands for; 0 where that is not known."""
        return longest_token(self._path) if self._path is not None else 0

    @classmethod
    def load(
        cls,
        directory: Path,
        num_renderers: int = 1,
        source: TemplateSource | None = None,
        parsers: Parsers = DETECTED,
    ) -> "TextEncoder":
        """Reads tokenizer.json and the chat template. Raises ServiceError MODEL_INVALID naming the file.

        At most `num_renderers` chats are rendered at once. `source` is the chat template if it is read already. Call
        `close` if any chat was rendered.
        """
        path = directory / "tokenizer.json"
        tokenizer = load_tokenizer(path)
        added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
        source = source or read_template(directory)
        template = ChatTemplate(source, num_renderers, added_tokens=added, parsers=parsers)
        return cls(tokenizer, template, path)

    def close(self) -> None:
        """Ends the renderer processes."""
        self._template.close()

    def encode(self, prompt: TextPrompt | TokenPrompt, limits: Limits) -> list[int]:
        """Returns the token ids of a prompt. Raises ServiceError INVALID_ARGUMENT naming the field, value and limit."""
        match prompt:
            case TextPrompt():
                return self._encode(prompt.text, limits, "prompt.text", prompt.add_special_tokens)
            case TokenPrompt():
                return unpack_checked(prompt.ids, limits, "prompt.token_ids")
            case _:
                assert_never(prompt)

    def encode_more(self, text: str, limits: Limits) -> list[int]:
        """Returns the token ids of a further piece of a prompt: encoded separately, without special tokens.

        Raises as `encode` does.
        """
        return self._encode(text, limits, "append.text", add_special_tokens=False)

    def encode_input(
        self,
        prompt: PromptInput | PairPrompt,
        limits: Limits,
        field: str,
        instruction: str,
        truncation: Truncation,
    ) -> EncodedInput:
        """Returns one input of Embed as token ids, no longer than the context if it may be truncated. Raises as
        `encode`; `field` names the input."""
        if isinstance(prompt, PairPrompt):
            return self._encode_pair(prompt, limits, field, truncation)
        if isinstance(prompt, ChatPrompt):
            return EncodedInput(self._encode_ranked(prompt, limits, field))
        if isinstance(prompt, TokenPrompt):
            ids = unpack_checked(prompt.ids, limits, field)
            return EncodedInput(ids if truncation is Truncation.NONE else _kept(ids, limits.context_length, truncation))
        return EncodedInput(self._encode_whole(instruction + prompt.text, limits, field, truncation))

    def _encode_whole(self, text: str, limits: Limits, field: str, truncation: Truncation) -> list[int]:
        """Returns the token ids of a text with special tokens, also where its end or its beginning is cut off."""
        if truncation is Truncation.NONE:
            return self._encode(text, limits, field, add_special_tokens=True)
        check_text(text, limits, field)
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        room = limits.context_length - self.tokenizer.num_special_tokens_to_add(is_pair=False)
        encoding.truncate(max(0, room), direction=truncation.value)
        ids: list[int] = self.tokenizer.post_process(encoding).ids
        check_ids(field, ids, limits)
        return ids

    def _encode_pair(self, prompt: PairPrompt, limits: Limits, field: str, truncation: Truncation) -> EncodedInput:
        check_text(prompt.first, limits, field)
        check_text(prompt.second, limits, field)
        if truncation is Truncation.NONE:
            (encoding,) = self.tokenizer.encode_batch_fast([(prompt.first, prompt.second)], add_special_tokens=True)
        else:
            texts = [prompt.first, prompt.second]
            first, second = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            room = limits.context_length - self.tokenizer.num_special_tokens_to_add(is_pair=True)
            lengths = longest_first(len(first.ids), len(second.ids), max(0, room))
            for one, num in zip((first, second), lengths, strict=True):
                one.truncate(num, direction=truncation.value)
            encoding = self.tokenizer.post_process(first, second)
        ids: list[int] = encoding.ids
        check_ids(field, ids, limits)
        types: list[int] = encoding.type_ids
        num_second = sum(types)
        num_first = len(types) - num_second
        if types != [0] * num_first + [1] * num_second:
            text = f"{field}: token types of the tokenizer's pairs are supported as 0 in the first text, then 1"
            raise unsupported(field, text)
        return EncodedInput(ids, num_first if num_second else None)

    def _encode_ranked(self, prompt: ChatPrompt, limits: Limits, field: str) -> list[int]:
        """Returns the token ids of a query and a document, each a turn of its own role in the chat template."""
        if not self._ranks:
            text = f"{field}: the model's chat template has no place for turns of the roles query and document"
            raise unsupported(field, text)
        rendered = self._template.render(prompt, limits.max_prompt_bytes)
        return self._encode(rendered.text, limits, field, add_special_tokens=False, cuts=rendered.cuts)

    @functools.cached_property
    def _ranks(self) -> bool:
        """Whether the chat template writes the turns of a query and of a document."""
        if self._template.source.default is None:
            return False
        turns = ChatMessage("query", "where"), ChatMessage("document", "there")
        text = self._template.render(ChatPrompt(turns), _PROBE_BYTES).text
        return all(one.content is not None and one.content in text for one in turns)

    def render(self, prompt: ChatPrompt, limits: Limits) -> RenderedChat:
        """Returns a conversation as text. Raises ServiceError: no template, rejected messages, or a limit exceeded."""
        rendered = self._template.render(prompt, limits.max_prompt_bytes)
        sections = self._template.sections(prompt, rendered)
        return RenderedChat(rendered.text, sections, rendered.cuts, prompt.add_special_tokens)

    def encode_chat(self, chat: RenderedChat, limits: Limits, form: ImageForm | None = None) -> list[int]:
        """Returns the token ids of a rendered conversation, with `form` of its images if it has any. Raises as
        `encode`."""
        text, cuts = chat.text, chat.cuts
        words = None if form is None else words_of(form, self.tokenizer.id_to_token)
        if words is not None:
            text, cuts = with_words(text, cuts, words)
        return self._encode(text, limits, "prompt.chat", chat.add_special_tokens, cuts)

    def place(self, prompt: TextPrompt | RenderedChat, limits: Limits) -> PlacedTokens:
        """Returns the tokens of a prompt with their places in its text. Raises as `encode`."""
        field, cuts = ("prompt.text", ()) if isinstance(prompt, TextPrompt) else ("prompt.chat", prompt.cuts)
        check_text(prompt.text, limits, field)
        found = placed(self.tokenizer, prompt.text, cuts, prompt.add_special_tokens)
        check_ids(field, found.ids, limits)
        return found

    def encode_words(self, words: Sequence[str], limits: Limits) -> tuple[tuple[int, ...], ...]:
        """Returns the token ids of each word with a leading space and without."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                found[tuple(self._encode(text, limits, "bad_words", add_special_tokens=False))] = None
        return tuple(found)

    def mark(self, text: str) -> str:
        """Returns a mark in a grammar's notation: a special token's id, as text cannot spell it; else a literal."""
        token = self.tokenizer.token_to_id(text)
        return f"<[{token}]>" if token in self.pieces.special_ids else json.dumps(text, ensure_ascii=False)

    def decode(self, ids: bytes, limits: Limits, skip_special_tokens: bool) -> str:
        """Returns the text of packed ids. Raises ServiceError INVALID_ARGUMENT for ids outside the vocabulary."""
        text: str = self.tokenizer.decode(unpack_checked(ids, limits, "token_ids"), skip_special_tokens)
        return text

    def _encode(
        self, text: str, limits: Limits, field: str, add_special_tokens: bool, cuts: tuple[int, ...] = ()
    ) -> list[int]:
        check_text(text, limits, field)
        pieces = [text[start:end] for start, end in itertools.pairwise((0, *cuts, len(text)))]
        # A batch, often of one text: only the batch call omits the offsets of tokens, which take longer than the ids.
        is_whole = not cuts
        encodings = self.tokenizer.encode_batch_fast(pieces, add_special_tokens=add_special_tokens and is_whole)
        ids: list[int] = encodings[0].ids if is_whole else [one for encoding in encodings for one in encoding.ids]
        if add_special_tokens and not is_whole:
            ids = self.tokenizer.post_process(Encoding.merge(encodings, growing_offsets=False)).ids
        # A tokenizer may have more ids than the model has logits.
        check_ids(field, ids, limits)
        return ids


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns how many tokens are kept of two texts: those of the longer one are dropped until both are equal."""
    shorter = min(first, second)
    if first + second <= room:
        return first, second
    if 2 * shorter <= room:
        return (room - shorter, shorter) if first > second else (shorter, room - shorter)
    return (room - room // 2, room // 2) if first > second else (room // 2, room - room // 2)


def check_text(text: str, limits: Limits, field: str) -> None:
    """Raises ServiceError INVALID_ARGUMENT for a text that is too large, or not Unicode."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise invalid(field, f"is not valid Unicode: lone surrogate at character {error.start}") from error
    if size > limits.max_prompt_bytes:
        raise invalid(field, f"has {size} bytes; at most {limits.max_prompt_bytes}", limit=limits.max_prompt_bytes)


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads the tokenizer of a tokenizer.json. Raises ServiceError MODEL_INVALID naming the file."""
    if not is_file(path):
        if (path.parent / "tokenizer.model").exists():
            raise _invalid(path, "is missing; convert tokenizer.model to tokenizer.json first")
        raise _invalid(path, "is missing, or no file")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # otherwise the library starts threads for a single text
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise _invalid(path, "is not a tokenizer that this server can read") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def unpack_checked(data: bytes, limits: Limits, field: str) -> list[int]:
    """Returns packed int32 ids as a list, each below the number of logits. Raises ServiceError INVALID_ARGUMENT."""
    if len(data) % 4:
        raise invalid(field, f"has {len(data)} bytes, which is no whole number of int32 ids")
    ids = unpack_ids(data)
    check_ids(field, ids, limits)
    return ids


def _kept(ids: list[int], num: int, truncation: Truncation) -> list[int]:
    """Returns `num` of the ids at most, without those that truncation drops."""
    return ids[-num:] if truncation is Truncation.LEFT else ids[:num]


def _invalid(path: Path, message: str) -> ServiceError:
    return ServiceError(Code.FAILED_PRECONDITION, "MODEL_INVALID", f"{path}: {message}")
