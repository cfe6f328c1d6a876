"""Translates Embed into work for the ring: the model's defaults, limits, refusal of what this model cannot do."""

from collections.abc import Sequence

from sluice.v1 import inference_pb2

from sluice_server.engine.checks import check_num, check_pooled, check_pooling, check_priority
from sluice_server.engine.errors import ServiceError, invalid, unsupported
from sluice_server.engine.request import Pooling
from sluice_server.services.gateway.access.admission import BYTES_PER_TOKEN
from sluice_server.services.gateway.contract.fields import refuse_unbuilt
from sluice_server.services.gateway.contract.ids import pack_checked
from sluice_server.services.gateway.contract.served import check_model
from sluice_server.services.gateway.contract.translate import (
    TranslatedRequest,
    check_bytes,
    size_of_text,
)
from sluice_server.services.gateway.settings import GatewaySettings, ModelInfo
from sluice_server.services.messages.work import (
    Embed,
    Scheduling,
    TextPrompt,
    TokenPrompt,
    Truncation,
    VectorEncoding,
    VectorOptions,
)

MAX_INSTRUCTION_BYTES = 8192
BYTES_PER_INPUT = 32  # of an answer, besides the components
COMPONENT_BITS = {VectorEncoding.FLOAT: 32, VectorEncoding.BFLOAT16: 16, VectorEncoding.BINARY: 1}

POOLINGS = {
    inference_pb2.POOLING_FIRST: Pooling.FIRST,
    inference_pb2.POOLING_LAST: Pooling.LAST,
    inference_pb2.POOLING_MEAN: Pooling.MEAN,
}
ENCODINGS = {
    inference_pb2.VECTOR_ENCODING_UNSPECIFIED: VectorEncoding.FLOAT,
    inference_pb2.VECTOR_ENCODING_FLOAT: VectorEncoding.FLOAT,
    inference_pb2.VECTOR_ENCODING_BFLOAT16: VectorEncoding.BFLOAT16,
    inference_pb2.VECTOR_ENCODING_BINARY: VectorEncoding.BINARY,
}
TRUNCATIONS = {
    inference_pb2.TRUNCATION_UNSPECIFIED: Truncation.NONE,
    inference_pb2.TRUNCATION_NONE: Truncation.NONE,
    inference_pb2.TRUNCATION_LEFT: Truncation.LEFT,
    inference_pb2.TRUNCATION_RIGHT: Truncation.RIGHT,
}


def embedding(request: inference_pb2.EmbedRequest, priority: int, settings: GatewaySettings) -> TranslatedRequest:
    """Returns the work of Embed; `priority` is that of the metadata. Raises `ServiceError`."""
    check_model(request, settings.model)
    refuse_unbuilt(request)
    if request.adapter:
        raise unsupported("adapter", "adapter is not supported for vectors: leave it out")
    if not embeds(settings.model):
        raise unsupported("Embed", f"Embed is not supported with this model: {settings.model.vectors.refusal}")
    check_priority(priority, settings.limits)
    options, truncation = _options(request, settings), truncation_of(request.truncate)
    inputs, reserve = read_inputs(request.inputs, truncation, settings)
    _check_instruction(request, options, settings.model)
    _check_answer(len(inputs), options, settings)
    work = Embed(inputs, options, truncation, request.instruction, Scheduling(priority=priority))
    return TranslatedRequest(work, reserve=reserve)


def read_inputs(
    given: Sequence[inference_pb2.EmbedInput], truncation: Truncation, settings: GatewaySettings
) -> tuple[tuple[TextPrompt | TokenPrompt, ...], int]:
    """Returns inputs, and their tokens, which are estimated for texts. Raises `ServiceError` naming the input."""
    if not given:
        raise invalid("inputs", "is empty; send at least one")
    check_num("inputs", len(given), settings.max_embed_inputs)
    inputs, reserve, num_bytes = [], 0, 0
    for at, one in enumerate(given):
        read, num_tokens, size = _input(one, f"inputs[{at}]", truncation, settings)
        num_bytes += size
        check_bytes(num_bytes, settings, "inputs")
        inputs.append(read)
        reserve += num_tokens
    return tuple(inputs), reserve


def embeds(model: ModelInfo) -> bool:
    """Whether the model can be asked for vectors."""
    return not model.vectors.refusal


def _options(request: inference_pb2.EmbedRequest, settings: GatewaySettings) -> VectorOptions:
    model = settings.model
    width = model.vector_width
    dimensions = request.dimensions if request.HasField("dimensions") else width
    if not 1 <= dimensions <= width:
        raise invalid("dimensions", f"{dimensions} is not in [1, {width}]", limit=width)
    encoding = ENCODINGS.get(request.encoding)
    if encoding is None:
        raise invalid("encoding", f"{request.encoding} is no encoding of this server")
    normalize = request.normalize if request.HasField("normalize") else model.vectors.normalize
    return VectorOptions(_pooling(request, settings), normalize, dimensions, encoding)


def _pooling(request: inference_pb2.EmbedRequest, settings: GatewaySettings) -> Pooling:
    asked = request.pooling
    if asked == inference_pb2.POOLING_UNSPECIFIED:
        return settings.model.vectors.pooling
    if asked not in POOLINGS:
        raise invalid("pooling", f"{asked} is no pooling of this server")
    check_pooling(POOLINGS[asked], settings.limits)
    return POOLINGS[asked]


def truncation_of(asked: "inference_pb2.Truncation.ValueType") -> Truncation:
    """Returns what an input that is too long loses. Raises `ServiceError`."""
    found = TRUNCATIONS.get(asked)
    if found is None:
        raise invalid("truncate", f"{asked} is no truncation of this server")
    return found


def check_instruction_size(instruction: str) -> None:
    """Raises `ServiceError` for an instruction that is too long."""
    size = size_of_text(instruction)
    if size > MAX_INSTRUCTION_BYTES:
        raise invalid("instruction", f"has {size} bytes; at most {MAX_INSTRUCTION_BYTES}", limit=MAX_INSTRUCTION_BYTES)


def _check_instruction(request: inference_pb2.EmbedRequest, options: VectorOptions, model: ModelInfo) -> None:
    if not request.HasField("instruction"):
        return
    check_instruction_size(request.instruction)
    if any(one.WhichOneof("input") == "token_ids" for one in request.inputs):
        raise invalid("instruction", "is for inputs of text; one here has token ids: leave it out")
    if options.pooling is Pooling.MEAN and not model.vectors.pools_instruction:
        text = "instruction is not supported by this model, whose mean leaves its tokens out (include_prompt)"
        raise unsupported("instruction", text)


def _input(
    one: inference_pb2.EmbedInput, field: str, truncation: Truncation, settings: GatewaySettings
) -> tuple[TextPrompt | TokenPrompt, int, int]:
    """Returns an input, its tokens, which are estimated for a text, and its bytes of text."""
    match one.WhichOneof("input"):
        case "text":
            text = one.text  # read once: protobuf copies it at each access
            size = size_of_text(text)
            if not size:
                raise invalid(f"{field}.text", "is empty; send at least one byte of text")
            return TextPrompt(text), size // BYTES_PER_TOKEN + 1, size
        case "token_ids":
            num = len(one.token_ids.ids)
            if truncation is Truncation.NONE or not num:
                check_pooled(num, settings.limits, field)
            return TokenPrompt(pack_checked(f"{field}.token_ids", one.token_ids.ids, settings)), num, 0
        case _:
            raise invalid(field, "is missing; send text or token_ids")


def _check_answer(num: int, options: VectorOptions, settings: GatewaySettings) -> None:
    """Raises `ServiceError` for vectors that one answer cannot hold."""
    size = num * (options.dimensions * COMPONENT_BITS[options.encoding] // 8 + BYTES_PER_INPUT)
    limit = settings.max_send_bytes
    if size > limit:
        raise _too_large(num, size, limit)


def _too_large(num: int, size: int, limit: int) -> ServiceError:
    text = f"{num} vectors have {size} bytes; an answer has at most {limit}: send fewer, or ask for fewer dimensions"
    return invalid("inputs", text, limit=limit, actual=size)
