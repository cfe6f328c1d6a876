"""Several engines in one ring: the loss of some moves their streams to the others, and the door stays open."""

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator

import grpc
import psutil
import pytest
from sluice.v1 import control_pb2, inference_pb2

from benchmarks.streams import Received, at_phase, stream_all
from tests.faults.test_faults_kill import (
    BACK_WITHIN_S,
    OPTIONS,
    SPECS,
    check_undisturbed,
    is_serving,
    nothing_is_left,
)
from tests.system.service import Service, generate, serve, spec, wait_until

ENGINES = ("engine-0", "engine-1", "engine-2")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    ways = ("--engines", "3", "--routing", "kv-cost", "--shared-cache-bytes", str(1 << 26))
    with serve(*OPTIONS, *ways, "--probe-timeout-s", "1") as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(service: Service) -> list[Received]:
    """The answers of an undisturbed service."""
    answers = stream_all(service.address, SPECS)
    assert not any(answer.error for answer in answers)
    return answers


def test_a_conversation_finds_its_prefix_at_whatever_engine_has_it(service: Service) -> None:
    """What an engine has generated is part of it."""
    ids, new = list(range(100, 164)), 64
    with service.stub() as stub:
        for turn in range(6):
            ids += range(200 + new * turn, 200 + new * (turn + 1))
            answer = stub.Generate(inference_pb2.GenerateRequest(spec=spec(ids, 96)), timeout=60)
            assert (answer.usage.cached_tokens >= len(ids) - new - 32) is (turn > 0), turn
            ids += [token.id for token in answer.outputs[0].tokens]
            generate(stub, spec([3 + turn], 1))  # which would take its turn at an engine


@contextlib.contextmanager
def callers(service: Service) -> Iterator[list[str]]:
    """Clients that call all the time; yields their errors. Each call must find the door open, and is answered."""
    errors: list[str] = []
    over = threading.Event()

    def call() -> None:
        with service.stub() as stub:
            while not over.is_set():
                try:
                    generate(stub, spec("def f(", 1))
                except grpc.RpcError as error:
                    errors.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        over.set()
        for thread in threads:
            thread.join()


def is_whole(service: Service) -> bool:
    """Whether every engine runs and serves, and nothing is left in any of them."""
    if service.children().keys() < set(ENGINES) or not is_serving(service):
        return False
    with service.control() as control:
        load = control.GetLoad(control_pb2.GetLoadRequest(), timeout=5).load
    serving = {one.engine_id for one in load.engines if one.state == control_pb2.ENGINE_STATE_SERVING}
    return serving >= set(ENGINES) and nothing_is_left(service)


def killing(service: Service, *engines: str) -> Callable[[], None]:
    children = service.children()

    def at_once() -> None:
        for name in engines:
            children[name].kill()

    return at_once


QUICK = {("engine-0",), ("engine-0", "engine-1")}
EACH = [*itertools.combinations(ENGINES, 1), *itertools.combinations(ENGINES, 2)]
LOST = [one if one in QUICK else pytest.param(one, marks=pytest.mark.long) for one in EACH]


@pytest.mark.parametrize("lost", LOST, ids="+".join)
def test_streams_go_on_at_other_engines_and_the_door_stays_open(
    service: Service, undisturbed: list[Received], lost: tuple[str, ...]
) -> None:
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "the engines are not back")
    with callers(service) as errors:
        answers = stream_all(service.address, SPECS, at_phase("decode", 3, killing(service, *lost)))
        wait_until(lambda: service.children().keys() >= set(ENGINES), BACK_WITHIN_S, "an engine is not back")
    check_undisturbed(answers, undisturbed)
    assert not errors
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "something is left")


@pytest.mark.parametrize(
    "name",
    [pytest.param("engine-0", marks=pytest.mark.long), "engine-1", pytest.param("engine-2", marks=pytest.mark.long)],
)
def test_what_a_stopped_engine_still_says_later_reaches_nobody(
    service: Service, undisturbed: list[Received], name: str
) -> None:
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "the engines are not back")
    stopped = service.children()[name]
    with callers(service) as errors:
        answers = stream_all(service.address, SPECS, at_phase("decode", 4, stopped.suspend))
        with contextlib.suppress(psutil.NoSuchProcess):  # a supervisor has started it again
            stopped.resume()  # it computes on, and its requests are others' by now
        again = stream_all(service.address, SPECS)
    check_undisturbed(answers, undisturbed)
    check_undisturbed(again, undisturbed)
    assert not [error for error in errors if "DEADLINE" not in error]
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "something is left")


@pytest.mark.long
@pytest.mark.parametrize("names", list(itertools.combinations(ENGINES, 2)), ids="+".join)
def test_two_engines_that_stop_for_good_are_replaced(
    service: Service, undisturbed: list[Received], names: tuple[str, ...]
) -> None:
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "the engines are not back")
    stopped = [service.children()[name] for name in names]

    def suspend() -> None:
        for one in stopped:
            one.suspend()

    with callers(service) as errors:
        answers = stream_all(service.address, SPECS, at_phase("decode", 5, suspend))
        wait_until(lambda: not any(one.is_running() for one in stopped), BACK_WITHIN_S, "nobody ended them")
    check_undisturbed(answers, undisturbed)
    assert not [error for error in errors if "DEADLINE" not in error]
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "something is left")


@pytest.mark.long
def test_all_engines_lost_are_waited_for(service: Service, undisturbed: list[Received]) -> None:
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "the engines are not back")
    answers = stream_all(service.address, SPECS, at_phase("decode", 5, killing(service, *ENGINES)))
    check_undisturbed(answers, undisturbed)
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "something is left")


def test_a_restart_that_was_asked_for_refuses_nobody(service: Service, undisturbed: list[Received]) -> None:
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "the engines are not back")
    before = {name: child.pid for name, child in service.children().items()}
    hang_up = at_phase("decode", 6, lambda: service.process.send_signal(signal.SIGHUP))

    def are_new() -> bool:
        children = service.children()
        return children.keys() == before.keys() and all(
            (children[name].pid != before[name]) is (name != "gateway-0") for name in before
        )

    with callers(service) as errors:
        check_undisturbed(stream_all(service.address, SPECS, hang_up), undisturbed)
        wait_until(are_new, BACK_WITHIN_S, "not all were restarted")
    assert not errors
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "something is left")


def test_one_engine_that_is_asked_to_exit_hands_its_streams_over(service: Service, undisturbed: list[Received]) -> None:
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "the engines are not back")
    before = service.children()["engine-1"]
    with callers(service) as errors:
        check_undisturbed(stream_all(service.address, SPECS, at_phase("decode", 7, before.terminate)), undisturbed)
        wait_until(
            lambda: not before.is_running() and service.children().keys() >= set(ENGINES),
            BACK_WITHIN_S,
            "it is not back",
        )
    assert not errors
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "something is left")


def engines_of(service: Service) -> set[str]:
    """The engines that have reported to the gateway."""
    with service.control() as control:
        return {one.engine_id for one in control.GetLoad(control_pb2.GetLoadRequest()).load.engines}


def joined(service: Service) -> None:
    """Adds an engine and waits until it has said something."""
    service.process.send_signal(signal.SIGTTIN)
    wait_until(lambda: "engine-3" in engines_of(service), BACK_WITHIN_S, "no engine joins")


def check_left(service: Service) -> None:
    def has_left() -> bool:
        return engines_of(service) == set(ENGINES) and "engine-3" not in service.children()

    wait_until(has_left, BACK_WITHIN_S, "engine-3 does not leave")
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "something is left")


def test_engines_join_and_leave_and_no_client_notices(service: Service, undisturbed: list[Received]) -> None:
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "the engines are not back")
    with callers(service) as errors:
        joined(service)
        leave = at_phase("decode", 8, lambda: service.process.send_signal(signal.SIGTTOU))
        check_undisturbed(stream_all(service.address, SPECS, leave), undisturbed)
        check_left(service)
    assert not errors


@pytest.mark.long
@pytest.mark.parametrize("harm", ["kill", "suspend", "terminate"])
def test_an_engine_that_is_lost_while_it_drains_has_left(
    service: Service, undisturbed: list[Received], harm: str
) -> None:
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "the engines are not back")
    joined(service)

    def drain_and_lose() -> None:
        leaving = service.children()["engine-3"]
        service.process.send_signal(signal.SIGTTOU)
        getattr(leaving, harm)()

    with callers(service) as errors:
        check_undisturbed(stream_all(service.address, SPECS, at_phase("decode", 9, drain_and_lose)), undisturbed)
        check_left(service)
    assert not errors


@pytest.mark.long
def test_an_engine_that_dies_before_it_serves_does_not_join(service: Service, undisturbed: list[Received]) -> None:
    wait_until(lambda: is_whole(service), BACK_WITHIN_S, "the engines are not back")
    with callers(service) as errors:
        service.process.send_signal(signal.SIGTTIN)
        wait_until(lambda: "engine-3" in service.children(), BACK_WITHIN_S, "no engine is started")
        service.children()["engine-3"].kill()
        check_undisturbed(stream_all(service.address, SPECS), undisturbed)
        check_left(service)
    assert not errors
