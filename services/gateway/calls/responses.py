"""Converts events of the generation service to messages of the contract. Pure; on the hot path of every stream."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import FinishReason
from sluice_server.services.gateway.calls import delta_bytes
from sluice_server.services.gateway.contract.durations import to_duration
from sluice_server.services.gateway.contract.status import to_rpc
from sluice_server.services.gateway.contract.wire import as_varint
from sluice_server.services.gateway.generation.events import (
    AcceptedEvent,
    CompletedEvent,
    CompletedOutput,
    DeltaEvent,
    FailedEvent,
    FinishedEvent,
    GoingAwayEvent,
    OutputFinishedEvent,
    PongEvent,
    PromptEvent,
    RefusedEvent,
    StreamEvent,
    TaggedEvent,
    ThrottledEvent,
    ThrottleReason,
)
from sluice_server.services.messages.details import Scored, Timings, TokenRecord
from sluice_server.services.messages.messages import Text
from sluice_server.services.messages.work import ints
from sluice_server.services.telemetry.observed import RequestUsage

_REASONS = {
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.EOS: types_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: types_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: types_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
    FinishReason.TOOL_CALL: types_pb2.FINISH_REASON_TOOL_CALL,
}
_THROTTLED = {
    ThrottleReason.CREDIT: inference_pb2.THROTTLE_REASON_CREDIT,
    ThrottleReason.PREEMPTED: inference_pb2.THROTTLE_REASON_PREEMPTED,
    ThrottleReason.RECOVERY: inference_pb2.THROTTLE_REASON_RECOVERY,
}
_DELTA = as_varint(
    inference_pb2.StreamGenerateResponse.DELTA_FIELD_NUMBER << 3 | 2
)  # of every streaming call but Converse
_FRAME_TAG = as_varint(inference_pb2.ConverseResponse.TAG_FIELD_NUMBER << 3)
_FRAME_DELTA = as_varint(inference_pb2.ConverseResponse.DELTA_FIELD_NUMBER << 3 | 2)
Response = TypeVar(
    "Response",
    bound=inference_pb2.StreamGenerateResponse | inference_pb2.ConverseResponse | inference_pb2.ResumeGenerateResponse,
)


def of_stream(kind: type[Response], event: StreamEvent) -> Response | bytes:
    """Returns the response of a streaming call for an event; encoded already where that costs less."""
    if isinstance(event, DeltaEvent):
        made = delta_bytes.as_field(_DELTA, event)
        if made is not None:
            return made
    return fill(kind(), event)


def fill(made: Response, event: StreamEvent) -> Response:
    """Fills the response of a streaming call with an event, in place: copying a message costs as much as making it."""
    match event:
        case DeltaEvent():
            fill_delta(made.delta, event)
        case AcceptedEvent():
            made.accepted.CopyFrom(accepted(event))
        case PromptEvent():
            made.prompt_info.CopyFrom(prompt_info(event))
        case OutputFinishedEvent():
            made.output_finished.CopyFrom(output_finished(event))
        case FinishedEvent():
            made.finished.CopyFrom(finished(event))
    return made


def of_converse(tagged: TaggedEvent) -> inference_pb2.ConverseResponse | bytes:
    """Returns the response for an event of a Converse stream; encoded already where that costs less."""
    if isinstance(tagged.event, DeltaEvent):
        made = delta_bytes.as_field(_FRAME_DELTA, tagged.event)
        if made is not None:
            return b"".join((_FRAME_TAG, delta_bytes.varint(tagged.tag), made))
    return converse_response(tagged)


def converse_response(tagged: TaggedEvent) -> inference_pb2.ConverseResponse:
    """Returns the response for an event of a Converse stream."""
    made, event = inference_pb2.ConverseResponse(tag=tagged.tag), tagged.event
    match event:
        case FailedEvent():
            made.failed.CopyFrom(failed(event))
        case ThrottledEvent():
            made.throttled.generation_id, made.throttled.reason = event.generation_id, _THROTTLED[event.reason]
        case RefusedEvent():
            extra = {} if event.meant_tag is None else {"tag": str(event.meant_tag)}
            made.failed.CopyFrom(refused(event.error, **extra))
        case PongEvent():
            made.pong.nonce = event.nonce
        case GoingAwayEvent():
            made.going_away.message = event.message
        case _:
            fill(made, event)
    return made


def accepted(event: AcceptedEvent) -> types_pb2.Accepted:
    """Converts the event of an admitted request."""
    made = types_pb2.Accepted(
        generation_id=event.generation_id, model=event.model, revision=event.revision, params=event.params
    )
    if event.adapter:
        made.adapter, made.adapter_digest = event.adapter, event.adapter_digest
    if event.num_prompt:  # 0: the engine has not seen the prompt yet
        made.prompt_tokens, made.cached_tokens = event.num_prompt, event.num_cached
    return made


def prompt_info(event: PromptEvent) -> types_pb2.PromptInfo:
    """Converts the prompt event; with tokens only where the client asked for them."""
    made = types_pb2.PromptInfo(generation_id=event.generation_id)
    if event.num_prompt or event.num_cached:
        made.prompt_tokens, made.cached_tokens = event.num_prompt, event.num_cached
    if isinstance(event.tokens, Scored):
        add_tokens(made.tokens.add, event.tokens.tokens)
    elif event.tokens is not None:
        for token_id in ints(event.tokens.ids):
            made.tokens.add(id=token_id, piece=event.tokens.pieces[token_id])
    return made


def fill_delta(made: types_pb2.Delta, event: DeltaEvent) -> None:
    """Fills a delta with the messages of an event."""
    texts = event.texts
    first = texts[0]
    made.generation_id = event.generation_id
    made.seq = event.seq
    made.coalesced_steps = first.num_steps if len(texts) == 1 else sum([one.num_steps for one in texts])
    if first.output_index:
        made.output_index = first.output_index
    if len(texts) == 1:
        made.text, made.consumed = first.text, len(first.tokens)
    else:
        made.text = "".join([one.text for one in texts])
        made.consumed = sum([len(one.tokens) for one in texts])
    add_sections(made, texts)
    for one in texts:
        for part in one.tool_call_parts:
            made.tool_call_parts.add(index=part.index, id=part.id, name=part.name, arguments=part.arguments)
        for num_drafted, num_accepted in one.drafts:
            made.drafted_tokens += num_drafted
            made.accepted_tokens += num_accepted
    if event.has_records:
        for one in texts:
            add_tokens(made.tokens.add, one.tokens)


def add_sections(made: types_pb2.Delta | types_pb2.Output, texts: Sequence[Text]) -> None:
    """Adds reasoning and tool calls; most messages have none."""
    for one in texts:
        if one.reasoning:
            made.reasoning += one.reasoning
        for call in one.tool_calls:
            made.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)


def add_tokens(add: Callable[..., types_pb2.Token], records: Sequence[TokenRecord]) -> None:
    """Adds a `Token` for each record through `add`, the `add` method of a repeated field."""
    for record in records:
        token = add(id=record.id, piece=record.piece)
        scores = record.logprobs
        if scores is None:
            continue
        token.logprob = scores.logprob
        token.rank = scores.rank
        rivals = zip(scores.top_ids, record.top_pieces, scores.top_logprobs, strict=False)  # rest: asked_ids
        for rank, (rival, piece, logprob) in enumerate(rivals, start=1):
            token.candidates.add(id=rival, piece=piece, logprob=logprob, rank=rank)
        if scores.asked_ids:
            pieces = record.top_pieces[len(scores.top_ids) :]
            for asked in zip(scores.asked_ids, pieces, scores.asked_logprobs, scores.asked_ranks, strict=True):
                token.candidates.add(id=asked[0], piece=asked[1], logprob=asked[2], rank=asked[3])


def output_finished(event: OutputFinishedEvent) -> types_pb2.OutputFinished:
    """Converts the end of one output."""
    last = event.last
    return types_pb2.OutputFinished(
        generation_id=event.generation_id,
        output_index=last.output_index,
        finish_reason=reason(last),
        stop_match=stop_match(last),
        completion_tokens=event.num_tokens,
    )


def finished(event: FinishedEvent) -> types_pb2.Finished:
    """Converts the successful end of a generation."""
    return types_pb2.Finished(
        generation_id=event.generation_id,
        last_seq=event.last_seq,
        usage=usage(event.used),
        timings=timings(event.used),
        params=event.params,
    )


def failed(event: FailedEvent) -> inference_pb2.Failed:
    """Converts the failure of a generation."""
    made = refused(event.error, generation_id=event.generation_id, last_seq=str(event.last_seq))
    made.generation_id, made.last_seq = event.generation_id, event.last_seq
    made.usage.CopyFrom(usage(event.used))
    return made


def refused(error: ServiceError, **extra: str) -> inference_pb2.Failed:
    """Converts an error of a frame that has no generation; `extra` is added to its ErrorInfo."""
    status = to_rpc(error, extra)
    return inference_pb2.Failed(code=status.code, message=status.message, details=status.details)


def whole(event: CompletedEvent) -> inference_pb2.GenerateResponse:
    """Returns the response of a unary generation."""
    accepted, used = event.accepted, event.used
    return inference_pb2.GenerateResponse(
        generation_id=accepted.generation_id,
        model=accepted.model,
        revision=accepted.revision,
        outputs=[_output(index, one, event.has_records) for index, one in enumerate(event.outputs)],
        usage=usage(used),
        timings=timings(used),
        params=accepted.params,
        prompt_info=prompt_info(event.prompt) if event.prompt is not None else None,
        adapter=accepted.adapter,
        adapter_digest=accepted.adapter_digest,
    )


def _output(index: int, completed: CompletedOutput, has_records: bool) -> types_pb2.Output:
    """Converts one complete output."""
    last, texts = completed.last, completed.texts
    output = types_pb2.Output(
        index=index,
        text="".join([one.text for one in texts]),
        finish_reason=reason(last),
        stop_match=stop_match(last),
        completion_tokens=completed.num_tokens,
    )
    add_sections(output, texts)
    if has_records:
        for one in texts:
            add_tokens(output.tokens.add, one.tokens)
    return output


def usage(spent: RequestUsage) -> types_pb2.Usage:
    """Converts a request's usage."""
    return types_pb2.Usage(
        prompt_tokens=spent.num_prompt,
        cached_tokens=spent.num_cached,
        completion_tokens=spent.num_completion,
        reasoning_tokens=spent.num_reasoning,
        drafted_tokens=spent.num_drafted,
        accepted_tokens=spent.num_accepted,
        drafted_tokens_by_position=spent.drafted_at,
        accepted_tokens_by_position=spent.accepted_at,
        image_tokens=spent.num_image,
    )


def timings(spent: RequestUsage) -> types_pb2.Timings:
    """Converts a request's timings; times in seconds become Durations."""
    phases = spent.timings or Timings()
    return types_pb2.Timings(
        queue=to_duration(phases.queue_s),
        tokenize=to_duration(phases.tokenize_s),
        prefill=to_duration(phases.prefill_s),
        decode=to_duration(phases.decode_s),
        detokenize=to_duration(phases.detokenize_s),
        ttft=to_duration(spent.ttft_s),
        preemptions=phases.num_preemptions,
    )


def reason(last: Text) -> "types_pb2.FinishReason.ValueType":
    """Returns the contract's finish reason of an output."""
    return types_pb2.FINISH_REASON_UNSPECIFIED if last.finish is None else _REASONS[last.finish]


def stop_match(last: Text) -> types_pb2.StopMatch | None:
    """Returns the stop string or stop token that ended the output; None for any other reason."""
    if last.finish is FinishReason.STOP_STRING:
        return types_pb2.StopMatch(text=last.stop_match)
    if last.finish in (FinishReason.EOS, FinishReason.STOP_TOKEN) and last.tokens:
        return types_pb2.StopMatch(token_id=last.tokens[-1].id)
    return None
