"""The usage of a request: first token, gaps, drafts, and the total at any time."""

from sluice_server.engine.request import FinishReason
from sluice_server.engine.scheduler.histogram import Histogram, HistogramSnapshot
from sluice_server.services.gateway.requests.accounting import Accounting
from sluice_server.services.gateway.requests.output_state import OutputState
from sluice_server.services.messages.details import Admitted, Timings, TokenRecord
from sluice_server.services.messages.messages import Envelope, Text
from sluice_server.services.messages.work import Stops

ADMITTED = Admitted(num_prompt=3, num_cached=1, max_tokens=8, stops=Stops())


def text(first_index: int, num_tokens: int = 1, **more: object) -> Text:
    records = tuple(TokenRecord(id=1, piece=b"x") for _ in range(num_tokens))
    return Text(Envelope("r", "g"), first_index, records, "x", **more)  # type: ignore[arg-type] # fields of it


def test_what_is_used_is_known_at_any_time() -> None:
    account, output = Accounting(10.0, reserved=7), OutputState()
    assert (account.reserved, account.num_prompt, account.used([output], None).ttft_s) == (7, 0, 0.0)
    last = text(1, 2, finish=FinishReason.EOS, timings=Timings(queue_s=0.5), drafts=((3, 1),), num_reasoning=1)
    for one, now_s in ((text(0, admitted=ADMITTED), 12.0), (last, 13.0)):
        output.add(one)
        account.record(one, output, now_s)
    used = account.used([output], last)
    assert (used.num_prompt, used.num_cached, used.num_completion, used.num_reasoning) == (3, 1, 3, 1)
    assert (used.num_drafted, used.num_accepted, used.ttft_s) == (3, 1, 2.0)
    assert (used.finish_reason, used.timings) == (FinishReason.EOS.value, Timings(queue_s=0.5))


def test_what_the_engine_said_first_counts() -> None:
    account, output = Accounting(0.0), OutputState()
    account.record(text(0, admitted=ADMITTED), output, 1.0)
    account.record(text(1, admitted=Admitted(num_prompt=9, num_cached=9, max_tokens=8, stops=Stops())), output, 1.0)
    assert account.admitted == ADMITTED


def test_gaps_are_between_messages_with_tokens_of_one_output() -> None:
    gaps = Histogram((4.0, 7.5))
    account, outputs = Accounting(0.0, gaps=gaps), [OutputState(), OutputState()]
    for index, num_tokens, now_s in ((0, 1, 1.0), (1, 1, 5.0), (0, 0, 6.0), (0, 1, 8.0)):
        account.record(text(0, num_tokens), outputs[index], now_s)
    assert gaps.snapshot() == HistogramSnapshot((4.0, 7.5), (0, 1, 0), 7.0)
