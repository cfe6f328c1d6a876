"""Applies sampled tokens to their sequences: appends them, ends outputs, forks and completes searches.

Tokens in, events out. Independent of the token budget and the order of service.
"""

import dataclasses
from collections.abc import Sequence as Ids

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.plan import TokenLogprob
from sluice_server.engine.request import FinishReason
from sluice_server.engine.scheduler.beam import BeamExtension
from sluice_server.engine.scheduler.events import AdmissionReport, Failure, Pooled, RequestTimes, Sampled
from sluice_server.engine.scheduler.group import CompletedBeam, SequenceGroup
from sluice_server.engine.scheduler.lengths import OutputLengths
from sluice_server.engine.scheduler.policies import Policy
from sluice_server.engine.scheduler.sequence import Sequence
from sluice_server.engine.scheduler.state import SchedulerState


@dataclasses.dataclass(frozen=True, slots=True)
class AddedTokens:
    """The last `num` tokens of a sequence, added by one step, and the drafts verified for them."""

    num: int
    logprobs: tuple[TokenLogprob, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0


class Outputs:
    """Advances sequences by sampled tokens and makes their events."""

    def __init__(self, state: SchedulerState, policy: Policy, lengths: OutputLengths) -> None:
        self._state = state
        self._policy = policy
        self._lengths = lengths
        self._pooled: list[Pooled] = []  # not reported yet

    def advance(
        self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float, events: list[Sampled]
    ) -> None:
        """Appends a sampled token to the sequence and adds its event to `events`, if it has one."""
        group = sequence.group
        if group.beam is None:
            sequence.tokens.append(token)
            self.advance_run(sequence, AddedTokens(1, () if logprob is None else (logprob,)), now, events)
            return
        group.has_token(now)
        sequence.candidates = logprob
        if all(one.candidates for one in group.sequences):
            self._advance_beams(group)
        if not group.sequences:
            events += self._answer(group, now)

    def end(self, sequence: Sequence, logprobs: tuple[TokenLogprob, ...], now: float) -> Sampled:
        """Ends an output with its last token, and returns the event of that token."""
        token = sequence.tokens[-1]
        finish = self._finish_of(sequence, token)
        return self._event(sequence, sequence.num_output - 1, (token,), logprobs, finish, now)

    def num_kept(self, sequence: Sequence, tokens: Ids[int]) -> int:
        """Returns how many of consecutively sampled `tokens` belong to the output: those up to its end."""
        group = sequence.group
        tokens = tokens[: group.max_tokens - sequence.num_output]
        return next((i for i, token in enumerate(tokens, 1) if token in group.end_ids), len(tokens))

    def advance_run(self, sequence: Sequence, kept: AddedTokens, now: float, events: list[Sampled]) -> None:
        """Adds the event of the sequence's last tokens, which were sampled in one step, to `events`."""
        group = sequence.group
        group.has_token(now)
        if group.params.is_search:
            self._hide(sequence, kept.logprobs)
            if not group.sequences:
                events += self._answer(group, now)
            return
        ids = tuple(sequence.tokens[-kept.num :])
        first_index = sequence.num_output - kept.num
        event = self._event(sequence, first_index, ids, kept.logprobs, self._finish_of(sequence, ids[-1]), now)
        if kept.num_drafted:
            event = event._replace(num_drafted=kept.num_drafted, num_accepted=kept.num_accepted)
        events.append(event)

    def cut(self, sequence: Sequence, finish: FinishReason, now: float) -> Sampled:
        """Ends an output without a further token and returns its event."""
        return self._event(sequence, sequence.num_output, (), (), finish, now)

    def settle(self, group: SequenceGroup, now: float) -> list[Sampled]:
        """Ends the outputs that are already complete, because a limit was lowered or they were resumed at their end."""
        if group.params.is_search:
            return []
        events = []
        for sequence in list(group.sequences):
            last = sequence.tokens[-1] if sequence.num_output else -1
            finish = self._finish_of(sequence, last)
            if finish is not None:
                events.append(self.cut(sequence, finish, now))
        return events

    def fail(self, group: SequenceGroup, error: ServiceError) -> Failure:
        """Ends the request with an error."""
        self.forget(group)
        return group.request_id, error

    def pool(self, sequence: Sequence, vector: bytes, now: float) -> None:
        """Ends a request with the vector of its prompt."""
        group = sequence.group
        group.has_token(now)
        admission, times = _admission(group), _times(group, now)
        self._pooled.append(Pooled(group.request_id, vector, admission.num_prompt, admission.num_cached, times))
        self.forget(group)

    def take_pooled(self) -> list[Pooled]:
        """Returns the events of `pool` since the last call."""
        taken, self._pooled = self._pooled, []
        return taken

    def forget(self, group: SequenceGroup) -> None:
        """Ends the request without an event."""
        group.num_sampled += sum(sequence.num_output for sequence in group.sequences)
        self._policy.leave(group)
        self._state.close(group)

    def _event(
        self,
        sequence: Sequence,
        first_index: int,
        ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        finish: FinishReason | None,
        now: float,
    ) -> Sampled:
        group = sequence.group
        admission = None if sequence.has_spoken else _admission(group)
        sequence.has_spoken = True
        times = None
        if finish is not None:
            times = _times(group, now)
            self._end(sequence)
        is_last = not group.sequences
        return Sampled(group.request_id, first_index, ids, logprobs, admission, finish, times, sequence.index, is_last)

    def _finish_of(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Returns why the output is complete with `token` as its last; None if it continues."""
        group = sequence.group
        if token in group.end_ids:
            return _reason(group, token)
        return FinishReason.LENGTH if len(sequence.tokens) - len(group.prompt) >= group.max_tokens else None

    def _end(self, sequence: Sequence) -> None:
        group = sequence.group
        group.num_sampled += sequence.num_output
        self._lengths.observe(group.request.tenant, max(1, sequence.num_output))
        if len(group.sequences) == 1:
            self._policy.leave(group)
        self._state.end(sequence)

    def _hide(self, sequence: Sequence, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Collects the tokens of a best-of output; they are emitted at the request's end if it is among the best."""
        assert logprobs, "a search was sampled without log probabilities"
        group = sequence.group
        sequence.logprobs += logprobs
        for logprob in logprobs:  # one by one: a sum of sums would round differently
            sequence.score += logprob.logprob
        finish = self._finish_of(sequence, sequence.tokens[-1])
        if finish is not None:
            ids = tuple(sequence.tokens[len(group.prompt) :])
            group.completed.append(
                CompletedBeam(sequence.score / len(ids), ids, tuple(sequence.logprobs), finish, sequence.index)
            )
            self._end(sequence)

    def _advance_beams(self, group: SequenceGroup) -> None:
        """Advances the search once every beam has its candidates."""
        assert group.beam is not None
        num_output = group.sequences[0].num_output
        banned = group.end_ids if num_output < group.params.min_tokens else frozenset()
        beams = [(one.score, _without(one.candidates, banned)) for one in group.sequences]
        at_end = num_output + 1 >= group.max_tokens
        advance = group.beam.advance(beams, num_output + 1, group.end_ids, at_end)
        for score, step in advance.complete:
            group.completed.append(_completed(group, score, step))
        group.completed.sort(key=lambda one: -one.score)
        del group.completed[group.beam.width :]
        if advance.live:
            self._go_on(group, advance.live)
        else:
            self._lengths.observe(group.request.tenant, num_output + 1)
            self.forget(group)

    def _go_on(self, group: SequenceGroup, steps: tuple[BeamExtension, ...]) -> None:
        """Gives each parent its first extension and forks it for the others. Beams without an extension end."""
        beams = list(group.sequences)
        parents = {step.parent for step in steps}
        for i, beam in enumerate(beams):
            if i not in parents:
                self._state.end(beam)
        live: list[Sequence] = []
        for step in steps:
            parent = beams[step.parent]
            beam = parent
            if step.parent not in parents:  # the parent has taken its first extension
                beam = Sequence(group, 0, parent.tokens[:-1], parent.table.anew())
                beam.logprobs = parent.logprobs[:-1]
                beam.num_preemptions = parent.num_preemptions
                self._state.fork(parent, beam)
            parents.discard(step.parent)
            beam.tokens.append(step.token)
            beam.logprobs.append(_reported(group, step.logprob))
            beam.score, beam.candidates, beam.index = step.score, None, len(live)
            live.append(beam)
        group.sequences = live

    def _answer(self, group: SequenceGroup, now: float) -> list[Sampled]:
        """Returns the events of the n best outputs of a search, best first."""
        best = sorted(group.completed, key=lambda one: (-one.score, one.index))[: group.params.n]
        asked = group.request.params.logprobs >= 0
        times = _times(group, now)
        return [
            Sampled(
                request_id=group.request_id,
                first_index=0,
                token_ids=one.token_ids,
                logprobs=one.logprobs if asked else (),
                admission=_admission(group),
                finish=one.finish,
                times=times,
                output_index=index,
                is_last=index == len(best) - 1,
                num_drafted=0 if index else group.drafts.num_drafted,
                num_accepted=0 if index else group.drafts.num_accepted,
            )
            for index, one in enumerate(best)
        ]


def _without(candidates: TokenLogprob | None, banned: frozenset[int]) -> TokenLogprob:
    """Returns the candidates without the banned ids."""
    assert candidates is not None
    if not banned:
        return candidates
    pairs = zip(candidates.top_ids, candidates.top_logprobs, strict=True)
    kept = [(token, logprob) for token, logprob in pairs if token not in banned]
    return TokenLogprob(0.0, 0, tuple(token for token, _ in kept), tuple(logprob for _, logprob in kept))


def _completed(group: SequenceGroup, score: float, step: BeamExtension) -> CompletedBeam:
    parent = group.sequences[step.parent]
    finish = _reason(group, step.token) if step.token in group.end_ids else FinishReason.LENGTH
    ids = (*parent.tokens[len(group.prompt) :], step.token)
    return CompletedBeam(score, ids, (*parent.logprobs, _reported(group, step.logprob)), finish)


def _reported(group: SequenceGroup, logprob: TokenLogprob) -> TokenLogprob:
    """Returns `logprob` with as many alternatives as the client requested."""
    num = max(0, group.request.params.logprobs)
    return logprob._replace(top_ids=logprob.top_ids[:num], top_logprobs=logprob.top_logprobs[:num])


def _reason(group: SequenceGroup, token: int) -> FinishReason:
    return FinishReason.STOP_TOKEN if token in group.request.params.stop_token_ids else FinishReason.EOS


def _admission(group: SequenceGroup) -> AdmissionReport:
    """Returns the report for one output; the prompt's scores go with the first call only."""
    scores = None if group.prompt_scores is None else tuple(group.prompt_scores)
    group.prompt_scores = None
    return AdmissionReport(len(group.prompt), max(0, group.num_cached), group.max_tokens, scores)


def _times(group: SequenceGroup, now: float) -> RequestTimes:
    """Returns the durations so far; phases that were not reached take 0 s."""
    scheduled = group.first_scheduled_s if group.first_scheduled_s >= 0 else now
    first = group.first_token_s if group.first_token_s >= 0 else now
    return RequestTimes(
        queue_s=scheduled - group.request.arrival_s,
        prefill_s=first - scheduled,
        decode_s=now - first,
        end_s=now,
        num_preemptions=group.num_preemptions,
        num_drafted=group.drafts.num_drafted,
        num_accepted=group.drafts.num_accepted,
        drafted_at=tuple(group.drafts.drafted_at),
        accepted_at=tuple(group.drafts.accepted_at),
    )
