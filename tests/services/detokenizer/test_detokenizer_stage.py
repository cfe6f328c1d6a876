"""The detokenizer stage alone: several outputs, their ends, and dropped messages."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.request import FinishReason
from sluice_server.services.detokenizer.flush_timer import AT_ONCE, Alarm
from sluice_server.services.detokenizer.output import Output, OutputProgress
from sluice_server.services.detokenizer.stage import DetokenizerStage
from sluice_server.services.messages.details import Admitted
from sluice_server.services.messages.messages import Cancel, Envelope, Failed, Grant, Message, Text, Tokens, failed
from sluice_server.services.messages.processes import Probe
from sluice_server.services.messages.work import Stops, TextOptions
from sluice_server.services.tokenizer.encoding import TextEncoder
from tests.oracle.tokenizers import byte_level_bpe

ENVELOPE = Envelope("a", "g")


def unrecorded(*_: object) -> None:
    """Records no phase."""


@pytest.fixture
def encoder(tmp_path: Path) -> TextEncoder:
    byte_level_bpe(tmp_path)
    return TextEncoder.load(tmp_path)


class Rig:
    """A stage, and the messages it has sent."""

    def __init__(self, encoder: TextEncoder, stops: Stops, options: TextOptions | None = None) -> None:
        self.encoder = encoder
        self.sent: list[Message] = []
        self.late: list[Callable[[], None]] = []  # what a timer will call
        self.now_s = 0.0
        alarm = (
            AT_ONCE if options is None else Alarm(lambda: self.now_s, lambda _, callback: self.late.append(callback))
        )
        self.stage = DetokenizerStage(encoder, self.sent.append, unrecorded, timer=alarm)
        self._stops = stops
        self._options = options or TextOptions()
        self._next: dict[int, int] = {}

    def say(self, output: int, text: str, finish: FinishReason | None = None) -> None:
        """Sends the tokens of `text` as the engine would."""
        ids = tuple(self.encoder.tokenizer.encode(text, add_special_tokens=False).ids)
        first = self._next.get(output, 0)
        self._next[output] = first + len(ids)
        admitted = None if first else Admitted(3, 0, 8, self._stops, self._options)
        self.stage.handle(Tokens(ENVELOPE, first, ids, output, admitted=admitted, finish=finish))
        self.stage.turn()

    def pass_time(self) -> None:
        """Lets the first timer go off."""
        self.now_s += 1.0
        self.late.pop(0)()

    def sizes(self) -> list[int]:
        """The tokens of each message with text."""
        return [len(one.tokens) for one in self.sent if isinstance(one, Text)]

    def num_said(self, output: int) -> int:
        return self._next[output]

    def texts(self, output: int) -> str:
        return "".join(one.text for one in self.sent if isinstance(one, Text) and one.output_index == output)

    def ends(self) -> dict[int, FinishReason]:
        return {one.output_index: one.finish for one in self.sent if isinstance(one, Text) and one.finish}


def test_a_stop_string_ends_its_own_output_only(encoder: TextEncoder) -> None:
    rig = Rig(encoder, Stops(("world",)))
    rig.say(0, "hello wor")
    rig.say(1, "quick brown")
    rig.say(0, "ld and more")
    rig.say(1, " fox", FinishReason.LENGTH)
    assert (rig.texts(0), rig.texts(1)) == ("hello ", "quick brown fox")
    assert rig.ends() == {0: FinishReason.STOP_STRING, 1: FinishReason.LENGTH}
    assert rig.stage.num_open == 1  # the engine has not told the stopped output's end
    rig.stage.handle(Cancel(ENVELOPE, output_index=0))
    rig.say(0, "late", FinishReason.CANCELLED)
    assert rig.ends()[0] is FinishReason.STOP_STRING and rig.stage.num_open == 0


def test_credit_for_tokens_behind_a_stop_string_goes_back(encoder: TextEncoder) -> None:
    """The client hears of two tokens and grants no more; its other output must not wait for the remaining credit."""
    rig = Rig(encoder, Stops(("wor",)))
    rig.say(0, "hello")
    rig.say(1, "quick")
    rig.say(0, " world and")  # several at once, as speculation brings them
    rig.say(0, " more")
    grants = [one for one in rig.sent if isinstance(one, Grant)]
    assert not grants  # more may come
    rig.stage.handle(Tokens(ENVELOPE, rig.num_said(0), (), 0, finish=FinishReason.CANCELLED))
    told = sum(len(one.tokens) for one in rig.sent if isinstance(one, Text) and one.output_index == 0)
    assert [one for one in rig.sent if isinstance(one, Grant)] == [Grant(ENVELOPE, rig.num_said(0) - told)]


def test_the_end_of_a_cancelled_output_is_told_with_the_text_that_was_held_back(encoder: TextEncoder) -> None:
    rig = Rig(encoder, Stops(("world",)))
    rig.say(0, "hello wor")
    rig.stage.handle(Cancel(ENVELOPE, output_index=0))
    assert rig.texts(0) == "hello " and rig.stage.num_open == 1
    rig.say(0, "", FinishReason.CANCELLED)
    assert rig.texts(0) == "hello wor" and rig.ends() == {0: FinishReason.CANCELLED}


def test_a_cancel_of_all_forgets_every_output(encoder: TextEncoder) -> None:
    rig = Rig(encoder, Stops())
    rig.say(0, "hello")
    rig.say(1, "hello")
    rig.stage.handle(Cancel(ENVELOPE))
    rig.say(1, "late")
    assert rig.stage.num_open == 0 and rig.stage.num_late > 0 and rig.texts(1) == "hello"


def say_each(rig: Rig, num: int) -> None:
    """Says that many words of one token."""
    for _ in range(num):
        rig.say(0, "x")


@pytest.mark.parametrize(("interval", "sizes"), [(1, [1] * 9), (3, [1, 3, 3, 2]), (100, [1, 8])])
def test_text_is_sent_when_the_tokens_of_the_stream_interval_have_come(
    encoder: TextEncoder, interval: int, sizes: list[int]
) -> None:
    rig = Rig(encoder, Stops(), TextOptions(stream_interval=interval))
    say_each(rig, 8)
    rig.say(0, "x", FinishReason.LENGTH)
    assert rig.sizes() == sizes and rig.texts(0) == "x" * 9


def test_text_does_not_wait_for_ever_for_the_tokens_of_its_interval(encoder: TextEncoder) -> None:
    rig = Rig(encoder, Stops(), TextOptions(stream_interval=4))
    say_each(rig, 3)
    assert rig.sizes() == [1] and len(rig.late) == 1
    rig.late.pop()()
    assert rig.sizes() == [1, 2]
    say_each(rig, 4)
    assert rig.sizes() == [1, 2, 4] and len(rig.late) == 1
    say_each(rig, 1)
    rig.late.pop(0)()  # of text that was sent meanwhile
    assert rig.sizes() == [1, 2, 4]


@pytest.mark.parametrize(("origin", "sizes"), [("g", [1, 1]), ("another", [1, 1, 1])])
def test_text_waits_where_its_gateway_has_many_requests_at_other_models(
    encoder: TextEncoder, origin: str, sizes: list[int]
) -> None:
    rig = Rig(encoder, Stops(), TextOptions())
    rig.stage.probed(Probe(origin, 1, (), num_generating=1000))
    for _ in range(3):
        rig.say(0, "x")
        rig.now_s += 0.02
    assert rig.sizes() == sizes
    while rig.late:
        rig.pass_time()
    assert rig.texts(0) == "xxx"


def test_waiting_text_of_a_cancelled_request_is_not_sent_late(encoder: TextEncoder) -> None:
    rig = Rig(encoder, Stops(), TextOptions(stream_interval=4))
    say_each(rig, 3)
    rig.stage.handle(Cancel(ENVELOPE))
    rig.late.pop()()
    assert rig.sizes() == [1] and rig.stage.num_open == 0


def test_tokens_that_cannot_end_their_output_are_decoded_together_when_it_is_sent(
    encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    push = Output.push

    def counted(output: Output, ids: Sequence[int], finish: FinishReason | None) -> OutputProgress:
        decoded.append(len(ids))
        return push(output, ids, finish)

    monkeypatch.setattr(Output, "push", counted)
    rig = Rig(encoder, Stops(), TextOptions())
    say_each(rig, 5)
    assert decoded == [1, 1] and rig.sizes() == [1, 1]
    rig.pass_time()
    assert decoded == [1, 1, 3] and rig.sizes() == [1, 1, 3] and rig.texts(0) == "xxxxx"
    last = rig.sent[-1]
    assert isinstance(last, Text) and (last.first_index, last.num_steps) == (2, 3)


def test_a_stop_string_is_found_before_its_text_is_due(encoder: TextEncoder) -> None:
    rig = Rig(encoder, Stops(("world",)), TextOptions())
    for text in ("hello", " big", " brown", " world"):
        rig.say(0, text)
    assert rig.late and rig.ends() == {0: FinishReason.STOP_STRING} and rig.texts(0) == "hello big brown "


def test_a_fault_in_late_decoding_ends_its_own_request_only(
    encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(encoder, Stops(), TextOptions())
    say_each(rig, 3)
    monkeypatch.setattr(Output, "push", lambda *_: 1 // 0)
    rig.pass_time()
    assert isinstance(rig.sent[-1], Failed) and rig.sizes() == [1, 1] and rig.stage.num_open == 0


def test_waiting_tokens_of_a_request_that_fails_elsewhere_are_sent_before_its_end(encoder: TextEncoder) -> None:
    rig = Rig(encoder, Stops(), TextOptions())
    say_each(rig, 4)
    rig.stage.handle(failed(ENVELOPE, ServiceError(Code.INTERNAL, "BROKEN", "is broken")))
    assert rig.sizes() == [1, 1, 2] and isinstance(rig.sent[-1], Failed) and rig.stage.num_open == 0


def test_a_request_whose_waiting_tokens_cannot_be_decoded_fails_once_more_at_most(
    encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(encoder, Stops(), TextOptions())
    say_each(rig, 3)
    monkeypatch.setattr(Output, "push", lambda *_: 1 // 0)
    rig.stage.handle(failed(ENVELOPE, ServiceError(Code.INTERNAL, "BROKEN", "is broken")))
    assert [type(one) for one in rig.sent] == [Text, Text, Failed, Failed] and rig.stage.num_open == 0
