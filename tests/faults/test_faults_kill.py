"""Processes killed under load: every stream goes on where it was, without a visible gap."""

import itertools
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sluice.v1 import control_pb2

from benchmarks.streams import Received, at_phase, stream_all, varied
from tests.faults.faulty import faults
from tests.system.service import Service, serve, spec, wait_until

NUM_STREAMS = 16
NUM_TOKENS = 48
SPECS = varied(NUM_STREAMS, NUM_TOKENS)
INNER = ("tokenizer", "engine", "detokenizer")
PHASES = ("prefill", "decode", "last")
PAIRS = (
    *((*pair, phase) for pair in itertools.combinations(INNER, 2) for phase in PHASES),
    *(("gateway", role, "decode") for role in INNER),
    *(("gateway", "engine", phase) for phase in ("prefill", "last")),
)
BACK_WITHIN_S = 60.0
# Small steps, so that prompts are still being computed when the first tokens come.
OPTIONS = ("--dtype", "float32", "--max-restarts", "1000", "--max-num-batched-tokens", "64")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serve(*OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(service: Service) -> list[Received]:
    """The answers of an undisturbed service."""
    answers = stream_all(service.address, SPECS)
    assert [answer.error for answer in answers] == [""] * NUM_STREAMS
    return answers


def kill(service: Service, *roles: str) -> Callable[[], None]:
    # Found now: on a busy machine to find them may take as long as an answer; a restarted one gets its title late.
    names = [f"{role}-0" for role in roles]
    wait_until(lambda: service.children().keys() >= set(names), BACK_WITHIN_S, f"{names} do not all run")
    children = service.children()

    def at_once() -> None:
        for name in names:
            children[name].kill()

    return at_once


def is_serving(service: Service) -> bool:
    with grpc.insecure_channel(service.address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def nothing_is_left(service: Service) -> bool:
    """Whether no request is open and all blocks are free."""
    with service.control() as control:
        load = control.GetLoad(control_pb2.GetLoadRequest(), timeout=5).load
    is_idle = [one.running_requests == one.waiting_requests == 0 for one in load.engines]
    is_free = [one.free_blocks == one.total_blocks for one in load.engines]
    return bool(is_idle) and all(is_idle) and all(is_free) and not load.open_requests


def check_undisturbed(answers: list[Received], undisturbed: list[Received]) -> None:
    assert [answer.error for answer in answers] == [""] * len(answers)
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert answer.answer == expected.answer
        assert answer.seqs == list(range(1, len(answer.seqs) + 1))


def killing(service: Service, roles: str | Sequence[str], phase: str, seed: int, undisturbed: list[Received]) -> None:
    names = (roles,) if isinstance(roles, str) else roles
    answers = stream_all(service.address, SPECS, at_phase(phase, seed, kill(service, *names)))
    check_undisturbed(answers, undisturbed)
    wait_until(lambda: is_serving(service) and nothing_is_left(service), BACK_WITHIN_S, "the service did not recover")
    wait_until(lambda: len(service.children()) == 4, BACK_WITHIN_S, "not every process runs again")


QUICK = {("tokenizer", "prefill"), ("detokenizer", "last"), *(("engine", phase) for phase in PHASES)}
DEATHS = [
    pytest.param(role, phase, marks=() if (role, phase) in QUICK else pytest.mark.long)
    for role in INNER
    for phase in PHASES
]


@pytest.mark.parametrize(("role", "phase"), DEATHS)
def test_streams_survive_the_death_of_any_inner_process(
    service: Service, undisturbed: list[Received], role: str, phase: str
) -> None:
    killing(service, role, phase, 0, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 20))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("role", INNER)
def test_streams_survive_every_death(
    service: Service, undisturbed: list[Received], role: str, phase: str, seed: int
) -> None:
    killing(service, role, phase, seed, undisturbed)


@pytest.mark.parametrize(
    ("one", "other", "phase"),
    [pytest.param(*pair, marks=() if pair[::2] == ("gateway", "prefill") else pytest.mark.long) for pair in PAIRS],
)
def test_streams_survive_the_death_of_two_processes_at_once(
    service: Service, undisturbed: list[Received], one: str, other: str, phase: str
) -> None:
    killing(service, (one, other), phase, 5, undisturbed)


def test_streams_survive_a_process_that_hangs(service: Service, undisturbed: list[Received]) -> None:
    def stop() -> None:
        service.children()["engine-0"].suspend()

    check_undisturbed(stream_all(service.address, SPECS, at_phase("decode", 1, stop)), undisturbed)


def test_streams_survive_a_restart_of_everything_behind_the_gateway(
    service: Service, undisturbed: list[Received]
) -> None:
    before = service.children()
    hangs_up = at_phase("decode", 2, lambda: service.process.send_signal(signal.SIGHUP))
    check_undisturbed(stream_all(service.address, SPECS, hangs_up), undisturbed)
    wait_until(lambda: all_replaced(service, before), BACK_WITHIN_S, "not all were restarted")
    wait_until(lambda: is_serving(service) and nothing_is_left(service), BACK_WITHIN_S, "the service did not recover")


def all_replaced(service: Service, before: Mapping[str, object]) -> bool:
    now = service.children()
    # A child that has only just begun has no title yet.
    return now.keys() == before.keys() and all(now[f"{role}-0"] != before[f"{role}-0"] for role in INNER)


@pytest.mark.parametrize(
    ("phase", "seed"),
    [
        ("decode", 0),
        *(pytest.param(phase, seed, marks=pytest.mark.long) for phase in PHASES for seed in range(1, 20)),
    ],
)
def test_clients_of_a_killed_gateway_resume_from_what_they_have(
    service: Service, undisturbed: list[Received], phase: str, seed: int
) -> None:
    killing(service, "gateway", phase, seed, undisturbed)


def test_a_killed_gateway_comes_back_and_what_it_asked_for_is_dropped(
    service: Service, undisturbed: list[Received]
) -> None:
    long = varied(NUM_STREAMS, 1600)  # no answer has ended when the gateway is killed, however busy the machine is
    answers = stream_all(service.address, long, at_phase("decode", 3, kill(service, "gateway")), persists=False)
    assert {answer.error.split(":")[0] for answer in answers} <= {"", "UNAVAILABLE"}
    assert any(answer.error for answer in answers)
    assert all(answer.error or answer.ends for answer in answers)  # none is cut short without a word
    wait_until(lambda: is_serving(service) and nothing_is_left(service), BACK_WITHIN_S, "the service did not recover")
    check_undisturbed(stream_all(service.address, SPECS), undisturbed)


def test_a_request_that_kills_its_engine_fails_alone() -> None:
    with serve(*OPTIONS, environment=faults(poison=7)) as poisoned:
        specs = [*varied(4, 24), spec([5, 6, 7], 8)]
        answers = stream_all(poisoned.address, specs)
        assert [answer.error for answer in answers[:4]] == [""] * 4
        assert answers[4].error.startswith("INTERNAL: the engine ended twice")
        assert stream_all(poisoned.address, specs[:1])[0].answer == answers[0].answer


def test_a_process_that_dies_too_often_ends_the_service_with_a_status() -> None:
    # Its own place for sockets: others may serve on this machine. Short, as an ipc path has a limit.
    own = Path(tempfile.mkdtemp(dir="/tmp"))
    with serve("--max-restarts", "0", environment={"TMPDIR": str(own)}) as fragile:
        children = fragile.children()
        long = varied(2, 400)  # neither has ended when the process is killed, however busy the machine is
        answers = stream_all(fragile.address, long, at_phase("decode", 4, kill(fragile, "detokenizer")), persists=False)
        assert [answer.error.split(":")[0] for answer in answers] == ["UNAVAILABLE"] * 2
        assert fragile.process.wait(30) == 1
        assert not any(child.is_running() for child in children.values())
    assert not list(own.glob("sluice-run-*"))
    shutil.rmtree(own)  # torch leaves a directory of its own
