"""Makes a GenerationSpec of the contract of plain Python values. Pure.

Options that are not given stay absent and take the model's default. To set a field without an option here, pass a
GenerationSpec as the prompt.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TypeAlias, TypedDict

from google.protobuf.message import Message

from sluice.options import check_names, unfit
from sluice.v1 import types_pb2

Said: TypeAlias = str | Sequence[str | bytes | types_pb2.Image]
Prompt: TypeAlias = str | Sequence[int] | types_pb2.Chat | types_pb2.GenerationSpec


class GenerateOptions(TypedDict, total=False):
    """Options of a generation; the contract gives the range of each."""

    model: str
    revision: str
    adapter: str
    idempotency_key: str
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    n: int
    best_of: int
    bad_words: Sequence[str]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    token_records: bool
    echo: bool
    json_schema: str
    regex: str
    grammar: str
    choices: Sequence[str]
    priority: int
    detach: bool


_Part: TypeAlias = Callable[[types_pb2.GenerationSpec], Message]


def _fields(part: _Part, names: Iterable[str]) -> dict[str, tuple[_Part, str]]:
    return {name: (part, name) for name in names}


# The message and its field that each option sets, but for detach.
_PLACES: Mapping[str, tuple[_Part, str]] = {
    **_fields(lambda spec: spec, ("model", "revision", "adapter", "idempotency_key")),
    **_fields(attrgetter("sampling"), types_pb2.SamplingParams.DESCRIPTOR.fields_by_name),
    **_fields(attrgetter("output"), ("logprobs", "token_records", "echo")),
    **_fields(attrgetter("constraint"), ("json_schema", "regex", "grammar")),
    **_fields(attrgetter("scheduling"), ("priority",)),
    "stop": (attrgetter("stop"), "strings"),
    "stop_token_ids": (attrgetter("stop"), "token_ids"),
    "ignore_eos": (attrgetter("stop"), "ignore_eos"),
    "choices": (attrgetter("constraint.choice"), "texts"),
}
_ROLES: Mapping[str, "types_pb2.Role.ValueType"] = {
    name.removeprefix("ROLE_").lower(): number for name, number in types_pb2.Role.items() if number
}


def build(prompt: Prompt, options: GenerateOptions) -> types_pb2.GenerationSpec:
    """Returns the spec. Raises TypeError for an unknown option or a value of another type, ValueError for a value that
    its field cannot hold; both name the option."""
    check_names(options, GenerateOptions.__annotations__, "a generation")
    spec = _prompted(prompt)
    for name, value in options.items():
        if name == "detach":
            if value:
                spec.scheduling.on_disconnect = types_pb2.DISCONNECT_ACTION_DETACH
            continue
        part, field = _PLACES[name]
        try:
            _set(part(spec), field, [value] if name == "stop" and isinstance(value, str) else value)
        except (AttributeError, TypeError, ValueError) as error:
            raise unfit(name, value, error) from None
    return spec


def chat(*messages: tuple[str, Said]) -> types_pb2.Chat:
    """Makes a chat of pairs: a role and a text, or a list of texts and images. Roles are system, developer, user,
    assistant and tool. An image is the bytes of its file, or an `Image` of the contract.

    Raises ValueError for another role.
    """
    made = types_pb2.Chat()
    for role, said in messages:
        if role not in _ROLES:
            raise ValueError(f"{role!r} is no role; there are {', '.join(_ROLES)}")
        message = made.messages.add(role=_ROLES[role])
        message.parts.extend(map(_part, [said] if isinstance(said, str) else said))
    return made


def _part(said: str | bytes | types_pb2.Image) -> types_pb2.ContentPart:
    if isinstance(said, str):
        return types_pb2.ContentPart(text=said)
    return types_pb2.ContentPart(image=types_pb2.Image(data=said) if isinstance(said, bytes) else said)


def _prompted(prompt: Prompt) -> types_pb2.GenerationSpec:
    spec = types_pb2.GenerationSpec()
    try:
        match prompt:
            case types_pb2.GenerationSpec():
                spec.CopyFrom(prompt)
            case types_pb2.Chat():
                spec.chat.CopyFrom(prompt)
            case str():
                spec.text = prompt
            case bytes() | bytearray():  # sequences of integers, which would be taken for token ids
                raise TypeError("a text or a list of token ids is wanted")
            case _:
                spec.token_ids.ids.extend(prompt)
    except (TypeError, ValueError) as error:
        raise unfit("prompt", prompt, error) from None
    return spec


def _set(message: Message, field: str, value: object) -> None:
    if isinstance(value, str | int | float) or not isinstance(value, Iterable):
        setattr(message, field, value)
    else:
        getattr(message, field).extend(value)
