"""The limits of every field of every request: values at, just inside and just outside them. Used by test_limits_walk.

One entry for each leaf of a request's descriptor that the server acts on. `good` and `bad` are whole messages' fields:
a value alone means little where fields depend on each other. The limits are those of `SMALL`, so that what is one too
many stays small.
"""

import dataclasses
import math
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sluice.v1 import types_pb2

from sluice_server.engine.images import ImageForm
from sluice_server.engine.models.labels import Activation, LabelsConfig
from sluice_server.services.gateway.contract.chat import MAX_CALLS, MAX_DOCUMENTS, MAX_PARTS, MAX_TOOLS
from tests.services.gateway.fake_ring import MODEL, settings

Fields = dict[str, Any]
CONTEXT, VOCAB, PROMPT_BYTES, TOKEN_IDS, MESSAGES = 50_000, 60_000, 300_000, 40, 8
INPUTS, WIDTH = 5, 8
EMBEDS_WIDTH = 3
NAN_ROW = struct.pack("<3f", 1.0, math.nan, 0.0)
SMALL = settings(
    limits=dataclasses.replace(
        settings().limits,
        context_length=CONTEXT,
        vocab_size=VOCAB,
        max_prompt_bytes=PROMPT_BYTES,
        logits_processors=("counting",),
        sampling_strategies=("second",),
        embeds_width=EMBEDS_WIDTH,
        images=ImageForm(token_id=7, cell=1, most_tokens=4, max_images=2),
    ),
    media_hosts=frozenset({"pictures.example"}),
    max_token_ids=TOKEN_IDS,
    max_chat_messages=MESSAGES,
    max_embed_inputs=INPUTS,
    trust_request_chat_template=True,
    model=dataclasses.replace(MODEL, labels=LabelsConfig(("LABEL_0",), Activation.SIGMOID)),
)
KIB = 1024
LEAST, MOST = math.ulp(0.0), sys.float_info.max  # of float64, in which the contract has them
ABOVE_1 = (math.nextafter(1.0, 2.0), MOST, math.inf, -MOST, math.nan)
ABOVE_100 = (math.nextafter(100.0, 101.0), MOST, math.inf, math.nan)
BEYOND_2 = (-2.1, math.nextafter(2.0, 3.0), MOST, -MOST, math.nan)
USER, ASSISTANT, TOOL = types_pb2.ROLE_USER, types_pb2.ROLE_ASSISTANT, types_pb2.ROLE_TOOL
SYSTEM = types_pb2.ROLE_SYSTEM
FILE_BYTES = 8 << 20
URL = "https://pictures.example/"


@dataclasses.dataclass(frozen=True)
class Edge:
    """Accepted and refused messages for one field."""

    good: Sequence[Fields]
    bad: Sequence[Fields] = ()


def field(group: str, name: str, good: Sequence[object], bad: Sequence[object] = (), **rest: object) -> Edge:
    """The edge of a field in a group of the spec; `rest` are other fields that it needs."""

    def fields(value: object) -> Fields:
        return {"text": "hello", group: {name: value, **rest}}

    return Edge([fields(value) for value in good], [fields(value) for value in bad])


def strategy(arguments: Mapping[str, str] | None = None, name: str = "second") -> types_pb2.SamplingStrategy:
    return types_pb2.SamplingStrategy(name=name, arguments=arguments or {})


def processor(arguments: Mapping[str, str] | None = None, name: str = "counting") -> types_pb2.LogitsProcessor:
    return types_pb2.LogitsProcessor(name=name, arguments=arguments)


def constrained(form: str, good: Sequence[object], bad: Sequence[object]) -> Edge:
    """The edge of a form of constraint."""
    return field("constraint", form, good, bad)


def chat(**fields: Any) -> Fields:  # noqa: ANN401 # any field of a chat
    return {"chat": {"messages": [turn()], **fields}}


def turn(role: int = USER, **fields: Any) -> Fields:  # noqa: ANN401 # any field of a message
    return {"role": role, "parts": [{"text": "hi"}], **fields}


def said(*, of: int = USER, **fields: Any) -> Fields:  # noqa: ANN401 # any field of a message
    return chat(messages=[turn(of, **fields)])


def shown(*, of: int = USER, images: int = 1, **fields: Any) -> Fields:  # noqa: ANN401 # any field of an image
    return chat(messages=[{"role": of, "parts": [{"image": fields}] * images}])


def call(**fields: Any) -> Fields:  # noqa: ANN401 # any field of a call
    return said(of=ASSISTANT, tool_calls=[{"name": "f", "arguments": "{}", **fields}])


def tool(**fields: Any) -> Fields:  # noqa: ANN401 # any field of a tool
    return chat(tools=[{"name": "f", **fields}])


def json_of(size: int) -> str:
    """A JSON object of that many bytes."""
    return '{"a":"' + "x" * (size - 8) + '"}'


def nested(depth: int) -> str:
    """A JSON object of objects and lists that deep."""
    return '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


def open_at_end(last: Fields | None = None, **fields: Any) -> Fields:  # noqa: ANN401 # any field of a chat
    """A chat whose last message is continued: the assistant's, or that of another chat."""
    messages = [turn(ASSISTANT)] if last is None else last["chat"]["messages"]
    return chat(messages=messages, continue_final_message=True, **fields)


def duration(group: str, name: str, high_s: int, **rest: object) -> Edge:
    """The edge of a time above 0, of at most `high_s`."""
    return field(
        group,
        name,
        [{"nanos": 1}, {"seconds": high_s - 1}, {"seconds": high_s}],
        [{}, {"seconds": -1}, {"seconds": high_s, "nanos": 1}, {"seconds": high_s + 1}],
        **rest,
    )


ALL_OF_IT = {"on_disconnect": types_pb2.DISCONNECT_ACTION_DETACH}
TTFT, TTL = duration("scheduling", "ttft_target", 3600), duration("scheduling", "detach_ttl", 600, **ALL_OF_IT)


def beam(**fields: Any) -> Fields:  # noqa: ANN401 # any field of a beam search
    return {"text": "hello", "sampling": {"beam": {"width": 2, **fields}}}


def embeds(**fields: Any) -> Fields:  # noqa: ANN401 # of any field
    """A prompt of one row."""
    return {"prompt_embeds": {"values": bytes(4 * EMBEDS_WIDTH), "dtype": 1, "num_tokens": 1, **fields}}


SPEC: Mapping[str, Edge] = {
    "model": Edge([{"text": "a", "model": "toy"}], [{"text": "a", "model": ""}, {"text": "a", "model": "x" * 257}]),
    "revision": Edge([{"text": "a", "revision": "r1"}], [{"text": "a", "revision": "r2"}]),
    # This gateway takes no adapters: to name one is refused by name.
    "adapter": Edge([{"text": "a", "adapter": ""}], [{"text": "a", "adapter": "b"}]),
    "text": Edge(
        [{"text": "x"}, {"text": "x" * (PROMPT_BYTES - 1)}, {"text": "é" * (PROMPT_BYTES // 2)}],
        [{}, {"text": ""}, {"text": "x" * (PROMPT_BYTES + 1)}, {"text": "é" * (PROMPT_BYTES // 2) + "x"}],
    ),
    "token_ids.ids": Edge(
        [{"token_ids": {"ids": ids}} for ids in ([0], [VOCAB - 1], [1] * (TOKEN_IDS - 1), [1] * TOKEN_IDS)],
        [{"token_ids": {"ids": ids}} for ids in ([], [VOCAB], [1] * (TOKEN_IDS + 1))],
    ),
    "prompt_embeds.values": Edge(
        [embeds(), embeds(values=bytes(8 * EMBEDS_WIDTH), num_tokens=2)],
        [embeds(values=value) for value in (b"", bytes(4 * EMBEDS_WIDTH - 1), bytes((8 << 20) + 4), NAN_ROW)],
    ),
    "prompt_embeds.dtype": Edge(
        [embeds(dtype=1), embeds(dtype=2, values=bytes(2 * EMBEDS_WIDTH))], [embeds(dtype=n) for n in (0, 2, 3)]
    ),
    "prompt_embeds.num_tokens": Edge(
        [embeds(), {**embeds(), "token_ids": {"ids": [1]}}],
        [embeds(num_tokens=n) for n in (0, 2, CONTEXT + 1, 2**32 - 1)],
    ),
    "chat.messages.role": Edge([said(of=role) for role in (1, 2, 3, 4, 5)], [said(of=0), said(of=6)]),
    "chat.messages.parts.text": Edge(
        [said(parts=[{"text": "x"}] * num) for num in (1, MAX_PARTS - 1, MAX_PARTS)],
        [
            *[said(parts=[{"text": "x"}] * (MAX_PARTS + 1)), said(parts=[]), said(parts=[{}])],
            *[{"chat": {}}, chat(messages=[]), chat(messages=[turn()] * (MESSAGES + 1))],
            said(parts=[{"text": "x" * (PROMPT_BYTES + 1)}]),
        ],
    ),
    "chat.messages.parts.image.data": Edge(
        [shown(data=b"x" * n) for n in (1, FILE_BYTES)] + [shown(images=2, data=b"x")],
        [
            *(shown(data=data) for data in (b"", b"x" * (FILE_BYTES + 1))),
            *(shown(images=3, data=b"x"), shown(of=SYSTEM, data=b"x"), shown(of=ASSISTANT, data=b"x")),
            {**shown(data=b"x"), "truncate_prompt_tokens": 5},
        ],
    ),
    "chat.messages.parts.image.media_type": Edge(
        [shown(data=b"x", media_type="t" * n) for n in (0, 1, 64)], [shown(data=b"x", media_type="t" * 65)]
    ),
    "chat.messages.parts.image.url": Edge(
        [shown(url=URL), shown(url=URL + "a" * (2048 - len(URL)))],
        [
            *(shown(url=url) for url in (URL + "a" * (2049 - len(URL)), "http" + URL[5:], "https://other.example/")),
            *(shown(url=url) for url in ("file:///etc/passwd", "https://169.254.169.254/", "https://[::ffff:7f00:1]/")),
            shown(url=URL, data=b"x"),
        ],
    ),
    "chat.messages.parts.image.digest": Edge([], [shown(digest=b"d" * n) for n in (31, 32, 33)]),  # none is kept
    "chat.messages.tool_calls.id": Edge([call(id="i" * n) for n in (0, 63, 64)], [call(id="i" * 65)]),
    "chat.messages.tool_calls.name": Edge(
        [call(name=name) for name in ("f", "f" * 63, "f" * 64)],
        [call(name=name) for name in ("", "f" * 65, "a b")]
        + [said(of=ASSISTANT, tool_calls=[{"name": "f", "arguments": "{}"}] * (MAX_CALLS + 1))]
        + [said(tool_calls=[{"name": "f", "arguments": "{}"}])],
    ),
    "chat.messages.tool_calls.arguments": Edge(
        [call(arguments=json_of(size)) for size in (256 * KIB - 1, 256 * KIB)],
        [call(arguments=text) for text in (json_of(256 * KIB + 1), "", "[]", "{", "[" * 5000)],
    ),
    "chat.messages.tool_call_id": Edge(
        [said(of=TOOL, tool_call_id="i" * n) for n in (0, 63, 64)],
        [said(of=TOOL, tool_call_id="i" * 65), said(tool_call_id="i")],
    ),
    "chat.messages.name": Edge(
        [said(of=TOOL, name="i" * n) for n in (0, 63, 64)] + [said(name="i")], [said(name="i" * 65)]
    ),
    "chat.messages.reasoning": Edge(
        [said(of=ASSISTANT, reasoning="x")],
        [said(of=ASSISTANT, reasoning="x" * (PROMPT_BYTES + 1)), said(reasoning="x")],
    ),
    "chat.add_generation_prompt": Edge([chat(add_generation_prompt=value) for value in (True, False)]),
    "chat.continue_final_message": Edge(
        [chat(continue_final_message=False), open_at_end(), open_at_end(add_generation_prompt=False)],
        [chat(continue_final_message=True), open_at_end(add_generation_prompt=True), open_at_end(call())],
    ),
    "chat.documents": Edge(
        [chat(documents=["{}"] * num) for num in (1, MAX_DOCUMENTS - 1, MAX_DOCUMENTS)]
        + [chat(documents=[json_of(size)]) for size in (256 * KIB - 1, 256 * KIB)]
        + [chat(documents=[nested(8)])],
        [chat(documents=["{}"] * (MAX_DOCUMENTS + 1))]
        + [chat(documents=[text]) for text in (json_of(256 * KIB + 1), "[]", "", nested(9), nested(100_000))],
    ),
    "chat.template": Edge(
        [chat(template="x" * size) for size in (1, 64 * KIB - 1, 64 * KIB)],
        [chat(template=text) for text in ("", "x" * (64 * KIB + 1), "é" * (32 * KIB) + "x")],
    ),
    "chat.parallel_tool_calls": Edge([chat(parallel_tool_calls=value) for value in (True, False)]),
    "chat.tools.name": Edge(
        [tool(name=name) for name in ("f", "f" * 63, "f" * 64)]
        + [chat(tools=[{"name": f"f{at}"} for at in range(num)]) for num in (MAX_TOOLS - 1, MAX_TOOLS)],
        [tool(name=name) for name in ("", "f" * 65, "é")]
        + [chat(tools=[{"name": f"f{at}"} for at in range(MAX_TOOLS + 1)]), chat(tools=[{"name": "f"}] * 2)],
    ),
    "chat.tools.description": Edge(
        [tool(description="x" * n) for n in (0, 16 * KIB - 1, 16 * KIB)], [tool(description="x" * (16 * KIB + 1))]
    ),
    "chat.tools.strict": Edge([tool(strict=value) for value in (True, False)]),
    "chat.tools.parameters": Edge(
        [tool(parameters=json_of(size)) for size in (64 * KIB - 1, 64 * KIB)],
        [tool(parameters=text) for text in (json_of(64 * KIB + 1), "", "7")],
    ),
    "chat.tool_choice.mode": Edge(
        [chat(tool_choice={"mode": mode}) for mode in (0, 1, 2)]
        + [chat(tools=[{"name": "f"}], tool_choice={"mode": types_pb2.TOOL_MODE_REQUIRED})],
        [chat(tool_choice={"mode": mode}) for mode in (types_pb2.TOOL_MODE_REQUIRED, 4)],
    ),
    "chat.tool_choice.name": Edge(
        [chat(tools=[{"name": "f"}], tool_choice={"name": "f"})],
        [chat(tools=[{"name": "f"}], tool_choice={"name": name}) for name in ("", "g")],
    ),
    "constraint.json_schema": constrained(
        "json_schema", [json_of(64 * KIB - 1), json_of(64 * KIB)], ["", json_of(64 * KIB + 1)]
    ),
    "constraint.regex": constrained("regex", ["a", "a" * (16 * KIB)], ["", "a" * (16 * KIB + 1)]),
    "constraint.grammar": constrained("grammar", ["a", "a" * (64 * KIB)], ["", "a" * (64 * KIB + 1)]),
    "constraint.choice.texts": constrained(
        "choice",
        [{"texts": texts} for texts in (["a"], ["a"] * 1024, ["a" * 4096] * 16)],
        [{"texts": texts} for texts in ([], ["a"] * 1025, ["a", ""], ["a" * 4097], ["a" * 4096] * 16 + ["a"])],
    ),
    "chat.template_variables": Edge(
        [chat(template_variables=json_of(size)) for size in (16 * KIB - 1, 16 * KIB)],
        [chat(template_variables=text) for text in (json_of(16 * KIB + 1), "[]", '{"messages": 1}')],
    ),
    "sampling.max_tokens": field("sampling", "max_tokens", [1, CONTEXT - 3, CONTEXT], [0, CONTEXT + 1, 2**32 - 1]),
    "sampling.min_tokens": field("sampling", "min_tokens", [0, CONTEXT - 1, CONTEXT], [CONTEXT + 1]),
    "sampling.temperature": field("sampling", "temperature", [0.0, LEAST, 99.9, 100.0], [-LEAST, *ABOVE_100]),
    "sampling.top_k": field("sampling", "top_k", [0, 2**31 - 2, 2**31 - 1], [2**31]),
    "sampling.top_p": field("sampling", "top_p", [LEAST, 0.001, 0.999, 1.0], [0.0, *ABOVE_1]),
    "sampling.min_p": field("sampling", "min_p", [0.0, LEAST, 0.999, 1.0], [-LEAST, *ABOVE_1]),
    "sampling.typical_p": field("sampling", "typical_p", [LEAST, 0.001, 0.999, 1.0], [0.0, *ABOVE_1]),
    "sampling.presence_penalty": field("sampling", "presence_penalty", [-2.0, -LEAST, LEAST, 2.0], BEYOND_2),
    "sampling.frequency_penalty": field("sampling", "frequency_penalty", [-2.0, -LEAST, LEAST, 2.0], BEYOND_2),
    "sampling.repetition_penalty": field(
        "sampling", "repetition_penalty", [1e-30, 99.9, 100.0], [LEAST, 9.9e-31, 0.0, -1.0, *ABOVE_100]
    ),
    "sampling.logit_bias.key": field(
        "sampling",
        "logit_bias",
        [{0: 1.0}, {VOCAB - 1: 1.0}, dict.fromkeys(range(1023), 1.0), dict.fromkeys(range(1024), 1.0)],
        [{VOCAB: 1.0}, dict.fromkeys(range(1025), 1.0)],
    ),
    "sampling.logit_bias.value": field(
        "sampling",
        "logit_bias",
        [{1: -100.0}, {1: LEAST}, {1: 100.0}],
        [{1: value} for value in (*ABOVE_100, -MOST, -100.1)],
    ),
    "sampling.seed": field("sampling", "seed", [0, 2**64 - 1]),
    "sampling.n": field("sampling", "n", [1, 127, 128], [0, 129]),
    "sampling.best_of": field("sampling", "best_of", [1, 127, 128], [0, 129, 2**32 - 1]),
    "sampling.beam.width": Edge([beam(width=n) for n in (2, 31, 32)], [beam(width=n) for n in (0, 1, 33)]),
    "sampling.beam.length_penalty": Edge(
        [beam(length_penalty=value) for value in (-10.0, LEAST, 9.9, 10.0)],
        [beam(length_penalty=value) for value in (-10.1, 10.1, MOST, -MOST, math.nan)],
    ),
    "sampling.beam.early_stopping": Edge([beam(early_stopping=value) for value in (True, False)]),
    "sampling.allowed_token_ids": field(
        "sampling",
        "allowed_token_ids",
        [[], [VOCAB - 1], list(range(4095)), list(range(4096))],
        [[VOCAB], [1, 1], list(range(4097))],
    ),
    "sampling.bad_token_ids": field(
        "sampling",
        "bad_token_ids",
        [[], [VOCAB - 1], list(range(4095)), list(range(4096))],
        [[VOCAB], [1, 1], list(range(4097))],
    ),
    "sampling.bad_words": field(
        "sampling",
        "bad_words",
        [[], ["a" * 127], ["a" * 128], ["a"] * 63, ["a"] * 64],
        [[""], [" "], ["a" * 129], ["é" * 65], ["a"] * 65],
    ),
    "sampling.logits_processors.name": field(
        "sampling",
        "logits_processors",
        [[], [processor()], [processor()] * 7, [processor()] * 8],
        [[processor(name="")], [processor(name="other")], [processor()] * 9],
    ),
    "sampling.logits_processors.arguments.key": field(
        "sampling",
        "logits_processors",
        [[processor({"a": "b"})], [processor({str(at): "" for at in range(32)})], [processor({"a" * 4096: ""})]],
        [[processor({str(at): "" for at in range(33)})], [processor({"a" * 4097: ""})]],
    ),
    "sampling.logits_processors.arguments.value": field(
        "sampling",
        "logits_processors",
        [[processor({"a": "b" * 4094})], [processor({"a": "b" * 4095})]],
        [[processor({"a": "b" * 4096})], [processor({"a": "é" * 2048})]],
    ),
    "sampling.strategy.name": field(
        "sampling", "strategy", [strategy()], [strategy(name=""), strategy(name="other"), strategy(name="counting")]
    ),
    "sampling.strategy.arguments.key": field(
        "sampling",
        "strategy",
        [strategy({"a": "b"}), strategy({str(at): "" for at in range(32)}), strategy({"a" * 4096: ""})],
        [strategy({str(at): "" for at in range(33)}), strategy({"a" * 4097: ""})],
    ),
    "sampling.strategy.arguments.value": field(
        "sampling",
        "strategy",
        [strategy({"a": "b" * 4095})],
        [strategy({"a": "b" * 4096}), strategy({"a": "é" * 2048})],
    ),
    "stop.strings": field(
        "stop",
        "strings",
        [[], ["a" * 255], ["a" * 256], ["a"] * 31, ["a"] * 32],
        [[""], ["a" * 257], ["é" * 129], ["a"] * 33],
    ),
    "stop.token_ids": field("stop", "token_ids", [[VOCAB - 1], [1] * 63, [1] * 64], [[VOCAB], [1] * 65]),
    "stop.include": field("stop", "include", [True, False], [], strings=["a"]),
    "stop.ignore_eos": field("stop", "ignore_eos", [True, False]),
    "output.logprobs": field("output", "logprobs", [0, 19, 20], [21, 2**32 - 1]),
    "output.logprob_token_ids": field(
        "output",
        "logprob_token_ids",
        [[], [VOCAB - 1], list(range(31)), list(range(32))],
        [[VOCAB], [1, 1], list(range(33))],
        logprobs=0,
    ),
    "output.prompt_logprobs": field("output", "prompt_logprobs", [], [21, 2**32 - 1]),  # as with echo
    "output.echo": field("output", "echo", [False]),  # true needs more of the ring than this walk plays
    "output.skip_special_tokens": field("output", "skip_special_tokens", [True, False]),
    "output.token_records": field("output", "token_records", [True, False]),
    "output.tool_call_parts": field("output", "tool_call_parts", [False], [True]),  # without a chat
    "output.stream_interval": field("output", "stream_interval", [1, 2, 1023, 1024], [0, 1025]),
    "output.split_sections": field("output", "split_sections", [False], [True]),
    "cache.bypass": field("cache", "bypass", [True, False]),
    "scheduling.priority": field("scheduling", "priority", [-1000, 999, 1000], [-1001, 1001]),
    "scheduling.ttft_target.seconds": TTFT,
    "scheduling.ttft_target.nanos": TTFT,
    "scheduling.on_disconnect": field("scheduling", "on_disconnect", [0, 1, 2], [3]),
    "scheduling.detach_ttl.seconds": TTL,
    "scheduling.detach_ttl.nanos": TTL,
    "idempotency_key": Edge(
        [{"text": "a", "idempotency_key": "k" * n} for n in (1, 127, 128)],
        [{"text": "a", "idempotency_key": key} for key in ("", "k" * 129, "é" * 65)],
    ),
    "credit_window": Edge([], [{"text": "a", "credit_window": n} for n in (0, 1)]),
    "truncate_prompt_tokens": Edge(
        [{"text": "a", "truncate_prompt_tokens": n} for n in (1, CONTEXT - 1, CONTEXT)],
        [{"text": "a", "truncate_prompt_tokens": n} for n in (0, CONTEXT + 1)],
    ),
    "add_special_tokens": Edge(
        [{**prompt, "add_special_tokens": value} for prompt in ({"text": "a"}, chat()) for value in (True, False)]
        + [{"token_ids": {"ids": [1]}, "add_special_tokens": False}],
        [{"token_ids": {"ids": [1]}, "add_special_tokens": True}],
    ),
    "resume.generation_id": Edge([], [{"text": "a", "resume": {"generation_id": "x"}}]),
    # This gateway's engines draft nothing: to ask for it is refused by name.
    "speculation.enabled": field("speculation", "enabled", [False], []),
    "speculation.max_tokens": field("speculation", "max_tokens", [1, 63, 64], [0, 65, 2**32 - 1]),
    "resume.after_seq": Edge([], [{"text": "a", "resume": {"after_seq": 1}}]),
    "resume.outputs.output_index": Edge([], [{"text": "a", "resume": {"outputs": [{"output_index": 0}]}}]),
    "resume.outputs.token_ids": Edge([], [{"text": "a", "resume": {"outputs": [{"token_ids": [1]}]}}]),
    "resume.adapter_digest": Edge([], [{"text": "a", "resume": {"adapter_digest": "0" * 64}}]),
}

TOKENIZE: Mapping[str, Edge] = {
    "model": SPEC["model"],
    "revision": SPEC["revision"],
    "text": Edge([{"text": ""}, *SPEC["text"].good], [{}, *SPEC["text"].bad[2:]]),
    "add_special_tokens": Edge(SPEC["add_special_tokens"].good[:4]),
    "count_only": Edge([{"text": "a", "count_only": True}], [{"text": "a", "count_only": True, "offsets": True}]),
    "offsets": Edge([{"text": "a", "offsets": True}], [{"text": "a", "count_only": True, "offsets": True}]),
    **{path: edge for path, edge in SPEC.items() if path.startswith("chat.") and ".image." not in path},
    **{path: Edge([], [*edge.good, *edge.bad[:2]]) for path, edge in SPEC.items() if ".image." in path},
}

_SHORT = [{"text": "a"}]
EMBED: Mapping[str, Edge] = {
    "model": Edge([{"model": "toy", "inputs": _SHORT}], [{"model": "x" * 257, "inputs": _SHORT}]),
    "revision": Edge([{"revision": "r1", "inputs": _SHORT}], [{"revision": "", "inputs": _SHORT}]),
    "adapter": Edge([{"adapter": "", "inputs": _SHORT}], [{"adapter": "a", "inputs": _SHORT}]),
    "inputs.text": Edge(
        [{"inputs": [{"text": "a"}] * num} for num in (1, INPUTS)]
        + [{"inputs": [{"text": "a" * (PROMPT_BYTES - 1)}, {"text": "a"}]}],
        [
            {},
            {"inputs": [{"text": "a"}] * (INPUTS + 1)},
            {"inputs": [{"text": ""}]},
            {"inputs": [{}]},
            {"inputs": [{"text": "a" * PROMPT_BYTES}, {"text": "a"}]},
        ],
    ),
    "inputs.token_ids.ids": Edge(
        [{"inputs": [{"token_ids": {"ids": ids}}]} for ids in ([VOCAB - 1], [1] * TOKEN_IDS)],
        [{"inputs": [{"token_ids": {"ids": ids}}]} for ids in ([], [VOCAB], [1] * (TOKEN_IDS + 1))],
    ),
    "pooling": Edge(
        [{"inputs": _SHORT, "pooling": number} for number in (0, 1, 3)],
        [{"inputs": _SHORT, "pooling": number} for number in (2, 4)],
    ),
    "normalize": Edge([{"inputs": _SHORT, "normalize": value} for value in (True, False)]),
    "dimensions": Edge(
        [{"inputs": _SHORT, "dimensions": num} for num in (1, WIDTH)],
        [{"inputs": _SHORT, "dimensions": num} for num in (0, WIDTH + 1)],
    ),
    "encoding": Edge(
        [{"inputs": _SHORT, "encoding": number} for number in range(4)], [{"inputs": _SHORT, "encoding": 4}]
    ),
    "truncate": Edge(
        [{"inputs": _SHORT, "truncate": number} for number in range(4)], [{"inputs": _SHORT, "truncate": 4}]
    ),
    "instruction": Edge(
        [{"inputs": _SHORT, "instruction": text} for text in ("", "x" * 8192)],
        [
            {"inputs": _SHORT, "instruction": "x" * 8193},
            {"inputs": [*_SHORT, {"token_ids": {"ids": [1]}}], "instruction": "x"},
        ],
    ),
}

CLASSIFY: Mapping[str, Edge] = {
    path: edge for path, edge in EMBED.items() if path.startswith(("model", "revision", "inputs.", "truncate"))
}

_PAIR = {"query": "q", "documents": ["a"]}
RERANK: Mapping[str, Edge] = {
    "model": Edge([{**_PAIR, "model": "toy"}], [{**_PAIR, "model": "x" * 257}]),
    "revision": Edge([{**_PAIR, "revision": "r1"}], [{**_PAIR, "revision": ""}]),
    "query": Edge(
        [_PAIR, {**_PAIR, "query": "q" * (PROMPT_BYTES - 1)}], [{"documents": ["a"]}, {**_PAIR, "query": ""}]
    ),
    "documents": Edge(
        [{**_PAIR, "documents": ["a"] * INPUTS}, {**_PAIR, "documents": ["a" * (PROMPT_BYTES - 1)]}],
        [
            {"query": "q"},
            {**_PAIR, "documents": ["a"] * (INPUTS + 1)},
            {**_PAIR, "documents": ["a", ""]},
            {**_PAIR, "documents": ["a" * PROMPT_BYTES]},
        ],
    ),
    "top_n": Edge([{**_PAIR, "top_n": num} for num in (1, 100)], [{**_PAIR, "top_n": 0}]),
    "instruction": Edge([], [{**_PAIR, "instruction": text} for text in ("", "x")]),
    "truncate": Edge([{**_PAIR, "truncate": number} for number in range(4)], [{**_PAIR, "truncate": 4}]),
}

_TWO = {"first": "a", "second": "b"}
SCORE: Mapping[str, Edge] = {
    "model": Edge([{"pairs": [_TWO], "model": "toy"}], [{"pairs": [_TWO], "model": "x" * 257}]),
    "revision": Edge([{"pairs": [_TWO], "revision": "r1"}], [{"pairs": [_TWO], "revision": ""}]),
    **{
        f"pairs.{name}": Edge(
            [{"pairs": [_TWO] * INPUTS}, {"pairs": [{**_TWO, name: "x" * (PROMPT_BYTES - 1)}]}],
            [{}, {"pairs": [_TWO] * (INPUTS + 1)}]
            + [{"pairs": [_TWO, {**_TWO, name: text}]} for text in ("", "x" * PROMPT_BYTES)],
        )
        for name in ("first", "second")
    },
    "instruction": Edge([], [{"pairs": [_TWO], "instruction": text} for text in ("", "x")]),
    "truncate": Edge(
        [{"pairs": [_TWO], "truncate": number} for number in range(4)], [{"pairs": [_TWO], "truncate": 4}]
    ),
}

DETOKENIZE: Mapping[str, Edge] = {
    "model": Edge([{"model": "toy"}], [{"model": "x" * 257}]),
    "revision": Edge([{"revision": "r1"}], [{"revision": ""}]),
    "token_ids": Edge(
        [{"token_ids": ids} for ids in ([], [VOCAB - 1], [1] * (TOKEN_IDS - 1), [1] * TOKEN_IDS)],
        [{"token_ids": ids} for ids in ([VOCAB], [1] * (TOKEN_IDS + 1))],
    ),
    "skip_special_tokens": Edge([{"skip_special_tokens": value} for value in (True, False)]),
}

_NO_ONE = "f" * 32
CANCEL: Mapping[str, Edge] = {
    "generation_id": Edge([], [{"generation_id": name} for name in ("", _NO_ONE, "x" * 128, "x" * 129)]),
    "output_index": Edge([], [{"generation_id": _NO_ONE, "output_index": at} for at in (0, 2**32 - 1)]),
}

OPENED = {"text": "x" * 40, "credit_window": 1, "sampling": {"min_tokens": 4}}  # what frames are sent to
MAX_CREDIT = 1 << 20


def frame(kind: str, name: str, good: Sequence[object], bad: Sequence[object] = ()) -> Edge:
    """The edge of a field in a frame of Converse."""
    return Edge([{kind: {name: value}} for value in good], [{kind: {name: value}} for value in bad])


_DEADLINE = frame(
    "update",
    "deadline",
    [{"nanos": 1}, {"seconds": 86_399}, {"seconds": 86_400}],
    [{}, {"seconds": -1}, {"seconds": 86_401}],
)
_OPEN_DEADLINE = [{"open": {"spec": {"text": "a"}, "deadline": time}} for time in ({}, {"seconds": 86_401})]
FRAMES: Mapping[str, Edge] = {
    "tag": Edge([], []),  # its rules are of order, not of size
    "open.keep_input_open": Edge([], []),
    "open.joined_frames": Edge([], []),
    "open.deadline.seconds": Edge([], _OPEN_DEADLINE),
    "open.deadline.nanos": Edge([], _OPEN_DEADLINE),
    "append.text": frame(
        "append",
        "text",
        ["x", "x" * (PROMPT_BYTES - 41), "x" * (PROMPT_BYTES - 40)],
        ["", "x" * (PROMPT_BYTES - 39)],
    ),
    "append.token_ids.ids": frame(
        "append",
        "token_ids",
        [{"ids": ids} for ids in ([VOCAB - 1], [1] * (TOKEN_IDS - 1), [1] * TOKEN_IDS)],
        [{"ids": ids} for ids in ([], [VOCAB], [1] * (TOKEN_IDS + 1))],
    ),
    "append.message": Edge([], [{"append": {"message": {}}}, {"append": {}}]),
    "update.max_tokens": frame("update", "max_tokens", [4, CONTEXT - 1, CONTEXT], [0, 3, CONTEXT + 1]),
    "update.priority": frame("update", "priority", [-1000, 999, 1000], [-1001, 1001]),
    "update.stop": Edge([], [{"update": {"stop": {}}}]),
    "update.deadline.seconds": _DEADLINE,
    "update.deadline.nanos": _DEADLINE,
    "grant.tokens": frame("grant", "tokens", [1, MAX_CREDIT - 2, MAX_CREDIT - 1], [0, MAX_CREDIT, 2**32 - 1]),
    "cancel.output_index": frame("cancel", "output_index", [0], [1, 2**32 - 1]),
    "ping.nonce": Edge([], []),
}

CONTROL: Mapping[str, Edge] = {  # by method and field
    "ListModels.page_size": Edge(
        [{"page_size": num} for num in (1, 999, 1000)], [{"page_size": num} for num in (0, 1001, 2**32 - 1)]
    ),
    "ListModels.page_token": Edge([{"page_token": ""}], [{"page_token": "x"}, {"page_token": "x" * 257}]),
    "GetModel.model": Edge([{"model": "toy"}], [{"model": name} for name in ("", "x" * 256, "x" * 257)]),
    "GetServerInfo": Edge([{}]),
    "GetLoad": Edge([{}]),
    "LoadModel.model": Edge([], [{"model": "toy"}]),
    "UnloadModel.model": Edge([], [{"model": "toy"}]),
}
