"""When the Python SDK tries again, and when it gives up."""

import grpc
import pytest
from sluice import NEVER, RetryPolicy, SluiceError
from sluice.attempts import Attempts
from sluice.credit import Credit
from sluice.progress import Progress
from sluice.retry import Retries
from sluice.v1 import inference_pb2, types_pb2

POLICY = RetryPolicy(attempts=3, first_delay_s=1.0, max_delay_s=3.0, patience_s=10.0)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def error(code: grpc.StatusCode, reason: str = "", retry_after_s: float | None = None) -> SluiceError:
    made = SluiceError("x", code=code, reason=reason)
    made.retry_after_s = retry_after_s
    return made


@pytest.mark.parametrize(
    ("failure", "begun", "delay_s"),
    [
        (error(UNAVAILABLE), False, 1.0),
        (error(UNAVAILABLE, "DRAINING", 2.5), False, 2.5),
        (error(UNAVAILABLE, "DRAINING", 0.1), False, 1.0),
        (error(EXHAUSTED, "QUEUE_FULL", 2.0), False, 2.0),
        (error(EXHAUSTED, "QUEUE_FULL", 10.5), False, None),
        (error(EXHAUSTED), False, None),
        (error(EXHAUSTED, "DEADLINE_UNATTAINABLE", 1.0), False, None),
        (error(grpc.StatusCode.ABORTED, "SLOW_CONSUMER"), True, 1.0),
        (error(grpc.StatusCode.ABORTED, "SLOW_CONSUMER"), False, None),
        (error(grpc.StatusCode.ABORTED, "RESUMED_ELSEWHERE"), True, None),
        (error(grpc.StatusCode.INVALID_ARGUMENT), False, None),
        (error(grpc.StatusCode.INTERNAL, "ENGINE_FAULT"), True, None),
        (error(grpc.StatusCode.CANCELLED), True, None),
    ],
)
def test_what_is_tried_again(failure: SluiceError, begun: bool, delay_s: float | None) -> None:
    assert Retries(POLICY, 0.0).delay_s(failure, 0.0, 1.0, begun=begun) == delay_s


@pytest.mark.parametrize(
    ("failure", "begun", "delay_s"),
    [
        (error(UNAVAILABLE, "DRAINING", 2.5), False, 1.0),
        (error(EXHAUSTED, "QUEUE_FULL", 10.5), False, 1.0),
        (error(grpc.StatusCode.FAILED_PRECONDITION, "REVISION_CHANGED"), True, 1.0),
        (error(grpc.StatusCode.FAILED_PRECONDITION, "REVISION_CHANGED"), False, None),
        (error(grpc.StatusCode.INVALID_ARGUMENT), False, None),
    ],
)
def test_what_is_tried_at_another_address(failure: SluiceError, begun: bool, delay_s: float | None) -> None:
    assert Retries(POLICY, 0.0).delay_s(failure, 0.0, 1.0, begun=begun, elsewhere=True) == delay_s


def test_a_revision_that_changed_is_final_where_there_is_one_address() -> None:
    changed = error(grpc.StatusCode.FAILED_PRECONDITION, "REVISION_CHANGED")
    assert Retries(POLICY, 0.0).delay_s(changed, 0.0, 1.0, begun=True) is None


def test_pauses_double_up_to_a_limit_and_chance_shortens_them() -> None:
    retries = Retries(RetryPolicy(attempts=9, first_delay_s=1.0, max_delay_s=3.0), 0.0)
    assert [retries.delay_s(error(UNAVAILABLE), 0.0, 1.0, begun=False) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert retries.delay_s(error(UNAVAILABLE), 0.0, 0.0, begun=False) == 1.5


def test_before_it_is_accepted_attempts_are_counted() -> None:
    retries = Retries(POLICY, 0.0)
    given = [retries.delay_s(error(UNAVAILABLE), 0.0, 1.0, begun=False) for _ in range(3)]
    assert given == [1.0, 2.0, None]
    assert Retries(NEVER, 0.0).delay_s(error(UNAVAILABLE), 0.0, 1.0, begun=False) is None


def begun() -> Progress:
    progress = Progress(types_pb2.GenerationSpec(text="a"))
    progress.take(inference_pb2.StreamGenerateResponse(accepted=types_pb2.Accepted(generation_id="g")))
    return progress


def news(progress: Progress, seq: int, num_ids: int = 1) -> None:
    delta = types_pb2.Delta(seq=seq, consumed=1, tokens=[types_pb2.Token(id=5)] * num_ids)
    progress.take(inference_pb2.StreamGenerateResponse(delta=delta))


def test_a_broken_generation_is_given_up_when_there_was_no_news_for_long() -> None:
    progress = begun()
    attempts = Attempts(POLICY, None, 0.0, progress)
    assert attempts.pause_s(error(UNAVAILABLE), 9.0, 1.0) == 1.0
    news(progress, 1)
    assert attempts.pause_s(error(UNAVAILABLE), 15.0, 1.0) == 1.0  # news made it patient again
    assert attempts.num_broken == 2
    with pytest.raises(SluiceError):
        attempts.pause_s(error(UNAVAILABLE), 25.0, 1.0)


def test_nothing_is_tried_that_the_deadline_does_not_allow() -> None:
    attempts = Attempts(POLICY, 5.0, 100.0, None)
    assert attempts.left_s(102.0) == 3.0 and attempts.left_s(106.0) == 0.0
    with pytest.raises(SluiceError):
        attempts.pause_s(error(UNAVAILABLE), 104.5, 1.0)
    assert Attempts(POLICY, None, 0.0, None).left_s(1e9) is None


def test_without_ids_nothing_goes_on_unless_its_server_keeps_it() -> None:
    progress = begun()
    news(progress, 1, num_ids=0)
    with pytest.raises(SluiceError):
        Attempts(POLICY, None, 0.0, progress).pause_s(error(UNAVAILABLE), 0.0, 1.0)
    progress.spec.scheduling.on_disconnect = types_pb2.DISCONNECT_ACTION_DETACH
    assert Attempts(POLICY, None, 0.0, progress).pause_s(error(UNAVAILABLE), 0.0, 1.0) == 1.0


def test_credit_is_given_back_by_half_windows() -> None:
    credit = Credit(5)
    assert [credit.take(num) for num in (1, 1, 1, 2, 4)] == [0, 0, 3, 0, 6]
    assert Credit(0).take(100) == 0
