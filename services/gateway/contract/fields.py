"""The fields of a request that this server acts on, and those that it refuses. No field is accepted and ignored.

Two tables of field paths; the first includes those of the sampling parameters. A test walks the descriptors and fails
on a field that is in neither. Of values only the neutral ones are listed: with them a field that is not built means the
same as its absence.
"""

from collections.abc import Iterable, Mapping

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from sluice.v1 import control_pb2

from sluice_server.engine.errors import unsupported
from sluice_server.engine.parameters import PARAMETERS

BUILT = frozenset(
    [
        *(row.field for row in PARAMETERS),
        "model",
        "revision",
        "adapter",
        "text",
        "token_ids",
        "token_ids.ids",
        "prompt_embeds",
        "prompt_embeds.values",
        "prompt_embeds.dtype",
        "prompt_embeds.num_tokens",
        "chat",
        "chat.messages",
        "chat.messages.role",
        "chat.messages.parts",
        "chat.messages.parts.text",
        "chat.messages.parts.image",
        "chat.messages.parts.image.data",
        "chat.messages.parts.image.media_type",
        "chat.messages.parts.image.url",
        "chat.messages.parts.image.digest",
        "chat.messages.tool_calls",
        "chat.messages.tool_calls.id",
        "chat.messages.tool_calls.name",
        "chat.messages.tool_calls.arguments",
        "chat.messages.tool_call_id",
        "chat.messages.name",
        "chat.messages.reasoning",
        "chat.add_generation_prompt",
        "chat.tools",
        "chat.tools.name",
        "chat.tools.description",
        "chat.tools.parameters",
        "chat.tools.strict",
        "chat.tool_choice",
        "chat.tool_choice.mode",
        "chat.tool_choice.name",
        "chat.template_variables",
        "chat.parallel_tool_calls",
        "chat.continue_final_message",
        "chat.documents",
        "chat.template",
        "sampling",
        "sampling.logit_bias.key",
        "sampling.logit_bias.value",
        "sampling.bad_words",
        "sampling.logits_processors",
        "sampling.logits_processors.name",
        "sampling.logits_processors.arguments",
        "sampling.logits_processors.arguments.key",
        "sampling.logits_processors.arguments.value",
        "sampling.strategy",
        "sampling.strategy.name",
        "sampling.strategy.arguments",
        "sampling.strategy.arguments.key",
        "sampling.strategy.arguments.value",
        "sampling.beam",
        "stop",
        "stop.strings",
        "stop.include",
        "output",
        "output.token_records",
        "output.echo",
        "output.skip_special_tokens",
        "output.split_sections",
        "output.tool_call_parts",
        "output.stream_interval",
        "constraint",
        "constraint.json_schema",
        "constraint.json_object",
        "constraint.regex",
        "constraint.grammar",
        "constraint.choice",
        "constraint.choice.texts",
        "cache",
        "cache.bypass",
        "scheduling",
        "scheduling.priority",
        "scheduling.ttft_target",
        "scheduling.ttft_target.seconds",
        "scheduling.ttft_target.nanos",
        "scheduling.on_disconnect",
        "scheduling.detach_ttl",
        "scheduling.detach_ttl.seconds",
        "scheduling.detach_ttl.nanos",
        "speculation",
        "speculation.enabled",
        "speculation.max_tokens",
        "truncate_prompt_tokens",
        "add_special_tokens",
        "credit_window",
        "idempotency_key",
        "resume",
        "resume.generation_id",
        "resume.after_seq",
        "resume.outputs",
        "resume.outputs.output_index",
        "resume.outputs.token_ids",
        "resume.adapter_digest",
    ]
)

NOT_BUILT: Mapping[str, tuple[object, ...]] = {  # path → values that are accepted, because they have no effect
}

# Messages with a field that is not built somewhere below; only these are searched.
_WITH_UNBUILT = frozenset(path[:at] for path in NOT_BUILT for at, char in enumerate(path) if char == ".")

FEATURE_FIELDS = (  # a feature of GetServerInfo, and the field that uses it
    (control_pb2.FEATURE_CHAT, "chat"),
    (control_pb2.FEATURE_IMAGES, "chat.messages.parts.image"),
    (control_pb2.FEATURE_LOGPROBS, "output.logprobs"),
    (control_pb2.FEATURE_PROMPT_LOGPROBS, "output.prompt_logprobs"),
    (control_pb2.FEATURE_MANY_OUTPUTS, "sampling.n"),
    (control_pb2.FEATURE_BEAM_SEARCH, "sampling.beam"),
    (control_pb2.FEATURE_PENALTIES, "sampling.presence_penalty"),
    (control_pb2.FEATURE_CONSTRAINTS, "constraint"),
    (control_pb2.FEATURE_ADAPTERS, "adapter"),
    (control_pb2.FEATURE_SPECULATION, "speculation.enabled"),
    (control_pb2.FEATURE_CREDIT, "credit_window"),
    (control_pb2.FEATURE_RESUME, "resume.after_seq"),
    (control_pb2.FEATURE_DETACH, "scheduling.detach_ttl"),
    (control_pb2.FEATURE_IDEMPOTENCY, "idempotency_key"),
    (control_pb2.FEATURE_TOOLS, "chat.tools"),
)


def refuse_unbuilt(message: Message, path: str = "") -> None:
    """Raises `ServiceError` FEATURE_UNSUPPORTED naming the first field of `message` that is set and not built."""
    for field, value in message.ListFields():
        name = path + field.name
        if name in NOT_BUILT:
            if value not in NOT_BUILT[name]:
                raise unsupported(name, f"{name} is not supported by this server: leave it out")
        elif name in _WITH_UNBUILT:
            for one in _messages(field, value):
                refuse_unbuilt(one, name + ".")


def _messages(field: FieldDescriptor, value: object) -> Iterable[Message]:
    if isinstance(value, Message):
        return (value,)
    assert isinstance(value, Iterable), field.full_name
    return value
