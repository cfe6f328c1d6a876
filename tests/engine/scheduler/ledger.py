"""The oracle of a simulation: what every request must receive, and what it has received.

Tokens are recomputed from the request alone; each request ends once; indices have no gap; a prefix hit is of the
same tenant. Depends on requests and events only, not on slots, blocks or steps.
"""

import dataclasses
import hashlib

from sluice_server.engine.request import EngineRequest, FinishReason, Pooling
from sluice_server.engine.scheduler.beam import BeamSearch
from sluice_server.engine.scheduler.events import Pooled, Sampled
from tests.engine.scheduler.fake_model import (
    candidates_after,
    chain_of,
    extend,
    logprob_after,
    token_after,
    vector_of,
)

EOS = 7


@dataclasses.dataclass
class Open:
    """A request that has not ended, from its client's view."""

    request: EngineRequest
    prompt: list[int]
    max_tokens: int
    deadline_s: float
    is_open: bool
    credit: int | None
    chains: dict[int, int]  # per output: the chain behind what it has
    lengths: dict[int, int]  # per output
    spoken: set[int] = dataclasses.field(default_factory=set)
    live: set[int] = dataclasses.field(default_factory=set)  # outputs without an end
    is_ending: bool = False  # its last output was cancelled: the event that says so is still to come


class Ledger:
    """The records of all requests."""

    def __init__(self, block_size: int) -> None:
        self.open: dict[str, Open] = {}
        self.trace = hashlib.sha256()
        self.num_accepted = 0
        self.num_pooled = 0
        self.ends = {"finished": 0, "cancelled": 0, "deadline": 0, "failed": 0}
        self._size = block_size
        self._prefixes: dict[bytes, dict[int, int]] = {}  # salt → chain at a block's end → requests that had it

    def accept(self, request: EngineRequest) -> None:
        """Records a request that the scheduler has accepted."""
        params = request.params
        self.num_accepted += 1
        one = Open(
            request=request,
            prompt=list(request.prompt_ids),
            max_tokens=params.max_tokens,
            deadline_s=request.deadline_s,
            is_open=request.is_open,
            credit=request.credit,
            chains={},
            lengths={},
        )
        for index in range(params.n):
            received = request.resume_ids[index] if request.resume_ids else ()
            if received is not None:
                one.live.add(index)
                one.chains[index] = chain_of((*one.prompt, *received))
                one.lengths[index] = len(received)
        self.open[request.request_id] = one
        self._note_prefix(one.request.cache_salt, one.prompt)

    def append(self, request_id: str, ids: list[int]) -> None:
        """Records an appended part of a prompt."""
        one = self.open[request_id]
        one.prompt += ids
        one.chains = {index: chain_of(one.prompt) for index in one.chains}
        self._note_prefix(one.request.cache_salt, one.prompt)

    def take(self, event: Sampled, now: float) -> None:
        """Checks and records an event of the scheduler."""
        one = self.open.get(event.request_id)
        assert one is not None, "an event of a request that has ended"
        assert one.request.pooling is None, "tokens of a request that samples none"
        self._note(f"{event.request_id}.{event.output_index}@{event.first_index}{event.token_ids}{event.finish}")
        index = event.output_index
        assert index in one.live, "an event of an output that has ended"
        assert (event.admission is None) == (index in one.spoken), "an admission on each output's first event"
        assert not (one.is_open and event.token_ids), "sampled before the input was closed"
        if event.admission is not None:
            self._check_hit(one, event.admission.num_cached)
        one.spoken.add(index)
        if one.request.params.is_search:
            self._check_search(one, event)
        else:
            self._check_tokens(one, event)
        assert (event.finish is None) == (event.times is None)
        if event.finish is not None:
            one.live.discard(index)
        assert event.is_last == (not one.live), "the request ends with its last output"
        if event.is_last:
            self.end(event.request_id, "finished")

    def pool(self, event: Pooled) -> None:
        """Checks and records the vector of a request."""
        one = self.open.get(event.request_id)
        assert one is not None, "a vector of a request that has ended"
        pooling = one.request.pooling
        assert pooling is not None and event.vector == vector_of(one.prompt, pooling), "another's vector"
        assert event.num_prompt == len(one.prompt)
        assert not (event.num_cached and pooling is Pooling.MEAN), "a mean without its cached tokens"
        self._check_hit(one, event.num_cached)
        self._note(f"{event.request_id}{event.vector!r}")
        self.num_pooled += 1
        self.end(event.request_id, "finished")

    def end(self, request_id: str, how: str) -> None:
        """Records the single terminal status of a request."""
        assert request_id in self.open, "a second terminal"
        del self.open[request_id]
        self.ends[how] += 1
        self._note(f"{request_id}{how}")

    def check(self) -> None:
        """Checks I1: every accepted request is open or has ended."""
        assert self.num_accepted == len(self.open) + sum(self.ends.values()), "a request was lost"

    def _check_tokens(self, one: Open, event: Sampled) -> None:
        index = event.output_index
        assert event.first_index == one.lengths[index], "a gap or a repetition"
        for token in event.token_ids:
            want = token_after(one.chains[index], one.request.params.seed, index, len(one.prompt) + one.lengths[index])
            assert token == want, "another's token"
            one.chains[index] = extend(one.chains[index], token)
            one.lengths[index] += 1
            if one.credit is not None:
                one.credit -= 1
                assert one.credit >= 0, "sampled without credit"
        self._check_finish(one, event)

    def _check_finish(self, one: Open, event: Sampled) -> None:
        length, last = one.lengths[event.output_index], event.token_ids[-1] if event.token_ids else -1
        if not event.token_ids:
            assert event.finish is FinishReason.CANCELLED or length >= one.max_tokens or one.request.resume_ids
            return
        want = None
        if last == EOS and not one.request.params.ignore_eos:
            want = FinishReason.EOS
        elif length >= one.max_tokens:
            want = FinishReason.LENGTH
        assert event.finish is want, f"finish {event.finish}, not {want}"

    def _check_search(self, one: Open, event: Sampled) -> None:
        want = reference(one.request)[event.output_index]
        assert event.token_ids == want, "another hypothesis"
        assert event.finish is not None

    def _check_hit(self, one: Open, num_cached: int) -> None:
        """Checks that a hit's blocks were computed by a request of the same salt."""
        if not num_cached:
            return
        known = self._prefixes[one.request.cache_salt]
        chain = chain_of(one.prompt[:num_cached])
        assert num_cached % self._size == 0 and known[chain] > 1, "a hit across tenants"

    def _note_prefix(self, salt: bytes, prompt: list[int]) -> None:
        known = self._prefixes.setdefault(salt, {})
        chain = 0
        for i, token in enumerate(prompt, 1):
            chain = extend(chain, token)
            if i % self._size == 0:
                known[chain] = known.get(chain, 0) + 1

    def _note(self, text: str) -> None:
        self.trace.update(text.encode())


def reference(request: EngineRequest) -> list[tuple[int, ...]]:
    """The outputs of a search, best first, without scheduler or cache."""
    return _best_beams(request) if request.params.beam_width else _best_samples(request)


def _best_samples(request: EngineRequest) -> list[tuple[int, ...]]:
    params = request.params
    found: list[tuple[float, int, tuple[int, ...]]] = []
    for index in range(params.best_of):
        out: list[int] = []
        chain, score = chain_of(request.prompt_ids), 0.0
        while len(out) < params.max_tokens:
            token = token_after(chain, params.seed, index, len(request.prompt_ids) + len(out))
            score += logprob_after(chain, token)
            chain = extend(chain, token)
            out.append(token)
            if token == EOS and not params.ignore_eos:
                break
        found.append((score / len(out), index, tuple(out)))
    found.sort(key=lambda one: (-one[0], one[1]))
    return [out for _, _, out in found[: params.n]]


def _best_beams(request: EngineRequest) -> list[tuple[int, ...]]:
    params = request.params
    end_ids = frozenset() if params.ignore_eos else frozenset({EOS})
    search = BeamSearch(params.beam_width, params.length_penalty, params.early_stopping)
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    complete: list[tuple[float, tuple[int, ...]]] = []
    num = params.beam_width + len(end_ids)
    while beams:
        length = len(beams[0][1]) + 1
        rows = [(score, candidates_after(chain_of((*request.prompt_ids, *ids)), num)) for score, ids in beams]
        advance = search.advance(rows, length, end_ids, at_end=length >= params.max_tokens)
        complete += [(score, (*beams[step.parent][1], step.token)) for score, step in advance.complete]
        complete.sort(key=lambda one: -one[0])
        del complete[params.beam_width :]
        beams = [(step.score, (*beams[step.parent][1], step.token)) for step in advance.live]
    return [ids for _, ids in complete[: params.n]]
