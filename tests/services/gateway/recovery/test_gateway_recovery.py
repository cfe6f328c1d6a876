"""The replay after a loss: which requests are sent again, in which order."""

import dataclasses

from sluice_server.engine.errors import cancelled
from sluice_server.engine.request import FinishReason, SamplingParams
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.recovery.resend import PATIENCE_S, STRICT_PATIENCE_S, WINDOW, Recovery
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.details import TokenRecord
from sluice_server.services.messages.messages import Envelope, Text
from sluice_server.services.messages.work import Generate, TextPrompt, pack_ids

ALL = frozenset({"t", "e", "d"})


def asked(num_outputs: int = 1, best_of: int = 0) -> TranslatedRequest:
    params = SamplingParams(n=num_outputs, best_of=best_of)
    return TranslatedRequest(Generate(TextPrompt("a"), params), num_outputs=num_outputs)


def opened(name: str, what: TranslatedRequest | None = None, time_left_s: float | None = None) -> OpenRequest:
    return OpenRequest(Envelope(name, "g", time_left_s=time_left_s), what or asked(), 0.0)


def bring(request: OpenRequest, *ids: int, output: int = 0, finish: FinishReason | None = None) -> None:
    """Delivers tokens of one output."""
    records = tuple(TokenRecord(one, b"x") for one in ids)
    first = request.outputs[output].num_tokens
    assert request.handle(Text(request.envelope, first, records, "x" * len(ids), output, finish=finish), 0.0) == ""


def recovery(timeout_s: float = 10.0) -> Recovery:
    return Recovery(lambda envelope: ("t", envelope.engine or "e", "d"), timeout_s)


def lose(found: Recovery, requests: list[OpenRequest], ids: frozenset[str] = ALL) -> OpenRequest | None:
    """Replaces a process of the ring by a new one."""
    found.lost(0.0)
    blamed = found.replaced(ids, requests)
    found.restored()
    return blamed


def resend(found: Recovery, now_s: float = 0.0) -> list[str]:
    due = found.due(now_s)
    for request in due:
        request.send_again(now_s, request.envelope.engine)
    return [request.envelope.request_id for request in due]


def test_nothing_is_sent_while_the_ring_is_broken() -> None:
    found, request = recovery(), opened("a")
    found.lost(0.0)
    found.replaced(ALL, [request])
    assert found.is_busy and found.due(1.0) == []
    found.restored()
    assert found.due(1.0) == [request]
    assert not found.is_busy


def test_a_loss_is_overdue_after_the_timeout_and_only_then() -> None:
    found = recovery(timeout_s=10.0)
    assert not found.is_overdue(99.0)
    found.lost(0.0)
    found.lost(8.0)  # told twice: it is one loss
    assert not found.is_overdue(10.0) and found.is_overdue(10.1)
    found.restored()
    assert not found.is_overdue(99.0)


def test_a_lost_tokenizer_concerns_only_what_has_brought_no_token() -> None:
    found, early, late = recovery(), opened("a"), opened("b")
    bring(late, 1)
    assert lose(found, [early, late], frozenset({"t"})) is None
    assert resend(found) == ["a"]


def test_what_has_ended_and_what_is_the_gateways_own_is_left_alone() -> None:
    found, ended, own, going = recovery(), opened("a"), opened("b"), opened("c")
    ended.end(cancelled())
    own.is_own = True
    lose(found, [ended, own, going])
    going.end(cancelled())  # between loss and return
    assert resend(found) == []


def test_few_unproven_requests_run_at_a_time() -> None:
    found, requests = recovery(), [opened(str(at)) for at in range(WINDOW + 3)]
    lose(found, requests)
    assert resend(found) == [str(at) for at in range(WINDOW)]
    assert resend(found) == []
    bring(requests[0], 1)
    assert resend(found) == [str(WINDOW)]
    assert resend(found, PATIENCE_S) == [str(WINDOW + 1), str(WINDOW + 2)]  # the others bring nothing: no more waiting


def test_one_alone_at_two_deaths_is_blamed() -> None:
    found, poison, others = recovery(), opened("p"), [opened(str(at)) for at in range(3)]
    for request in others:
        bring(request, 1)
    everybody = [*others, poison]
    assert lose(found, everybody) is None
    assert resend(found) == ["0", "1", "2", "p"]
    for request in others:
        bring(request, 2)
    assert lose(found, everybody) is poison


def test_several_suspects_go_one_by_one_until_the_one_is_found() -> None:
    found, requests = recovery(), [opened(name) for name in ("a", "p", "b")]
    assert lose(found, requests) is None
    resend(found)
    assert lose(found, requests) is None  # which of the three was it?
    assert resend(found) == ["a"]
    assert resend(found) == []
    bring(requests[0], 1)
    assert resend(found) == ["p"]
    assert resend(found, STRICT_PATIENCE_S / 2) == []
    assert lose(found, requests) is requests[1]


def test_a_death_before_it_was_sent_again_does_not_count() -> None:
    found, request = recovery(), opened("a")
    assert lose(found, [request]) is None
    assert lose(found, [request]) is None  # it was not there
    assert resend(found) == ["a"]
    assert request.replay.losses == {"t": 1, "e": 1, "d": 1}


def test_planned_restarts_blame_no_request() -> None:
    found, request = recovery(), opened("a")
    for _ in range(3):
        found.lost(0.0, planned=True)
        assert found.replaced(ALL, [request]) is None
        found.restored()
        assert resend(found) == ["a"]
    assert not request.replay.losses


def test_lost_frames_cost_a_replay_and_blame_no_request() -> None:
    found, request = recovery(), opened("a")
    lose(found, [request], frozenset({"e"}))
    assert resend(found) == ["a"]
    found.missed(frozenset({"d"}), [request])
    assert resend(found) == ["a"]
    assert request.replay.losses == {"e": 1}


def test_deaths_of_different_processes_blame_no_request() -> None:
    found, request = recovery(), opened("a")
    for name in ("t", "e", "d"):  # an operator restarts one after the other
        assert lose(found, [request], frozenset({name})) is None
        assert resend(found) == ["a"]
    assert lose(found, [request], frozenset({"e"})) is request


def test_another_attempt_goes_on_behind_what_came() -> None:
    request = opened("a", asked(3), time_left_s=60.0)
    bring(request, 5, 6, 7)
    bring(request, 8, output=1, finish=FinishReason.EOS)
    assert request.send_again(10.0, "e") == (pack_ids([5, 6, 7]), None, b"")
    assert (request.envelope.attempt, request.envelope.time_left_s) == (1, 50.0)
    assert request.is_unproven
    bring(request, 9)
    assert not request.is_unproven
    assert request.send_again(15.0, "e") == (pack_ids([5, 6, 7, 9]), None, b"")
    assert (request.envelope.attempt, request.envelope.time_left_s) == (2, 45.0)


def test_a_search_begins_again() -> None:
    request = opened("a", asked(best_of=3))
    bring(request, 5, 6)
    assert request.send_again(0.0, "e") == ()


def test_what_has_brought_nothing_begins_again() -> None:
    request = opened("a", dataclasses.replace(asked(2), tells_prompt=True))
    assert request.send_again(0.0, "e") == ()
