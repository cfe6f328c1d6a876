"""The bodies of OpenAI's requests as structs, by which JSON is validated. `field_table` has most of their fields.

A field that is not listed is refused, never ignored.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import msgspec
from msgspec import inspect

from sluice_server.services.edge.errors import bad_request
from sluice_server.services.edge.field_table import ROWS
from sluice_server.services.edge.fields import CHAT, COMPLETION, Own, Row
from sluice_server.services.edge.wire_parts import ChosenTool, FunctionTool, Message, StreamOptions

_T = TypeVar("_T")
_PATHS = {CHAT: "chat/completions", COMPLETION: "completions"}


class Common(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Fields of both kinds of requests that code reads. None: absent."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def values(self) -> Mapping[str, Any]:
        """Returns every field's value by its name, those of the table included."""
        return msgspec.structs.asdict(self)


class Completion(Common, frozen=True, kw_only=True):
    """Fields of /v1/completions that code reads."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


class Chat(Common, frozen=True, kw_only=True):
    """Fields of /v1/chat/completions that code reads."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # an extension, as in vLLM


def rows_of(route: str) -> tuple[Row, ...]:
    """Returns the rows of the fields that a route takes."""
    return tuple(row for row in ROWS if route in row.routes)


def _with_rows(base: type[_T], route: str) -> type[_T]:
    """Returns `base` with the fields of the table in addition to its own."""
    fields = [(row.name, cast(Any, row.kind) | None, None) for row in rows_of(route) if not isinstance(row, Own)]
    name, space = f"{base.__name__}Request", {"__doc__": f"The body of /v1/{_PATHS[route]}."}
    bases = (cast(type[msgspec.Struct], base),)
    made = msgspec.defstruct(name, fields, bases=bases, namespace=space, frozen=True, kw_only=True)
    return cast(type[_T], made)


ChatRequest = _with_rows(Chat, CHAT)
CompletionRequest = _with_rows(Completion, COMPLETION)


def decode(body: bytes, kind: type[_T]) -> _T:
    """Returns a request of `kind`. Raises EdgeError naming the invalid field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise bad_request(path.strip("`.") or _unknown(text), _advised(text, path.strip("`."), kind)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        found = str(error).removeprefix("JSON is malformed: ") if body else "it is empty"
        raise bad_request("", f"the body is not valid JSON in UTF-8: {found}") from None
    except RecursionError:
        raise bad_request("", "the body's JSON is nested too deeply") from None


def _unknown(text: str) -> str:
    """Returns the unknown field that a message of msgspec names; "" for other messages."""
    return text.split("`")[1] if "unknown field `" in text else ""


def _advised(text: str, path: str, kind: type) -> str:
    """Returns msgspec's message about the value at `path` with what to send instead, where that is known."""
    wanted: Iterable[inspect.Type] = [inspect.type_info(kind)]
    for step in re.findall(r"[^.\[\]]+", path):
        wanted = [one for found in wanted for one in _parts(found, step)]
    flat = [one for found in wanted for one in _members(found)]
    if text.startswith(("Invalid enum value", "Invalid value")):
        values = [str(value) for one in flat if isinstance(one, inspect.LiteralType) for value in one.values]
        return f"{text}; it is one of {', '.join(values)}" if values else text
    names = [field.encode_name for one in flat if isinstance(one, inspect.StructType) for field in one.fields]
    near = difflib.get_close_matches(_unknown(text), names, 1)
    return f"{text}; is {near[0]} meant?" if near else text


def _parts(found: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """Yields the types that a field, or an item of a list, of type `found` may have."""
    for one in _members(found):
        if isinstance(one, inspect.StructType):
            yield from (field.type for field in one.fields if field.encode_name == step)
            if one.tag_field == step:
                yield inspect.LiteralType((str(one.tag),))
        elif isinstance(one, inspect.ListType):
            yield one.item_type


def _members(found: inspect.Type) -> Sequence[inspect.Type]:
    return found.types if isinstance(found, inspect.UnionType) else (found,)
