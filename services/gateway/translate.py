"""From the contract to messages: defaults filled in, limits checked, what is not built refused.

Takes sluice.v1 requests, gives work for the ring and the effective parameters. Knows no call, no state and no socket.
"""

import array
import dataclasses
import sys
from collections.abc import Sequence

from sluice.v1 import inference_pb2, types_pb2

from engine.errors import invalid
from engine.request import Limits, SamplingParams, check_ids, check_params, check_prompt
from services.gateway import knobs
from services.gateway.admission import BYTES_PER_TOKEN
from services.gateway.chat import chat_prompt, num_bytes
from services.gateway.constraint import constraint
from services.gateway.contract import refuse_unbuilt
from services.gateway.errors import not_found
from services.gateway.settings import GatewaySettings, ModelInfo
from services.work import (
    ChatPrompt,
    Detokenize,
    Generate,
    PromptInput,
    TextPrompt,
    Tokenize,
    TokenPrompt,
    Work,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What a client asked for, ready for the ring.

    Attributes:
        reserve: tokens that admission sets aside.
        effective: parameters to echo; `max_tokens` is set when the engine has said it. None without a generation.
        token_records: whether the client wants a record per token.
        echo: whether it wants the prompt's tokens.
        num_outputs: that it gets back.
    """

    work: Work
    reserve: int = 0
    num_outputs: int = 1
    effective: types_pb2.EffectiveParams | None = None
    token_records: bool = True
    echo: bool = False


def generation(spec: types_pb2.GenerationSpec, priority: int, settings: GatewaySettings) -> Asked:
    """The work of Generate and StreamGenerate; `priority` is that of the metadata. Raises `ServiceError`."""
    _check_model(spec, settings.model)
    refuse_unbuilt(spec)
    limits = settings.limits
    params = knobs.sampling(spec, settings.model.defaults)
    check_params(params, limits)
    stops = knobs.stops(spec.stop, limits, settings.model.eos_ids)
    text = knobs.text(spec)
    scheduling = knobs.scheduling(spec, priority, limits)
    keep_last = _keep_last(spec, limits)
    prompt, size = _prompt(spec, params, settings)
    limit = constraint(spec, prompt, params)
    size = min(size, keep_last or size)
    output = params.max_tokens or max(0, limits.context_length - size)
    return Asked(
        work=Generate(prompt, params, stops, text, spec.output.echo, keep_last, scheduling, limit),
        reserve=size + output * params.num_sequences,
        num_outputs=params.n,
        effective=knobs.effective(params, stops, text, scheduling, spec),
        token_records=spec.output.token_records if spec.output.HasField("token_records") else True,
        echo=spec.output.echo,
    )


def _keep_last(spec: types_pb2.GenerationSpec, limits: Limits) -> int:
    """0 where it is absent."""
    asked = spec.truncate_prompt_tokens
    if spec.HasField("truncate_prompt_tokens") and not 1 <= asked <= limits.context_length:
        raise invalid("truncate_prompt_tokens", f"{asked} is not in [1, {limits.context_length}]")
    return asked


def tokenization(request: inference_pb2.TokenizeRequest, settings: GatewaySettings) -> Asked:
    """The work of Tokenize. Raises `ServiceError`."""
    _check_model(request, settings.model)
    add = request.add_special_tokens if request.HasField("add_special_tokens") else True
    if request.WhichOneof("prompt") == "text":
        _check_bytes(len(request.text.encode()), settings)
        return Asked(Tokenize(prompt=TextPrompt(request.text), add_special_tokens=add))
    if request.WhichOneof("prompt") != "chat":
        raise invalid("prompt", "is missing; send text or chat")
    refuse_unbuilt(request.chat, "chat.")
    return Asked(Tokenize(prompt=_chat(request.chat, settings)[0], add_special_tokens=add))


def detokenization(request: inference_pb2.DetokenizeRequest, settings: GatewaySettings) -> Asked:
    """The work of Detokenize. Raises `ServiceError`."""
    _check_model(request, settings.model)
    ids = _ids("token_ids", request.token_ids, settings)
    skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    return Asked(Detokenize(ids=ids, skip_special_tokens=skip))


def _check_model(
    request: types_pb2.GenerationSpec | inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest,
    model: ModelInfo,
) -> None:
    if request.HasField("model") and request.model != model.id:
        raise not_found("model", request.model, f"this server serves {model.id!r}")
    if request.HasField("revision") and request.revision != model.revision:
        raise not_found("model", f"{model.id}@{request.revision}", f"this server serves revision {model.revision!r}")


def _prompt(
    spec: types_pb2.GenerationSpec, params: SamplingParams, settings: GatewaySettings
) -> tuple[PromptInput, int]:
    """The prompt and its size in tokens: exact for ids, estimated for text."""
    match spec.WhichOneof("prompt"):
        case "text":
            size = len(spec.text.encode())
            _check_bytes(size, settings)
            if not size:
                raise invalid("prompt", "is empty; send at least one byte of text")
            return TextPrompt(spec.text), size // BYTES_PER_TOKEN + 1
        case "token_ids":
            ids = _ids("prompt.token_ids", spec.token_ids.ids, settings)
            num = len(spec.token_ids.ids)
            check_prompt(min(num, spec.truncate_prompt_tokens or num), params, settings.limits)
            return TokenPrompt(ids), len(spec.token_ids.ids)
        case "chat":
            chat, size = _chat(spec.chat, settings)
            return chat, size // BYTES_PER_TOKEN + len(chat.messages)
        case _:
            raise invalid("prompt", "is missing; send text, token_ids or chat")


def _ids(field: str, ids: Sequence[int], settings: GatewaySettings) -> bytes:
    if len(ids) > settings.max_token_ids:
        raise invalid(field, f"has {len(ids)} ids; at most {settings.max_token_ids}", limit=settings.max_token_ids)
    check_ids(field, ids, settings.limits)
    packed = array.array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _chat(chat: types_pb2.Chat, settings: GatewaySettings) -> tuple[ChatPrompt, int]:
    """The conversation and its bytes."""
    prompt = chat_prompt(chat, settings)
    size = num_bytes(prompt)
    _check_bytes(size, settings)
    return prompt, size


def _check_bytes(size: int, settings: GatewaySettings) -> None:
    limit = settings.limits.max_prompt_bytes
    if size > limit:
        raise invalid("prompt", f"has {size} bytes; this server takes {limit}", limit=limit, actual=size)
