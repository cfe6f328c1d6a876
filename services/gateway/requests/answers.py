"""From messages to the contract: deltas, outputs, usage, timings. Pure; the hot path of a stream."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from google.protobuf.duration_pb2 import Duration
from sluice.v1 import inference_pb2, types_pb2

from engine.errors import ServiceError
from engine.request import FinishReason
from services.gateway.contract.errors import to_rpc
from services.gateway.requests.open_requests import OpenRequest
from services.messages.details import Scored, Timings, Tokenized, TokenRecord
from services.messages.messages import Text
from services.messages.work import Generate, ints
from services.telemetry.observed import RequestUsage

SLICE_TOKENS = 1000
_REASONS = {
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.EOS: types_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: types_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: types_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
}


def accepted(request: OpenRequest) -> types_pb2.Accepted:
    """It was let in."""
    envelope = request.envelope
    return types_pb2.Accepted(
        generation_id=request.generation_id, model=envelope.model, revision=envelope.revision, params=effective(request)
    )


def prompt_info(request: OpenRequest) -> types_pb2.PromptInfo:
    """As far as it is known; its tokens where they are echoed."""
    made = types_pb2.PromptInfo(generation_id=request.generation_id)
    if request.admitted is not None:
        made.prompt_tokens, made.cached_tokens = request.admitted.num_prompt, request.admitted.num_cached
    if isinstance(request.prompt, Scored):
        add_tokens(made.tokens.add, request.prompt.tokens)
    elif request.prompt is not None:
        for token_id in ints(request.prompt.ids):
            made.tokens.add(id=token_id, piece=request.prompt.pieces[token_id])
    return made


def fill_delta(made: types_pb2.Delta, request: OpenRequest, seq: int, texts: Sequence[Text]) -> None:
    """`texts`, which wait together, as one delta: into its message, as copying one costs as much as making it."""
    first = texts[0]
    made.generation_id = request.generation_id
    made.seq = seq
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
        for num_drafted, num_accepted in one.drafts:
            made.drafted_tokens += num_drafted
            made.accepted_tokens += num_accepted
    if request.asked.token_records:
        for one in texts:
            add_tokens(made.tokens.add, one.tokens)


def add_sections(made: types_pb2.Delta | types_pb2.Output, texts: Sequence[Text]) -> None:
    """Add what is no text: most have none of it."""
    for one in texts:
        if one.reasoning:
            made.reasoning += one.reasoning
        for call in one.tool_calls:
            made.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)


def add_tokens(add: Callable[..., types_pb2.Token], records: Sequence[TokenRecord]) -> None:
    """Add a `Token` for each record through `add`, a repeated field's own."""
    for record in records:
        token = add(id=record.id, piece=record.piece)
        scores = record.logprobs
        if scores is None:
            continue
        token.logprob = scores.logprob
        token.rank = scores.rank
        rivals = zip(scores.top_ids, record.top_pieces, scores.top_logprobs, strict=False)  # more pieces are below
        for rank, (rival, piece, logprob) in enumerate(rivals, start=1):
            token.candidates.add(id=rival, piece=piece, logprob=logprob, rank=rank)
        if scores.asked_ids:
            pieces = record.top_pieces[len(scores.top_ids) :]
            for asked in zip(scores.asked_ids, pieces, scores.asked_logprobs, scores.asked_ranks, strict=True):
                token.candidates.add(id=asked[0], piece=asked[1], logprob=asked[2], rank=asked[3])


def output_finished(request: OpenRequest, last: Text) -> types_pb2.OutputFinished:
    """The end of one output."""
    return types_pb2.OutputFinished(
        generation_id=request.generation_id,
        output_index=last.output_index,
        finish_reason=reason(last),
        stop_match=stop_match(last),
        completion_tokens=request.outputs[last.output_index].num_tokens,
    )


def finished(request: OpenRequest) -> types_pb2.Finished:
    """The end of the generation."""
    spent = used(request)
    return types_pb2.Finished(
        generation_id=request.generation_id,
        last_seq=request.last_seq,
        usage=usage(spent),
        timings=timings(spent),
        params=effective(request),
    )


def failed(request: OpenRequest, error: ServiceError) -> inference_pb2.Failed:
    """The end of a generation without success."""
    generation_id = request.generation_id
    made = refused(error, generation_id=generation_id, last_seq=str(request.last_seq))
    made.generation_id, made.last_seq = generation_id, request.last_seq
    made.usage.CopyFrom(usage(used(request)))
    return made


def refused(error: ServiceError, **extra: str) -> inference_pb2.Failed:
    """An error of what is no generation yet; `extra` goes into its ErrorInfo."""
    status = to_rpc(error, extra)
    return inference_pb2.Failed(code=status.code, message=status.message, details=status.details)


def whole(request: OpenRequest) -> inference_pb2.GenerateResponse:
    """The answer of a unary generation."""
    envelope, spent = request.envelope, used(request)
    return inference_pb2.GenerateResponse(
        generation_id=request.generation_id,
        model=envelope.model,
        revision=envelope.revision,
        outputs=[_output(request, index) for index in range(len(request.outputs))],
        usage=usage(spent),
        timings=timings(spent),
        params=effective(request),
        prompt_info=prompt_info(request) if request.asked.tells_prompt else None,
    )


def _output(request: OpenRequest, index: int) -> types_pb2.Output:
    """One output, all of it."""
    state, texts = request.outputs[index], request.take_all(index)
    assert state.last is not None, "the request has ended well"
    output = types_pb2.Output(
        index=index,
        text="".join([one.text for one in texts]),
        finish_reason=reason(state.last),
        stop_match=stop_match(state.last),
        completion_tokens=state.num_tokens,
    )
    add_sections(output, texts)
    if request.asked.token_records:
        for one in texts:
            add_tokens(output.tokens.add, one.tokens)
    return output


def tokenized(request: OpenRequest, value: Tokenized) -> Iterator[bytes]:
    """The answer of Tokenize in its encoding, in slices that take a millisecond at most: a text of 1 MiB may be a
    million tokens, and other calls have their turns between."""
    envelope = request.envelope
    yield inference_pb2.TokenizeResponse(model=envelope.model, revision=envelope.revision).SerializeToString()
    ids, entries = ints(value.ids), _Entries(value.pieces)
    for at in range(0, len(ids), SLICE_TOKENS):
        yield b"".join([entries[token_id] for token_id in ids[at : at + SLICE_TOKENS]])


class _Entries(dict[int, bytes]):
    """Each token's entry in the encoding of an answer of Tokenize, made when it is first met: the same wherever it
    stands, and most stand in many places."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> bytes:
        made = inference_pb2.TokenizeResponse()
        made.tokens.add(id=token_id, piece=self._pieces[token_id])
        entry = self[token_id] = made.SerializeToString()
        return entry


def effective(request: OpenRequest) -> types_pb2.EffectiveParams | None:
    """Parameters as used; `max_tokens` as the engine settled it, or until then as it was asked for."""
    params, work = request.asked.effective, request.asked.work
    max_tokens = request.max_tokens or (work.params.max_tokens if isinstance(work, Generate) else 0)
    if params is not None and max_tokens:
        params.sampling.max_tokens = max_tokens
    return params


def used(request: OpenRequest) -> RequestUsage:
    """What a request has used so far, finished or not."""
    last = request.outcome if isinstance(request.outcome, Text) else None
    admitted = request.admitted
    return RequestUsage(
        num_prompt=admitted.num_prompt if admitted else 0,
        num_cached=admitted.num_cached if admitted else 0,
        num_completion=request.num_tokens,
        num_reasoning=sum([output.num_reasoning for output in request.outputs]),
        num_drafted=request.drafts.num_drafted,
        num_accepted=request.drafts.num_accepted,
        drafted_at=tuple(request.drafts.drafted_at),
        accepted_at=tuple(request.drafts.accepted_at),
        ttft_s=request.first_token_s - request.started_s if request.first_token_s is not None else 0.0,
        finish_reason=last.finish.value if last and last.finish else "",
        timings=last.timings if last else None,
    )


def usage(spent: RequestUsage) -> types_pb2.Usage:
    """As the contract has it."""
    return types_pb2.Usage(
        prompt_tokens=spent.num_prompt,
        cached_tokens=spent.num_cached,
        completion_tokens=spent.num_completion,
        reasoning_tokens=spent.num_reasoning,
        drafted_tokens=spent.num_drafted,
        accepted_tokens=spent.num_accepted,
        drafted_tokens_by_position=spent.drafted_at,
        accepted_tokens_by_position=spent.accepted_at,
    )


def timings(spent: RequestUsage) -> types_pb2.Timings:
    """As the contract has it."""
    phases = spent.timings or Timings()
    return types_pb2.Timings(
        queue=duration(phases.queue_s),
        tokenize=duration(phases.tokenize_s),
        prefill=duration(phases.prefill_s),
        decode=duration(phases.decode_s),
        detokenize=duration(phases.detokenize_s),
        ttft=duration(spent.ttft_s),
        preemptions=phases.num_preemptions,
    )


def duration(seconds: float) -> Duration:
    """Seconds, not negative, as a Duration."""
    whole_s, nanos = divmod(int(max(0.0, seconds) * 1e9), 10**9)
    return Duration(seconds=whole_s, nanos=nanos)


def reason(last: Text) -> "types_pb2.FinishReason.ValueType":
    """Why the output ended."""
    return types_pb2.FINISH_REASON_UNSPECIFIED if last.finish is None else _REASONS[last.finish]


def stop_match(last: Text) -> types_pb2.StopMatch | None:
    """What ended the output, if something of its own did."""
    if last.finish is FinishReason.STOP_STRING:
        return types_pb2.StopMatch(text=last.stop_match)
    if last.finish in (FinishReason.EOS, FinishReason.STOP_TOKEN) and last.tokens:
        return types_pb2.StopMatch(token_id=last.tokens[-1].id)
    return None
