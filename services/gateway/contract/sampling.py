"""Translates a generation's options from the contract to the engine's values, and back to the effective parameters.

Covers sampling, stop conditions, text, scheduling, speculation, detaching. Fills in defaults; the engine's own function
checks ranges.
"""

import dataclasses
import secrets
from collections.abc import Callable

from google.protobuf.duration_pb2 import Duration
from sluice.v1 import types_pb2

from sluice_server.engine.checks import NEUTRAL, check_draft_tokens, check_num, check_priority
from sluice_server.engine.errors import invalid, unsupported
from sluice_server.engine.parameters import REPLACED
from sluice_server.engine.request import Limits, ProcessorCall, SamplingParams
from sluice_server.services.gateway.contract import parameters
from sluice_server.services.gateway.contract.durations import to_seconds
from sluice_server.services.messages.work import Scheduling, Stops, TextOptions

MAX_TTFT_TARGET_S = 3600.0
MAX_DETACH_TTL_S = 600.0
DEFAULT_DETACH_TTL_S = 60.0
MAX_KEY_BYTES = 128
MAX_STREAM_INTERVAL = 1024
_CANCEL = types_pb2.DISCONNECT_ACTION_CANCEL
_DETACH = types_pb2.DISCONNECT_ACTION_DETACH


def sampling_params(spec: types_pb2.GenerationSpec, defaults: SamplingParams, limits: Limits) -> SamplingParams:
    """Returns the effective sampling parameters: absent ones take the model's default; an absent seed is drawn here.
    Raises `ServiceError`.

    Checks only sizes, before anything large is copied.
    """
    asked = spec.sampling
    if asked.HasField("max_tokens") and asked.max_tokens == 0:
        raise invalid("max_tokens", "0 is below 1; leave it out to generate all that the context leaves", limit=1)
    if asked.HasField("best_of") and asked.best_of == 0:  # in the engine's parameters 0 means absent
        raise invalid("best_of", "0 is below n; leave it out to sample n outputs", limit=1)
    if asked.HasField("beam") and not asked.beam.width:
        raise invalid("beam.width", "is needed for a beam search: 2 or more hypotheses", limit=2)
    values = parameters.taken(spec, limits)
    if asked.logits_processors:
        values["logits_processors"] = logits_processors(asked, limits)
    if asked.HasField("strategy"):
        values = {row.name: row.of(NEUTRAL) for row in REPLACED} | values
        values["strategy"] = _call(asked.strategy)
    if not asked.HasField("seed"):
        values["seed"] = secrets.randbits(64)
    if asked.HasField("beam") and not asked.HasField("repetition_penalty"):
        values["repetition_penalty"] = 1.0  # the model's default is for sampling; a search uses plain probabilities
    return dataclasses.replace(defaults, **values)


def logits_processors(asked: types_pb2.SamplingParams, limits: Limits) -> tuple[ProcessorCall, ...]:
    """Returns the logits processors that a request asks for. Raises `ServiceError` for too many."""
    check_num("sampling.logits_processors", len(asked.logits_processors), limits.max_logits_processors)
    return tuple(_call(one) for one in asked.logits_processors)


def _call(asked: types_pb2.LogitsProcessor | types_pb2.SamplingStrategy) -> ProcessorCall:
    return ProcessorCall(asked.name, tuple(sorted(asked.arguments.items())))


def stops(stop: types_pb2.StopConditions, limits: Limits, eos_ids: tuple[int, ...]) -> Stops:
    """Returns the stop strings, each within its size; refuses conditions that contradict each other. Raises
    `ServiceError`."""
    check_num("stop.strings", len(stop.strings), limits.max_stop_strings)
    for at, text in enumerate(stop.strings):
        size = len(text.encode())  # encoded once: 10 MB take 5 ms
        if not 1 <= size <= limits.max_stop_bytes:
            raise invalid(f"stop.strings[{at}]", f"has {size} bytes; 1 to {limits.max_stop_bytes} are allowed")
    if stop.include and not stop.strings:
        raise invalid("stop.include", "is of no use without stop.strings: leave it out")
    for at, token_id in enumerate(stop.token_ids):
        if stop.ignore_eos and token_id in eos_ids:
            raise invalid(
                f"stop.token_ids[{at}]", f"{token_id} ends a sequence of this model, which ignore_eos ignores"
            )
    return Stops(strings=tuple(stop.strings), include=stop.include)


def bad_words(asked: types_pb2.SamplingParams, limits: Limits) -> tuple[str, ...]:
    """Returns the words that the output must not contain, each within its size. Raises `ServiceError`."""
    check_num("bad_words", len(asked.bad_words), limits.max_bad_words)
    most_bytes = limits.max_bad_word_bytes
    for at, word in enumerate(asked.bad_words):
        size = len(word.encode())
        if not 1 <= size <= most_bytes or word.isspace():
            raise invalid(f"bad_words[{at}]", f"has {size} bytes; 1 to {most_bytes}, not only space, are allowed")
    return tuple(asked.bad_words)


def text(spec: types_pb2.GenerationSpec) -> TextOptions:
    """Returns how tokens become text. Raises `ServiceError`."""
    output = spec.output
    if output.split_sections and not spec.HasField("chat"):
        raise invalid("output.split_sections", "is of no use without a chat: leave it out")
    one_call = spec.chat.HasField("parallel_tool_calls") and not spec.chat.parallel_tool_calls
    if one_call and output.HasField("split_sections") and not output.split_sections:
        raise invalid("chat.parallel_tool_calls", "is false, and calls are not looked for: leave split_sections out")
    is_split = spec.HasField("chat") and (output.split_sections or not output.HasField("split_sections"))
    if output.tool_call_parts and not is_split:
        raise invalid("output.tool_call_parts", "needs a chat whose output is split into sections: leave it out")
    if output.HasField("logprobs") and output.HasField("token_records") and not output.token_records:
        raise invalid(
            "output.token_records", "is false, and log probabilities come in records: leave out one of the two"
        )
    return TextOptions(
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        split_sections=output.split_sections if output.HasField("split_sections") else True,
        call_parts=output.tool_call_parts,
        stream_interval=_stream_interval(output),
    )


def _stream_interval(output: types_pb2.OutputOptions) -> int:
    """Returns the new tokens after which text is sent; 0 where the request sets none. Raises `ServiceError`."""
    asked = output.stream_interval
    if output.HasField("stream_interval") and not 1 <= asked <= MAX_STREAM_INTERVAL:
        limit = MAX_STREAM_INTERVAL if asked else 1
        raise invalid("output.stream_interval", f"{asked} is not in [1, {MAX_STREAM_INTERVAL}]", limit=limit)
    return asked


def scheduling(spec: types_pb2.GenerationSpec, priority: int, limits: Limits, *, is_open: bool) -> Scheduling:
    """Returns the scheduling options; `priority` is that of the metadata. Raises `ServiceError`."""
    asked = spec.scheduling
    if asked.HasField("priority"):
        priority = asked.priority
    check_priority(priority, limits)
    target_s: float | None = None
    if asked.HasField("ttft_target"):
        target_s = to_seconds("scheduling.ttft_target", asked.ttft_target, MAX_TTFT_TARGET_S)
    credit = spec.credit_window if spec.HasField("credit_window") else None
    drafts = max_draft_tokens(spec.speculation, limits)
    return Scheduling(priority, target_s, spec.cache.bypass, credit, is_open, drafts)


def max_draft_tokens(asked: types_pb2.SpeculationOptions, limits: Limits) -> int | None:
    """Returns the maximum of drafted tokens per step; None where the request sets none. Raises `ServiceError`."""
    if asked.enabled and not limits.max_draft_tokens:
        raise unsupported("speculation.enabled", "speculation.enabled: this server does not speculate: leave it out")
    if not asked.HasField("max_tokens"):
        return 0 if asked.HasField("enabled") and not asked.enabled else None
    if asked.HasField("enabled") and not asked.enabled:
        raise invalid("speculation.max_tokens", "is of no use where speculation.enabled is false: leave it out")
    if asked.max_tokens == 0:
        raise invalid("speculation.max_tokens", "0 is below 1; to draft nothing, set speculation.enabled to false")
    check_draft_tokens(asked.max_tokens)
    return asked.max_tokens


def detach_ttl_s(asked: types_pb2.SchedulingOptions) -> float | None:
    """Returns how long the generation is kept without a reader; None if it ends with its reader. Raises
    `ServiceError`."""
    if asked.on_disconnect == types_pb2.DISCONNECT_ACTION_DETACH:
        if not asked.HasField("detach_ttl"):
            return DEFAULT_DETACH_TTL_S
        return to_seconds("scheduling.detach_ttl", asked.detach_ttl, MAX_DETACH_TTL_S)
    if asked.HasField("detach_ttl"):
        raise invalid("scheduling.detach_ttl", "is of no use without DISCONNECT_ACTION_DETACH: leave it out")
    known = (types_pb2.DISCONNECT_ACTION_UNSPECIFIED, types_pb2.DISCONNECT_ACTION_CANCEL)
    if asked.on_disconnect not in known:
        raise invalid("scheduling.on_disconnect", f"{asked.on_disconnect} is not an action of this server")
    return None


def idempotency_key(spec: types_pb2.GenerationSpec) -> str:
    """Returns the key; "" where it is absent. Raises `ServiceError`."""
    size = len(spec.idempotency_key.encode())
    if spec.HasField("idempotency_key") and not 1 <= size <= MAX_KEY_BYTES:
        raise invalid("idempotency_key", f"has {size} bytes; 1 to {MAX_KEY_BYTES} are allowed", limit=MAX_KEY_BYTES)
    return spec.idempotency_key


def _nanos(time_s: float) -> int:
    return round(time_s % 1.0 * 1e9)


class Told:
    """The parameters of a generation as its client is told them: a quarter of the time of translating a request, and
    wanted only when the engine has begun with it."""

    def __init__(self, make: Callable[[], types_pb2.EffectiveParams]) -> None:
        self._make: Callable[[], types_pb2.EffectiveParams] | None = make
        self._params = types_pb2.EffectiveParams()

    def params(self) -> types_pb2.EffectiveParams:
        """Returns the same message each time, made at the first; then what it is made of is let go."""
        if self._make is not None:
            self._params, self._make = self._make(), None
        return self._params


def effective(
    params: SamplingParams,
    stops: Stops,
    text: TextOptions,
    scheduling: Scheduling,
    spec: types_pb2.GenerationSpec,
    detach_ttl_s: float | None,
) -> types_pb2.EffectiveParams:
    """Returns every parameter in effect; `max_tokens` is set when the engine has settled it."""
    records = spec.output.token_records if spec.output.HasField("token_records") else True
    return types_pb2.EffectiveParams(
        sampling=parameters.told_sampling(params, spec.sampling.bad_words),
        stop=parameters.told_stop(params, stops.strings, include=stops.include),
        output=types_pb2.OutputOptions(
            **parameters.told_output(params),
            skip_special_tokens=text.skip_special_tokens,
            token_records=records,
            echo=spec.output.echo,
            split_sections=text.split_sections if spec.HasField("chat") else None,
            tool_call_parts=spec.output.tool_call_parts if spec.output.HasField("tool_call_parts") else None,
            stream_interval=text.stream_interval or None,
        ),
        constraint=spec.constraint if spec.HasField("constraint") else None,
        speculation=spec.speculation if spec.HasField("speculation") else None,
        cache=types_pb2.CacheOptions(bypass=scheduling.bypasses_cache),
        scheduling=_told_scheduling(spec, scheduling, detach_ttl_s),
    )


def _told_scheduling(
    spec: types_pb2.GenerationSpec, scheduling: Scheduling, detach_ttl_s: float | None
) -> types_pb2.SchedulingOptions:
    kept = None if detach_ttl_s is None else Duration(seconds=int(detach_ttl_s), nanos=_nanos(detach_ttl_s))
    return types_pb2.SchedulingOptions(
        priority=scheduling.priority,
        ttft_target=spec.scheduling.ttft_target if scheduling.ttft_target_s is not None else None,
        on_disconnect=_CANCEL if kept is None else _DETACH,
        detach_ttl=kept,
    )
