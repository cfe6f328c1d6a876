"""Makes a GenerationSpec of the contract of plain Python values. Pure.

Options that are not given stay absent and take the model's default. To set a field without an option here, pass a
GenerationSpec as the prompt.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, TypedDict

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


_KNOWN = frozenset(GenerateOptions.__annotations__)
_TOP = frozenset({"model", "revision", "adapter", "idempotency_key"})
_SAMPLING = frozenset(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_OUTPUT = frozenset({"logprobs", "token_records", "echo"})
_FORMS = frozenset({"json_schema", "regex", "grammar"})
_ROLES: Mapping[str, "types_pb2.Role.ValueType"] = {
    name.removeprefix("ROLE_").lower(): number for name, number in types_pb2.Role.items() if number
}


def build(prompt: Prompt, options: GenerateOptions) -> types_pb2.GenerationSpec:
    """Returns the spec. Raises TypeError for an unknown option, ValueError for a value that its field cannot hold."""
    if not options.keys() <= _KNOWN:
        unknown = min(options.keys() - _KNOWN)
        raise TypeError(
            f"{unknown!r} is no option of a generation; there are {', '.join(GenerateOptions.__annotations__)}"
        )
    spec = _prompted(prompt)
    sampling = spec.sampling
    for name, value in options.items():
        if name in _TOP:
            _set(spec, name, value)
        elif name in _SAMPLING:
            _set(sampling, name, value)
        elif name in _OUTPUT:
            _set(spec.output, name, value)
        elif name in _FORMS:
            _set(spec.constraint, name, value)
    _rest(spec, options)
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
    match prompt:
        case types_pb2.GenerationSpec():
            spec.CopyFrom(prompt)
        case types_pb2.Chat():
            spec.chat.CopyFrom(prompt)
        case str():
            spec.text = prompt
        case _:
            spec.token_ids.ids.extend(prompt)
    return spec


def _rest(spec: types_pb2.GenerationSpec, options: GenerateOptions) -> None:
    """Sets the options that do not correspond to one field of one message."""
    if "stop" in options:
        stop = options["stop"]
        spec.stop.strings.extend([stop] if isinstance(stop, str) else stop)
    if "stop_token_ids" in options:
        spec.stop.token_ids.extend(options["stop_token_ids"])
    if "ignore_eos" in options:
        spec.stop.ignore_eos = options["ignore_eos"]
    if "choices" in options:
        spec.constraint.choice.texts.extend(options["choices"])
    if "priority" in options:
        spec.scheduling.priority = options["priority"]
    if options.get("detach"):
        spec.scheduling.on_disconnect = types_pb2.DISCONNECT_ACTION_DETACH


def _set(
    message: types_pb2.GenerationSpec | types_pb2.SamplingParams | types_pb2.OutputOptions | types_pb2.Constraint,
    name: str,
    value: object,
) -> None:
    if isinstance(value, str | int | float) or not isinstance(value, Iterable):
        setattr(message, name, value)
    else:
        getattr(message, name).extend(value)
