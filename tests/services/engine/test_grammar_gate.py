"""Requests that wait for their grammar before the engine: order, cancels, attempts, failures; others pass them."""

import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest

from sluice_server.engine.errors import invalid
from sluice_server.engine.request import SamplingParams
from sluice_server.engine.sampling.grammars import Grammar, Grammars
from sluice_server.services.engine.grammar_gate import GrammarGate
from sluice_server.services.messages.messages import Cancel, Envelope, Failed, Message, Prompt
from sluice_server.services.messages.work import Scheduling, Stops, pack_ids


class Stage:
    """Notes what reaches the engine."""

    progress = 7

    def __init__(self) -> None:
        self.taken: list[Message] = []
        self.open: set[str] = set()

    def is_open(self, request_id: str) -> bool:
        return request_id in self.open

    def handle(self, message: Message) -> None:
        self.taken.append(message)
        if isinstance(message, Prompt):
            if message.params.max_tokens == 13:
                raise RuntimeError
            self.open.add(message.envelope.request_id)

    def turn(self) -> bool:
        return False


class SlowGrammars(Grammars):
    """Grammars that compile when the test says so."""

    def __init__(self) -> None:
        super().__init__(None)
        self.go = threading.Event()
        self.made: dict[str, Grammar] = {}

    def compiled(self, source: str) -> Grammar | None:
        return self.made.get(source)

    def compile(self, source: str) -> Grammar:
        assert self.go.wait(10)
        if source == "bad":
            raise invalid("constraint", "no")
        if source == "broken":
            raise RuntimeError
        self.made[source] = Grammar(source, None)  # type: ignore[arg-type] # never followed
        return self.made[source]


class Rig:
    def __init__(self, pool: Executor) -> None:
        self.stage, self.grammars = Stage(), SlowGrammars()
        self.sent: list[Message] = []
        self.woken = threading.Semaphore(0)
        self.gate = GrammarGate(self.stage, self.grammars, pool, self.woken.release, self.sent.append)  # type: ignore[arg-type] # as far as it is used

    def compile(self, num: int = 1) -> None:
        """Lets `num` grammars compile, with a turn of the loop after each."""
        self.grammars.go.set()
        for _ in range(num):
            assert self.woken.acquire(timeout=10)
            self.gate.turn()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ThreadPoolExecutor(1) as pool:
        rig = Rig(pool)
        yield rig
        rig.grammars.go.set()


def prompt(name: str, grammar: str = "", attempt: int = 0, **fields: Any) -> Prompt:  # noqa: ANN401 # of an Envelope
    envelope = Envelope(name, "g", attempt=attempt, **fields)
    return Prompt(envelope, pack_ids([1]), SamplingParams(grammar=grammar), Stops(), Scheduling(), 0.0)


def test_a_waiting_request_delays_no_other_and_its_messages_keep_their_order(rig: Rig) -> None:
    slow, free = prompt("slow", "x"), prompt("free")
    behind = Cancel(slow.envelope, 1)
    for message in (slow, behind, free):
        rig.gate.handle(message)
    rig.gate.turn()
    assert rig.stage.taken == [free] and rig.gate.num_waiting == 1 and rig.gate.progress == 7
    rig.compile()
    assert rig.stage.taken == [free, slow, behind] and rig.gate.num_waiting == 0
    again = prompt("again", "x")
    rig.gate.handle(again)  # what is compiled is there at once
    assert rig.stage.taken[-1] == again


def test_a_cancel_drops_what_waits(rig: Rig) -> None:
    slow = prompt("slow", "x")
    rig.gate.handle(slow)
    rig.gate.handle(Cancel(slow.envelope))
    assert rig.gate.num_waiting == 0
    rig.gate.handle(prompt("other", "y"))
    rig.compile()
    rig.gate.turn()
    assert [type(message) for message in rig.stage.taken if message.envelope.request_id == "slow"] == [Cancel]  # type: ignore[union-attr] # no probe


def test_the_newest_attempt_is_let_in_once(rig: Rig) -> None:
    for attempt in (1, 3, 2, 3):
        rig.gate.handle(prompt("r", f"x{attempt}", attempt))
    rig.gate.handle(Cancel(prompt("r", attempt=2).envelope))  # of one that was given up
    rig.compile()
    rig.grammars.go.set()
    while not rig.stage.taken:
        rig.compile()
    assert [one.envelope.attempt for one in rig.stage.taken if isinstance(one, Prompt)] == [3]


@pytest.mark.parametrize(("grammar", "reason"), [("bad", "INVALID_PARAMETER"), ("broken", "ENGINE_FAULT")])
def test_a_grammar_that_fails_ends_its_request_only(rig: Rig, grammar: str, reason: str) -> None:
    rig.gate.handle(prompt("a", grammar))
    rig.gate.handle(prompt("b", "good"))
    rig.compile(2)
    (failure,) = rig.sent
    assert isinstance(failure, Failed) and (failure.envelope.request_id, failure.reason) == ("a", reason)
    assert [one.envelope.request_id for one in rig.stage.taken if isinstance(one, Prompt)] == ["b"]


def test_an_engine_that_breaks_on_it_ends_its_request_only(rig: Rig) -> None:
    unlucky = prompt("a", "x")
    rig.gate.handle(
        Prompt(unlucky.envelope, unlucky.ids, SamplingParams(grammar="x", max_tokens=13), Stops(), Scheduling(), 0)
    )
    rig.compile()
    assert [type(message) for message in rig.sent] == [Failed]


def test_the_time_that_it_waits_counts(rig: Rig) -> None:
    rig.gate.handle(prompt("a", "x", time_left_s=5.0))
    rig.compile()
    (taken,) = rig.stage.taken
    assert isinstance(taken, Prompt) and taken.envelope.time_left_s is not None and taken.envelope.time_left_s < 5.0


def test_grammars_are_kept_as_long_as_their_requests_are_open(rig: Rig) -> None:
    rig.gate.handle(prompt("a", "x"))
    rig.compile()
    rig.gate.turn()
    assert rig.gate.num_kept == 1
    rig.stage.open.clear()
    rig.gate.turn()
    assert rig.gate.num_kept == 0
