"""Each inner stage answers for the newest attempt of a request only."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.moves import Move
from sluice_server.engine.plan import StepPlan, StepResult
from sluice_server.engine.request import FinishReason, Limits, SamplingParams
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.services.detokenizer.stage import DetokenizerStage
from sluice_server.services.engine.membership import RingMembership
from sluice_server.services.engine.stage import EngineStage
from sluice_server.services.messages.details import Admitted
from sluice_server.services.messages.messages import (
    Cancel,
    Envelope,
    Failed,
    Message,
    OpenSerials,
    Prompt,
    Submit,
    Text,
    Tokens,
)
from sluice_server.services.messages.work import Generate, Scheduling, Stops, TextPrompt, pack_ids
from sluice_server.services.ring.leases import Leases
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.stage import EncodingThreads, TokenizerStage
from tests.oracle.tokenizers import byte_level_bpe
from tests.services.executors import OnDemand
from tests.services.tokenizer.constrain import idle_constraints

LIMITS = Limits(context_length=100, vocab_size=400)


def envelope(attempt: int, name: str = "a") -> Envelope:
    return Envelope(request_id=name, origin="g", attempt=attempt)


def unrecorded(*_: object) -> None:
    """Records no phase."""


@pytest.fixture
def encoder(tmp_path: Path) -> TextEncoder:
    byte_level_bpe(tmp_path)
    return TextEncoder.load(tmp_path)


def submit(attempt: int, text: str) -> Submit:
    return Submit(envelope(attempt), Generate(TextPrompt(text), SamplingParams(max_tokens=4), bad_words=("fox",)))


def test_the_tokenizer_answers_the_newest_attempt_once(encoder: TextEncoder) -> None:
    sent: list[Message] = []
    pool = OnDemand()
    stage = TokenizerStage(
        encoder, idle_constraints(), LIMITS, EncodingThreads(pool, lambda call: call()), sent.append, unrecorded
    )
    for message in (submit(0, "one"), submit(2, "three"), submit(1, "two"), submit(2, "again"), Cancel(envelope(1))):
        stage.handle(message)
    for run in pool.waiting:
        run()
    assert [(type(one), one.envelope.attempt) for one in sent if isinstance(one, Prompt | Cancel)] == [
        (Cancel, 1),
        (Prompt, 2),
    ]
    assert len(sent) == 2 and stage.num_encoding == 0


class Nines:
    """A model whose every token is 9."""

    progress = 0
    depth = 0
    is_done = True

    def __init__(self) -> None:
        self._plan: StepPlan | None = None

    def watch(self, on_layer: Callable[[], None]) -> None:
        """Does nothing: the model has no layers."""

    def move(self, moves: list[Move]) -> None:
        """Does nothing: the model has no blocks."""

    def moved(self) -> list[tuple[Move, bool]]:
        return []

    def place(self, plan: StepPlan) -> None:
        """Does nothing: the model has no state."""

    def idle(self) -> bool:
        return False

    def launch(self, plan: StepPlan) -> "Nines":
        self._plan = plan
        return self

    def collect(self) -> StepResult:
        assert self._plan is not None
        return StepResult([9 if samples else -1 for samples in self._plan.samples])


def test_the_engine_computes_the_newest_attempt_only() -> None:
    scheduler = Scheduler(KVCache(20, 4, prefix_caching=True), LIMITS, (2,), 4, 40)
    sent: list[Message] = []
    stage = EngineStage(Engine(scheduler, Nines()), RingMembership("engine-0", 1), sent.append, unrecorded)

    def prompt(attempt: int) -> Prompt:
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        return Prompt(envelope(attempt), pack_ids([5, 6, 7]), params, Stops(), Scheduling(), 0.0)

    for message in (prompt(0), prompt(2), prompt(1), prompt(2), Cancel(envelope(1))):
        stage.handle(message)
    assert stage.num_open == 1 and stage.ended == {"cancelled": 1, "stale": 2}
    while stage.turn():
        pass
    tokens = [message for message in sent if isinstance(message, Tokens)]
    assert {message.envelope.attempt for message in tokens} == {2}
    assert sum(len(message.ids) for message in tokens) == 3 and tokens[-1].finish is FinishReason.LENGTH
    assert stage.num_open == 0


def tokens(attempt: int, first: int, finish: FinishReason | None = None) -> Tokens:
    admitted = Admitted(3, 0, 8, Stops()) if first == 0 else None
    return Tokens(envelope(attempt), first, (300,), admitted=admitted, finish=finish)


def test_the_detokenizer_begins_anew_with_a_later_attempt(encoder: TextEncoder) -> None:
    sent: list[Message] = []
    stage = DetokenizerStage(encoder, sent.append, unrecorded)
    for message in (tokens(0, 0), tokens(1, 0), tokens(0, 1), tokens(0, 0), tokens(1, 1), Cancel(envelope(0))):
        stage.handle(message)
        stage.turn()
    assert stage.num_open == 1
    stage.handle(tokens(1, 2, FinishReason.LENGTH))
    texts = [(one.envelope.attempt, one.first_index) for one in sent if isinstance(one, Text)]
    assert texts == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert stage.num_late == 2 and stage.num_open == 0


def test_a_failure_of_an_old_attempt_leaves_the_new_one_alone(encoder: TextEncoder) -> None:
    stage = DetokenizerStage(encoder, unrecorded, unrecorded)
    stage.handle(tokens(1, 0))
    stage.handle(Failed(envelope(0), 13, "ENGINE_FAULT", "late"))
    assert stage.num_open == 1
    stage.handle(Failed(envelope(1), 13, "ENGINE_FAULT", "now"))
    assert stage.num_open == 0


def test_the_engine_goes_on_behind_what_was_received() -> None:
    scheduler = Scheduler(KVCache(20, 4, prefix_caching=True), LIMITS, (2,), 4, 40)
    sent: list[Message] = []
    stage = EngineStage(Engine(scheduler, Nines()), RingMembership("engine-0", 1), sent.append, unrecorded)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, n=3)
    resume = (pack_ids([9, 9]), None, b"")
    stage.handle(Prompt(envelope(1), pack_ids([5, 6]), params, Stops(), Scheduling(), 0.0, resume=resume))
    while stage.turn():
        pass
    told = [one for one in sent if isinstance(one, Tokens)]
    assert {(one.first_index, one.admitted.resumed) for one in told if one.admitted is not None} == {
        (2, pack_ids([9, 9])),
        (0, b""),
    }
    assert {index: sum(len(one.ids) for one in told if one.output_index == index) for index in range(3)} == {
        0: 2,
        1: 0,
        2: 4,
    }
    assert stage.num_open == 0


def test_the_detokenizer_emits_nothing_of_what_was_received_twice(encoder: TextEncoder) -> None:
    ids = encoder.tokenizer.encode("né à l'été").ids
    sent: list[Message] = []
    for cut in range(1, len(ids)):
        stage = DetokenizerStage(encoder, sent.append, unrecorded)
        whole: list[str] = []
        resumed: list[str] = []
        for attempt, heard in ((0, whole), (1, resumed)):
            start = cut if attempt else 0
            for at in range(start, len(ids)):
                admitted = Admitted(3, 0, 8, Stops(), resumed=pack_ids(ids[:start])) if at == start else None
                finish = FinishReason.LENGTH if at == len(ids) - 1 else None
                stage.handle(Tokens(envelope(attempt), at, (ids[at],), admitted=admitted, finish=finish))
                stage.turn()
            heard.extend(one.text for one in sent if isinstance(one, Text))
            sent.clear()
        assert whole[cut:] == resumed


def test_stages_let_go_of_what_a_gateway_that_is_gone_asked_for(encoder: TextEncoder) -> None:
    leases = Leases(lease_s=10.0)
    engine = Engine(Scheduler(KVCache(20, 4, prefix_caching=True), LIMITS, (2,), 4, 40), Nines())
    computes = EngineStage(engine, RingMembership("engine-0", 1, leases), unrecorded, unrecorded)
    decodes = DetokenizerStage(encoder, unrecorded, unrecorded, leases)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    computes.handle(Prompt(envelope(0), pack_ids([5]), params, Stops(), Scheduling(), 0.0))
    decodes.handle(tokens(0, 0))
    for stage in (computes, decodes):
        stage.reap()
        assert stage.num_open == 1
    leases.seen("g", 1)  # the gateway was restarted
    for stage in (computes, decodes):
        stage.reap()
        assert stage.num_open == 0
    assert engine.scheduler.cache.pool.num_free == 20


def test_stages_let_go_of_what_a_census_does_not_name(encoder: TextEncoder) -> None:
    """A Cancel was lost; later requests are not in the census yet."""
    engine = Engine(Scheduler(KVCache(20, 4, prefix_caching=True), LIMITS, (2,), 4, 40), Nines())
    computes = EngineStage(engine, RingMembership("engine-0", 1), unrecorded, unrecorded)
    decodes = DetokenizerStage(encoder, unrecorded, unrecorded)
    pool = OnDemand()
    encodes = TokenizerStage(
        encoder, idle_constraints(), LIMITS, EncodingThreads(pool, lambda call: call()), unrecorded, unrecorded
    )
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    for serial in (1, 2, 3):
        named = Envelope(str(serial), "g", epoch=5, serial=serial)
        computes.handle(Prompt(named, pack_ids([5]), params, Stops(), Scheduling(), 0.0))
        decodes.handle(Tokens(named, 0, (300,), admitted=Admitted(3, 0, 8, Stops())))
        encodes.handle(Submit(named, Generate(TextPrompt("a"), params, bad_words=("fox",))))
    for open_serials in (
        OpenSerials("h", 5, 9, frozenset()),
        OpenSerials("g", 4, 9, frozenset()),
        OpenSerials("g", 5, 3, frozenset({2})),
    ):
        for stage in (computes, decodes, encodes):
            stage.handle(open_serials)
    assert (computes.num_open, decodes.num_open, encodes.num_encoding) == (2, 2, 2)


def test_an_output_that_had_ended_by_a_stop_string_ends_again_without_a_token(encoder: TextEncoder) -> None:
    """A client resumes: one output was finished, others were not."""
    ids = encoder.tokenizer.encode("one stop").ids
    sent: list[Message] = []
    stage = DetokenizerStage(encoder, sent.append, unrecorded)
    admitted = Admitted(3, 0, 8, Stops(("stop",)), resumed=pack_ids(ids))
    stage.handle(Tokens(envelope(1), len(ids), (300,), admitted=admitted))
    stage.handle(Tokens(envelope(1), len(ids) + 1, (300,)))
    (text,) = [one for one in sent if isinstance(one, Text)]
    assert (text.first_index, text.tokens, text.text) == (len(ids), (), "")
    assert (text.finish, text.stop_match) == (FinishReason.STOP_STRING, "stop")
