"""Translates requests of the contract into work for the ring: defaults, limits, refusal of what is not built.

Takes sluice.v1 requests; returns the work and the effective parameters. Depends on no call and no socket; the one state
is that of `OptionMemo`.
"""

import dataclasses
from functools import partial

from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.checks import (
    SEES_PROMPT,
    check_credit,
    check_generates,
    check_prompt,
)
from sluice_server.engine.errors import invalid, other_revision, unsupported
from sluice_server.engine.request import Limits, SamplingParams
from sluice_server.services import text_bound
from sluice_server.services.gateway.access.admission import BYTES_PER_TOKEN
from sluice_server.services.gateway.contract import sampling
from sluice_server.services.gateway.contract.chat import chat_prompt, num_bytes
from sluice_server.services.gateway.contract.constraint import constraint
from sluice_server.services.gateway.contract.fields import refuse_unbuilt
from sluice_server.services.gateway.contract.ids import Slices, pack_checked, packing
from sluice_server.services.gateway.contract.images import ALL, chat_images
from sluice_server.services.gateway.contract.prompt_embeds import prompt_embeds
from sluice_server.services.gateway.contract.served import adapter_of, check_model
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.messages.work import (
    ChatPrompt,
    Detokenize,
    Generate,
    PromptInput,
    TextPrompt,
    Tokenize,
    TokenPrompt,
    Work,
)

MAX_ID_BYTES = 128


@dataclasses.dataclass(frozen=True, slots=True)
class TranslatedRequest:
    """A client's request, ready for the ring.

    Attributes:
        work: what the ring computes.
        reserve: tokens that admission sets aside.
        num_outputs: outputs that the client gets.
        told: parameters to echo; see `effective`. None without a generation.
        token_records: whether the client asked for a record per token.
        tells_prompt: whether it asked for the prompt's tokens.
        idempotency_key: name of the generation while it is open, or "".
        detach_ttl_s: how long the generation is kept without a reader; None: it ends with its reader.
        resume: per output the ids that it continues behind (int32); empty for a new generation.
        after_seq: sequence number of the last delta that its client has.
        adapter: name of the adapter; "" for the base.
        model: what the request calls the model, if it names the adapter so; "" otherwise.
        adapter_digest: that the adapter must have, in hex; "" for any.
    """

    work: Work
    reserve: int = 0
    num_outputs: int = 1
    told: sampling.Told | None = None
    token_records: bool = True
    tells_prompt: bool = False
    idempotency_key: str = ""
    detach_ttl_s: float | None = None
    resume: tuple[bytes, ...] = ()
    after_seq: int = 0
    adapter: str = ""
    model: str = ""
    adapter_digest: str = ""

    @property
    def effective(self) -> types_pb2.EffectiveParams | None:
        """The parameters to echo, which are made when they are first asked for; `max_tokens` is set when the engine has
        settled it. None without a generation."""
        return None if self.told is None else self.told.params()

    @property
    def numbered_after(self) -> int:
        """Sequence number behind which its deltas are numbered: a search sends its whole answer again."""
        return 0 if self.is_search else self.after_seq

    @property
    def is_search(self) -> bool:
        """Whether outputs are chosen among candidates, and so emitted only at the end."""
        return isinstance(self.work, Generate) and self.work.params.is_search


def whole(spec: types_pb2.GenerationSpec, priority: int, settings: GatewaySettings) -> TranslatedRequest:
    """Returns the work of Generate; `priority` is that of the metadata. Raises `ServiceError`."""
    if spec.scheduling.on_disconnect == types_pb2.DISCONNECT_ACTION_DETACH:
        raise invalid("scheduling.on_disconnect", "DETACH is for streams, which can be resumed: leave it out")
    if spec.output.tool_call_parts:
        raise invalid("output.tool_call_parts", "is for streams: leave it out")
    if spec.output.HasField("stream_interval"):
        raise invalid("output.stream_interval", "is for streams: leave it out")
    return generation(spec, priority, settings)


def generation(spec: types_pb2.GenerationSpec, priority: int, settings: GatewaySettings) -> TranslatedRequest:
    """Returns the work of StreamGenerate; `priority` is that of the metadata. Raises `ServiceError`."""
    if spec.HasField("credit_window"):
        raise invalid("credit_window", "is for Converse, where there are grants: leave it out")
    _check_no_resume(spec)
    return _generation(spec, priority, settings, is_open=False)


def continuation(spec: types_pb2.GenerationSpec, priority: int, settings: GatewaySettings) -> TranslatedRequest:
    """Returns the work of ResumeGenerate for a generation whose owner is gone, from what its client received. Raises
    `ServiceError`."""
    for field, is_there in (("revision", spec.HasField("revision")), ("seed", spec.sampling.HasField("seed"))):
        if not is_there:
            raise invalid(field, "is needed, as in Accepted: the gateway that owned the generation is gone")
    if spec.HasField("credit_window"):
        raise invalid("credit_window", "is for Converse, where there are grants: leave it out")
    if settings.model.revision and spec.revision != settings.model.revision:  # a label is not exact
        raise other_revision(spec.revision, settings.model.revision)
    asked = _generation(spec, priority, settings, is_open=False)
    received: list[bytes] = [b""] * asked.num_outputs
    named: set[int] = set()
    for at, one in enumerate(spec.resume.outputs):
        if one.output_index >= asked.num_outputs or one.output_index in named:
            limit = f"is not below {asked.num_outputs}, or is given twice"
            raise invalid(f"resume.outputs[{at}].output_index", f"{one.output_index} {limit}")
        named.add(one.output_index)
        received[one.output_index] = pack_checked(f"resume.outputs[{at}].token_ids", one.token_ids, settings)
    if asked.adapter and not spec.resume.adapter_digest:
        raise invalid("resume.adapter_digest", "is needed, as in Accepted: the gateway that owned it is gone")
    # A search is computed again whole: its answer depends on the seed alone, and so do the numbers of its deltas.
    goes_on = any(received) and not asked.is_search
    resume, digest = tuple(received) if goes_on else (), spec.resume.adapter_digest
    return dataclasses.replace(asked, resume=resume, after_seq=spec.resume.after_seq, adapter_digest=digest)


def _check_no_resume(spec: types_pb2.GenerationSpec) -> None:
    if spec.HasField("resume"):
        raise invalid("resume", "is for ResumeGenerate: leave it out")


def opening(frame: inference_pb2.Open, priority: int, settings: GatewaySettings) -> TranslatedRequest:
    """Returns the work of a generation of Converse. Raises `ServiceError`."""
    spec, is_open = frame.spec, frame.keep_input_open
    _check_no_resume(spec)
    if spec.HasField("credit_window"):
        check_credit(spec.credit_window, settings.limits, "credit_window")
        if spec.sampling.best_of > max(spec.sampling.n, 1) or spec.sampling.HasField("beam"):
            raise invalid("credit_window", "best_of and beam search answer at their end only: leave it out")
    if is_open and spec.HasField("chat"):
        raise unsupported("keep_input_open", "a chat cannot be appended to: send text or token_ids")
    for field in ("echo", "prompt_logprobs"):
        if is_open and spec.output.HasField(field):
            message = "reports on the whole prompt, and the input of this generation stays open: leave it out"
            raise invalid(f"output.{field}", message)
    if is_open and (spec.sampling.logits_processors or spec.sampling.HasField("strategy")):
        raise unsupported("keep_input_open", SEES_PROMPT)
    if is_open and spec.HasField("truncate_prompt_tokens"):
        raise invalid("truncate_prompt_tokens", "needs the whole prompt, and the input of this generation stays open")
    return _generation(spec, priority, settings, is_open=is_open)


def check_resume(spec: types_pb2.GenerationSpec) -> None:
    """Raises `ServiceError` unless `spec` names a generation to resume."""
    if not spec.HasField("resume"):
        raise invalid("resume", "is missing; name the generation and the last delta received")
    size = len(spec.resume.generation_id.encode())
    if not 1 <= size <= MAX_ID_BYTES:
        raise invalid("resume.generation_id", f"has {size} bytes; 1 to {MAX_ID_BYTES} are allowed")


def _generation(
    spec: types_pb2.GenerationSpec, priority: int, settings: GatewaySettings, *, is_open: bool
) -> TranslatedRequest:
    adapter = adapter_of(spec, settings)
    check_generates(settings.model.generates)
    refuse_unbuilt(spec)
    limits, options = settings.limits, settings.options.of(spec, priority, is_open=is_open)
    params, stops, text, scheduling = options.params, options.stops, options.text, options.scheduling
    keep_last = _keep_last(spec, limits)
    embeds = prompt_embeds(spec, params, limits, is_open=is_open)
    images = chat_images(spec.chat, settings)
    if images and keep_last:
        raise unsupported("truncate_prompt_tokens", f"truncate_prompt_tokens is not supported together with {ALL}")
    prompt, size = _prompt(spec, params, settings, 0 if embeds is None else embeds.num_tokens)
    if images and limits.images is not None:
        size += len(images) * limits.images.most_tokens
    limit = constraint(spec, prompt, params)
    echo = spec.output.echo and params.prompt_logprobs < 0  # prompt_logprobs bring the prompt's tokens
    size = min(size, keep_last or size)
    output = params.max_tokens or max(0, limits.context_length - size)
    detach_ttl_s = sampling.detach_ttl_s(spec.scheduling)
    return TranslatedRequest(
        work=Generate(
            *(prompt, params, stops, text, echo, keep_last, scheduling),
            constraint=limit,
            bad_words=options.words,
            embeds=embeds,
            images=images,
        ),
        reserve=size + output * params.num_sequences,
        num_outputs=params.n,
        told=sampling.Told(partial(sampling.effective, params, stops, text, scheduling, spec, detach_ttl_s)),
        token_records=spec.output.token_records if spec.output.HasField("token_records") else True,
        tells_prompt=spec.output.echo or params.prompt_logprobs >= 0,
        idempotency_key=sampling.idempotency_key(spec),
        detach_ttl_s=detach_ttl_s,
        adapter=adapter,
        model=spec.model if adapter and not settings.model.is_named(spec.model) else "",
    )


def _keep_last(spec: types_pb2.GenerationSpec, limits: Limits) -> int:
    """Returns truncate_prompt_tokens; 0 where it is absent."""
    asked = spec.truncate_prompt_tokens
    if spec.HasField("truncate_prompt_tokens") and not 1 <= asked <= limits.context_length:
        raise invalid("truncate_prompt_tokens", f"{asked} is not in [1, {limits.context_length}]")
    return asked


def tokenization(request: inference_pb2.TokenizeRequest, settings: GatewaySettings) -> TranslatedRequest:
    """Returns the work of Tokenize. Raises `ServiceError`."""
    check_model(request, settings.model)
    if request.count_only and request.offsets:
        raise invalid("offsets", "are those of tokens, and count_only returns none: leave one of them out")
    if request.WhichOneof("prompt") == "text":
        text = request.text
        check_bytes(size_of_text(text), settings)
        prompt = TextPrompt(text, _adds_special(request, default=True))
        return TranslatedRequest(Tokenize(prompt, request.count_only, request.offsets))
    if request.WhichOneof("prompt") != "chat":
        raise invalid("prompt", "is missing; send text or chat")
    refuse_unbuilt(request.chat, "chat.")
    if chat_images(request.chat, settings):
        raise unsupported(ALL, f"{ALL} is for generations: leave it out")
    chat, _ = _chat(request.chat, settings, adds_special=_adds_special(request, default=False))
    return TranslatedRequest(Tokenize(chat, request.count_only, request.offsets))


def detokenization(request: inference_pb2.DetokenizeRequest, settings: GatewaySettings) -> Slices[TranslatedRequest]:
    """Returns the work of Detokenize, translated in slices. Raises `ServiceError`."""
    check_model(request, settings.model)
    ids = yield from packing("token_ids", request.token_ids, settings)
    skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    return TranslatedRequest(Detokenize(ids=ids, skip_special_tokens=skip))


def _prompt(
    spec: types_pb2.GenerationSpec, params: SamplingParams, settings: GatewaySettings, num_embeds: int
) -> tuple[PromptInput, int]:
    """Returns the prompt and its size in tokens: exact for ids, estimated for text and chat. Ahead of ids, as many
    embeddings as `num_embeds` count."""
    match spec.WhichOneof("prompt"):
        case "text":
            text = spec.text  # read once: protobuf copies it at each access
            size = size_of_text(text)
            check_bytes(size, settings)
            if not size:
                raise invalid("prompt", "is empty; send at least one byte of text")
            if not spec.truncate_prompt_tokens:
                text_bound.check_bytes(size, settings.model.longest_token, params, settings.limits)
            return TextPrompt(text, _adds_special(spec, default=True)), size // BYTES_PER_TOKEN + 1
        case "token_ids":
            if spec.add_special_tokens:
                raise invalid(
                    "add_special_tokens", "is for text and chats; token ids are used as they are: leave it out"
                )
            num = num_embeds + len(spec.token_ids.ids)  # the count is checked before the ids
            check_prompt(min(num, spec.truncate_prompt_tokens or num), params, settings.limits)
            return TokenPrompt(pack_checked("prompt.token_ids", spec.token_ids.ids, settings)), num
        case "chat":
            chat, size = _chat(spec.chat, settings, adds_special=_adds_special(spec, default=False))
            return chat, size // BYTES_PER_TOKEN + len(chat.messages)
        case _ if num_embeds:
            check_prompt(num_embeds, params, settings.limits)
            return TokenPrompt(b""), num_embeds
        case _:
            raise invalid("prompt", "is missing; send text, token_ids or chat")


def _adds_special(request: types_pb2.GenerationSpec | inference_pb2.TokenizeRequest, *, default: bool) -> bool:
    """Returns whether the special tokens of the tokenizer's own template are added."""
    return request.add_special_tokens if request.HasField("add_special_tokens") else default


def _chat(chat: types_pb2.Chat, settings: GatewaySettings, *, adds_special: bool) -> tuple[ChatPrompt, int]:
    """Returns the conversation and its size in bytes."""
    prompt = chat_prompt(chat, settings, adds_special=adds_special)
    size = num_bytes(prompt)
    check_bytes(size, settings)
    return prompt, size


def size_of_text(text: str) -> int:
    """Returns the size of a text in bytes of UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def check_bytes(size: int, settings: GatewaySettings, field: str = "prompt") -> None:
    """Raises `ServiceError` for more bytes of text than a prompt may have."""
    limit = settings.limits.max_prompt_bytes
    if size > limit:
        raise invalid(field, f"has {size} bytes; this server takes {limit}", limit=limit, actual=size)
