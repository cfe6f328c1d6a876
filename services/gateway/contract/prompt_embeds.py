"""Translates the prompt embeddings of a generation, and refuses what cannot go with them."""

from sluice.v1 import types_pb2

from sluice_server.engine.checks import check_embeds, check_embeds_use
from sluice_server.engine.errors import invalid, unsupported
from sluice_server.engine.prompt_embeds import EmbedsType, PromptEmbeds
from sluice_server.engine.request import Limits, SamplingParams

TYPES = {
    types_pb2.EMBEDS_TYPE_FLOAT32: EmbedsType.FLOAT32,
    types_pb2.EMBEDS_TYPE_BFLOAT16: EmbedsType.BFLOAT16,
}


def prompt_embeds(
    spec: types_pb2.GenerationSpec, params: SamplingParams, limits: Limits, *, is_open: bool
) -> PromptEmbeds | None:
    """Returns the prompt embeddings; None if there are none. Raises `ServiceError`."""
    if not spec.HasField("prompt_embeds"):
        return None
    asked, field = spec.prompt_embeds, "prompt_embeds"
    dtype = TYPES.get(asked.dtype)
    if dtype is None:
        raise invalid(f"{field}.dtype", f"{asked.dtype} is none of {', '.join(str(one) for one in TYPES.values())}")
    found = PromptEmbeds(asked.values, dtype, asked.num_tokens)
    check_embeds(found, limits, field)
    excluded = {
        "text": spec.HasField("text"),
        "chat": spec.HasField("chat"),
        "output.echo": spec.output.echo,
        "truncate_prompt_tokens": spec.HasField("truncate_prompt_tokens"),
        "keep_input_open": is_open,
    }
    for name in (name for name, is_set in excluded.items() if is_set):
        raise unsupported(name, f"{name} is not supported together with {field}: leave it out")
    check_embeds_use(params)
    return found
