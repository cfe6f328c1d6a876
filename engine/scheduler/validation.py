"""Validates a request at the engine, by the same rules as at the gateway, and makes its `SequenceGroup`.

Pure: limits and sizes in, a `SequenceGroup` or a `ServiceError` out; the caller queues the group.
"""

import dataclasses
import math
from collections.abc import Iterator

from sluice_server.engine.checks import (
    SEES_PROMPT,
    check_adapter,
    check_credit,
    check_draft_tokens,
    check_embeds,
    check_embeds_use,
    check_generates,
    check_ids,
    check_images,
    check_params,
    check_placeholders,
    check_pooled,
    check_pooling,
    check_priority,
    check_prompt,
    effective_max_tokens,
)
from sluice_server.engine.errors import Code, ServiceError, invalid, never_fits, unsupported
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.prefix import ContentSpan, start_of
from sluice_server.engine.kv_cache.table import BlockTable
from sluice_server.engine.request import EngineRequest, Limits, SamplingParams
from sluice_server.engine.scheduler.beam import BeamSearch
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.sequence import Drafting, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class RequestValidator:
    """Validates requests against the limits and capacities of one engine."""

    cache: KVCache
    limits: Limits
    eos_ids: tuple[int, ...]
    max_num_seqs: int
    max_draft_tokens: int = 0
    drafts_forced: bool = False

    def open(self, request: EngineRequest, order: int) -> SequenceGroup:
        """Returns the request as a group. Raises ServiceError for a field out of range, or if it can never fit."""
        self._check(request)
        params = request.params
        end_ids = params.stop_token_ids + (() if params.ignore_eos else self.eos_ids)
        group = SequenceGroup(
            request=request,
            request_id=request.request_id,
            order=order,
            prompt=list(request.prompt_ids),
            params=_for_runner(params, len(set(end_ids)), self.limits),
            asked_tokens=params.max_tokens,
            # A vector takes the place of a token that is sampled and not computed.
            max_tokens=1 if request.pooling else effective_max_tokens(len(request.prompt_ids), params, self.limits),
            priority=request.priority,
            deadline_s=request.deadline_s,
            banned_ids=tuple(dict.fromkeys(end_ids)),
            end_ids=frozenset(end_ids),
            credit=request.credit,
            is_open=request.is_open,
            prompt_scores=[] if params.prompt_logprobs >= 0 else None,
            beam=BeamSearch(params.beam_width, params.length_penalty, params.early_stopping)
            if params.beam_width
            else None,
        )
        self.check_size(group, len(group.prompt), group.max_tokens)
        group.sequences += self._sequences(group)
        group.unforked = group.sequences[1:]
        group.refresh_hold()
        return group

    def _sequences(self, group: SequenceGroup) -> Iterator[Sequence]:
        request, params = group.request, group.request.params
        # A beam search starts from one hypothesis and forks later.
        received = request.resume_ids or ((),) * (1 if params.beam_width else params.num_sequences)
        salt = salt_of(request)
        spans = tuple(ContentSpan(one.first, one.num_tokens, one.digest) for one in request.images)
        for index, ids in enumerate(received):
            if ids is not None:
                blocks = BlockTable(salt, request.bypasses_cache, spans=spans)
                yield Sequence(group, index, group.prompt + list(ids), blocks, drafting=self._drafting(request))

    def _drafting(self, request: EngineRequest) -> Drafting | None:
        """Returns the draft state of an output; None without drafts, for beams, for what is pooled, whose tokens are
        not sampled, and for prompt embeddings and images, which no proposer reads. What a grammar forces is drafted
        for outputs with one, whatever their prompt."""
        asked = request.max_draft_tokens
        limit = self.max_draft_tokens if asked is None else min(asked, self.max_draft_tokens)
        is_unread = request.prompt_embeds is not None or request.images
        is_without = not request.params.grammar if self.drafts_forced else is_unread
        if limit <= 0 or request.params.beam_width or request.pooling or is_without:
            return None
        return Drafting(limit, first=len(request.prompt_ids) if self.drafts_forced else 0)

    def check_size(self, group: SequenceGroup, num_prompt: int, max_tokens: int) -> None:
        """Raises ServiceError if the group, grown to so many tokens, fits neither context nor cache."""
        self._check_length(group.request, num_prompt, max_tokens)
        needed = self.blocks_needed(group, num_prompt, max_tokens)
        if needed > self.cache.pool.num_blocks:
            raise never_fits(needed, self.cache.pool.num_blocks)

    def blocks_needed(self, group: SequenceGroup, num_prompt: int, max_tokens: int) -> int:
        """Returns the most blocks that the group holds, grown to so many tokens."""
        # The last token is sampled but never computed, hence -1. Sequences share the full blocks of the prompt.
        num_sequences, shared = group.request.params.num_sequences, (num_prompt - 1) // self.cache.block_size
        return self.cache.sizes.most_blocks(num_prompt + max_tokens - 1, num_sequences, shared)

    def _check(self, request: EngineRequest) -> None:
        params, limits = request.params, self.limits
        check_params(params, limits)
        check_priority(request.priority, limits)
        check_ids("prompt", request.prompt_ids, limits)
        self._check_length(request, len(request.prompt_ids), params.max_tokens)
        if not request.ttft_target_s > 0:
            raise invalid("ttft_target", f"{request.ttft_target_s} s is not above 0")
        if math.isnan(request.deadline_s):
            raise invalid("deadline", "is not a number")
        if params.num_sequences > self.max_num_seqs:
            raise _too_many(params.num_sequences, self.max_num_seqs)
        if request.credit is not None:
            check_credit(request.credit, limits)
            if params.is_search:
                raise invalid("credit_window", "best_of and beam search answer at their end only: leave it out")
        if request.max_draft_tokens is not None:
            check_draft_tokens(request.max_draft_tokens)
        if request.is_open and (params.logits_processors or params.strategy is not None):
            raise unsupported("keep_input_open", SEES_PROMPT)
        if request.adapter is not None:
            check_adapter(request.adapter, limits)
            if request.pooling is not None:
                raise unsupported("adapter", "adapters are not supported for vectors: leave it out")
        self._check_embeds(request)
        self._check_images(request)
        self._check_resume(request)

    def _check_embeds(self, request: EngineRequest) -> None:
        embeds = request.prompt_embeds
        if embeds is None:
            return
        check_embeds(embeds, self.limits)
        check_placeholders(embeds, request.prompt_ids)
        check_embeds_use(request.params)
        if request.pooling is not None:
            raise unsupported("prompt_embeds", "prompt_embeds are not supported for vectors: send text or token ids")
        if request.is_open:
            raise unsupported("keep_input_open", "keep_input_open is not supported with prompt_embeds: leave it out")

    def _check_images(self, request: EngineRequest) -> None:
        if not request.images and self.limits.images is None:
            return
        check_images(request.images, request.prompt_ids, self.limits)
        taken = {
            "vectors": request.pooling is not None,
            "prompt_embeds": request.prompt_embeds is not None,
            "keep_input_open": request.is_open,
        }
        for what in (name for name, is_asked in taken.items() if is_asked and request.images):
            raise unsupported("images", f"images are not supported with {what}: leave one of the two out")

    def _check_length(self, request: EngineRequest, num_prompt: int, max_tokens: int) -> None:
        if request.pooling is not None:
            check_pooled(num_prompt, self.limits)
            check_pooling(request.pooling, self.limits)
            if not 0 <= (request.num_first or 0) <= num_prompt:
                raise invalid("prompt", f"has {num_prompt} tokens, of which {request.num_first} are of its first text")
        else:
            check_generates(self.limits.generates)
            params = request.params  # copied only where it must be: there are many fields
            if max_tokens != params.max_tokens:
                params = dataclasses.replace(params, max_tokens=max_tokens)
            check_prompt(num_prompt, params, self.limits)

    def _check_resume(self, request: EngineRequest) -> None:
        received, params = request.resume_ids, request.params
        if not received:
            return
        if params.is_search:
            raise invalid("resume", "best_of and beam search answer at their end only: nothing can have been received")
        if request.is_open:
            raise invalid("resume", "nothing can have been received while the input is open")
        if len(received) != params.n or all(ids is None for ids in received):
            raise invalid(
                "resume", f"names {len(received)} outputs, of which one at least goes on; the request has {params.n}"
            )
        for index, ids in enumerate(received):
            check_ids(f"resume.outputs[{index}].token_ids", ids or (), self.limits)
            limit = effective_max_tokens(len(request.prompt_ids), params, self.limits)
            if ids is not None and len(ids) > limit:
                raise invalid(f"resume.outputs[{index}].token_ids", f"has {len(ids)} ids; max_tokens is {limit}")


def salt_of(request: EngineRequest) -> bytes:
    """Returns where the names of the request's cache blocks begin."""
    embeds, adapter = request.prompt_embeds, request.adapter
    digests = b"" if adapter is None else adapter.digest, b"" if embeds is None else embeds.digest
    return start_of(request.cache_salt, *digests)


def _for_runner(params: SamplingParams, num_end_ids: int, limits: Limits) -> SamplingParams:
    """Returns the sampling parameters for the runner. A search needs log probabilities. A beam needs candidates enough
    to continue without those that complete a hypothesis; the token that its row samples is ignored."""
    if params.beam_width:
        num = min(limits.vocab_size, params.beam_width + num_end_ids)
        return dataclasses.replace(params, temperature=0.0, logprobs=num)
    if params.is_search:
        return dataclasses.replace(params, logprobs=max(0, params.logprobs))
    return params


def _too_many(actual: int, limit: int) -> ServiceError:
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "SLOT_CAPACITY",
        f"n, best_of or beam.width ask for {actual} sequences at once; this server runs {limit}: "
        "ask for fewer, or start the server with a larger --max-num-seqs",
        details={"limit": str(limit), "actual": str(actual)},
    )
