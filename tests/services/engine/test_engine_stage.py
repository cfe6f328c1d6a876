"""The engine stage: several outputs of one request, each with its own end."""

import collections

from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.request import FinishReason, Limits, SamplingParams
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.services.engine.membership import RingMembership
from sluice_server.services.engine.stage import EngineStage
from sluice_server.services.messages.messages import Cancel, Envelope, Failed, Message, Prompt, Tokens
from sluice_server.services.messages.processes import Report
from sluice_server.services.messages.work import Scheduling, Stops, pack_ids
from tests.services.test_stage_attempts import Nines, unrecorded

LIMITS = Limits(context_length=100, vocab_size=400)


def make(*, has_log: bool = False) -> tuple[EngineStage, list[Message]]:
    """A stage whose model samples 9, and the messages it emits apart from reports."""
    sent: list[Message] = []
    scheduler = Scheduler(KVCache(40, 4, prefix_caching=True), LIMITS, (2,), 4, 40)
    if has_log:
        scheduler.cache.start_log()
    emit = lambda message: None if isinstance(message, Report) else sent.append(message)  # noqa: E731 # shorter so
    return EngineStage(Engine(scheduler, Nines()), RingMembership("engine-0", 1), emit, unrecorded), sent


def prompt(**params: object) -> Prompt:
    options = SamplingParams(**{"max_tokens": 3, **params})  # type: ignore[arg-type] # mixed values
    return Prompt(Envelope("a", "g"), pack_ids([5, 6, 7]), options, Stops(), Scheduling(), 0.0)


def run(stage: EngineStage) -> None:
    while stage.turn():
        pass


class Steps:
    """A measurement of that many steps, each of which is noted."""

    def __init__(self, left: int) -> None:
        self.left = left

    def idle(self) -> bool:
        self.left -= 1
        return self.left > 0


def test_threads_are_measured_while_nothing_is_open_and_a_request_waits_for_one_step() -> None:
    sent: list[Message] = []
    tuner = Steps(5)
    scheduler = Scheduler(KVCache(40, 4, prefix_caching=True), LIMITS, (2,), 4, 40)
    engine = Engine(scheduler, Nines(), tuner=tuner)
    stage = EngineStage(engine, RingMembership("engine-0", 1), sent.append, unrecorded)
    assert stage.turn() and stage.turn() and tuner.left == 3
    stage.handle(prompt())
    tokens = []
    while stage.num_open:
        stage.turn()
        tokens.append(sum(isinstance(one, Tokens) for one in sent))
    assert tuner.left == 3 and tokens == [1, 2, 3]
    run(stage)
    assert tuner.left == 0


def test_it_is_told_of_a_request_before_the_engine_sees_it() -> None:
    stage, _ = make()
    seen: list[int] = []
    stage.on_request = lambda: seen.append(stage.num_open)
    stage.handle(prompt())
    stage.handle(Cancel(Envelope("a", "g")))
    assert seen == [0]


def test_each_output_is_admitted_and_ends_for_itself() -> None:
    stage, sent = make()
    stage.handle(prompt(n=3))
    run(stage)
    tokens = collections.defaultdict(list)
    for message in sent:
        assert isinstance(message, Tokens)
        tokens[message.output_index].append(message)
    assert sorted(tokens) == [0, 1, 2]
    for messages in tokens.values():
        assert [message.first_index for message in messages] == [0, 1, 2]
        assert [message.admitted is not None for message in messages] == [True, False, False]
        assert [message.finish for message in messages] == [None, None, FinishReason.LENGTH]
        assert messages[-1].timings is not None
    assert stage.num_open == 0 and stage.ended == {"finished": 1}


def test_one_output_is_cancelled_by_its_index() -> None:
    stage, sent = make()
    stage.handle(prompt(n=2))
    stage.turn()
    stage.handle(Cancel(Envelope("a", "g"), output_index=1))
    assert isinstance(sent[-1], Cancel) and stage.num_open == 1
    run(stage)
    ends = {one.output_index: one.finish for one in sent if isinstance(one, Tokens) and one.finish}
    assert ends == {0: FinishReason.LENGTH, 1: FinishReason.CANCELLED}
    assert stage.num_open == 0


def test_a_cancel_of_all_forgets_ends_that_are_not_told_yet() -> None:
    stage, sent = make()
    stage.handle(prompt())
    stage.turn()
    stage.handle(Cancel(Envelope("a", "g"), output_index=0))
    stage.handle(Cancel(Envelope("a", "g")))
    sent.clear()
    run(stage)
    assert sent == [] and stage.num_open == 0 and stage.ended == {"cancelled": 1}


def test_what_the_engine_refuses_fails_at_once() -> None:
    stage, sent = make()
    stage.handle(prompt(n=5))
    assert isinstance(sent[0], Failed) and sent[0].reason == "SLOT_CAPACITY"
    assert stage.num_open == 0 and stage.ended == {"failed": 1}
