"""The engine stage: a client's changes of its running request, and steps computed ahead of them."""

import msgspec

from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.request import FinishReason, Limits, SamplingParams
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.services.engine.membership import RingMembership
from sluice_server.services.engine.stage import EngineStage
from sluice_server.services.messages.messages import (
    Append,
    Cancel,
    CloseInput,
    Envelope,
    Failed,
    Grant,
    Message,
    Prompt,
    Tokens,
    Update,
)
from sluice_server.services.messages.processes import Report
from sluice_server.services.messages.work import Scheduling, Stops, TokenPrompt, pack_ids
from tests.services.test_stage_attempts import Nines, unrecorded

LIMITS = Limits(context_length=100, vocab_size=400)
ENVELOPE = Envelope("a", "g")


class Rig:
    """A stage whose model samples 9, and the messages it emits apart from reports."""

    def __init__(self, **scheduling: object) -> None:
        self.sent: list[Message] = []
        self.num_changes = 0
        scheduler = Scheduler(KVCache(40, 4, prefix_caching=True), LIMITS, (2,), 4, 40)
        self.stage = EngineStage(Engine(scheduler, Nines()), RingMembership("engine-0", 1), self._emit, unrecorded)
        params = SamplingParams(max_tokens=80, temperature=0.0)
        held = Scheduling(**scheduling)  # type: ignore[arg-type] # mixed values
        self.stage.handle(Prompt(ENVELOPE, pack_ids([5, 6, 7]), params, Stops(), held, 0.0))

    def _emit(self, message: Message) -> None:
        if not isinstance(message, Report):
            self.sent.append(message)

    def run(self, *messages: Message) -> None:
        """Sends changes with the numbers that a gateway gives them."""
        for message in messages:
            if isinstance(message, Grant | Append | Update | CloseInput) and message.envelope == ENVELOPE:
                message = msgspec.structs.replace(message, index=self.num_changes)
                self.num_changes += 1
            self.stage.handle(message)
        while self.stage.turn():
            pass

    @property
    def num_tokens(self) -> int:
        return sum(len(message.ids) for message in self.sent if isinstance(message, Tokens))

    @property
    def failure(self) -> Failed:
        (message,) = [one for one in self.sent if isinstance(one, Failed)]
        return message


def test_exactly_as_many_tokens_come_as_were_granted() -> None:
    rig = Rig(credit=0)
    rig.run()
    assert rig.num_tokens == 0
    rig.run(Grant(ENVELOPE, 64))
    assert rig.num_tokens == 64
    rig.run(Grant(ENVELOPE, 10), Grant(ENVELOPE, 10))
    last = rig.sent[-1]
    assert rig.num_tokens == 80 and isinstance(last, Tokens) and last.finish is FinishReason.LENGTH


def test_sampling_waits_for_the_end_of_the_input() -> None:
    rig = Rig(is_open=True)
    rig.run(Append(ENVELOPE, TokenPrompt(pack_ids([8, 8]))))
    assert rig.sent == []
    rig.run(CloseInput(ENVELOPE))
    first = rig.sent[0]
    assert isinstance(first, Tokens) and first.admitted is not None
    assert (first.admitted.num_prompt, rig.num_tokens) == (5, 80)


def test_an_update_changes_what_runs() -> None:
    rig = Rig(credit=2)
    rig.run(Update(ENVELOPE, max_tokens=3, priority=-5), Grant(ENVELOPE, 50))
    assert rig.num_tokens == 3
    rig = Rig(credit=2)
    rig.run(Update(ENVELOPE, time_left_s=-1.0))
    assert rig.failure.reason == "DEADLINE_EXCEEDED"


def test_a_change_that_is_refused_ends_the_request() -> None:
    rig = Rig()
    rig.stage.turn()
    rig.run(Append(ENVELOPE, TokenPrompt(pack_ids([8]))))
    assert rig.failure.reason == "INPUT_CLOSED" and rig.stage.num_open == 0 and rig.num_tokens == 1
    rig = Rig(is_open=True)
    rig.run(Append(ENVELOPE, TokenPrompt(pack_ids([8] * 30))))
    assert rig.failure.reason == "CONTEXT_LENGTH_EXCEEDED"


def test_changes_of_other_attempts_and_of_ended_requests_do_nothing() -> None:
    rig = Rig(credit=1)
    rig.run(Grant(Envelope("a", "g", attempt=1), 5), Grant(Envelope("b", "g"), 5))
    assert rig.num_tokens == 1
    rig.run(Grant(ENVELOPE, 100))
    rig.run(Grant(ENVELOPE, 100), CloseInput(ENVELOPE))
    assert rig.num_tokens == 80 and not any(isinstance(message, Failed) for message in rig.sent)


def test_a_change_that_was_lost_is_not_passed_over() -> None:
    """Changes after a lost one would be taken for all of them: the replay has all of them."""
    rig = Rig(is_open=True)
    rig.num_changes = 1  # an Append was on a frame that never came
    rig.run(CloseInput(ENVELOPE))
    assert rig.sent == [] and rig.stage.num_open == 0
    rig.run(Append(ENVELOPE, TokenPrompt(pack_ids([8]))))
    assert rig.sent == []


def test_a_request_that_ends_before_its_change_took_effect_leaves_no_work() -> None:
    rig = Rig()
    rig.stage.turn()
    rig.stage.handle(Update(ENVELOPE, max_tokens=1))
    rig.stage.handle(Cancel(ENVELOPE))
    assert not rig.stage.turn() and rig.stage.num_open == 0
