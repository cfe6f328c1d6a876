"""A group of ranks as a service: the answers of one rank, and no token lost or repeated when any rank ends or hangs."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.streams import Received, at_phase, stream_all, varied
from tests.faults.hosts import OPTIONS
from tests.faults.test_faults_kill import check_undisturbed, is_serving, nothing_is_left
from tests.system.service import Service, serve, wait_until

SPECS = varied(16, 48)
# Ranks of a test take turns on the cores that there are.
TWO = (*OPTIONS, "--tensor-parallel-size", "2")
STAGES = (*OPTIONS, "--pipeline-parallel-size", "2")
FOUR = (*STAGES, "--tensor-parallel-size", "2")
RANKS = ("engine-0", "worker-0-1")
BACK_WITHIN_S = 60.0
MAPPED = "::ffff:"  # before an address of IPv4 that a socket of IPv6 listens on


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the lines that the service of two ranks prints for operators."""
    return tmp_path_factory.mktemp("log") / "lines"


@pytest.fixture(scope="module")
def two(lines: Path) -> Iterator[Service]:
    with lines.open("a") as log, serve(*TWO, log=log) as service:
        yield service


def has_recovered(service: Service) -> bool:
    return is_serving(service) and nothing_is_left(service) and service.children().keys() >= set(RANKS)


def pids(service: Service) -> set[int]:
    return {child.pid for child in service.children().values()}


def test_two_ranks_answer_as_one(two: Service, one_rank: list[Received]) -> None:
    check_undisturbed(stream_all(two.address, SPECS), one_rank)


@pytest.mark.parametrize(
    "phase", ["decode", *(pytest.param(one, marks=pytest.mark.long) for one in ("prefill", "last"))]
)
@pytest.mark.parametrize("name", RANKS)
def test_streams_survive_the_death_of_any_rank(two: Service, one_rank: list[Received], name: str, phase: str) -> None:
    before = two.children()
    answers = stream_all(two.address, SPECS, at_phase(phase, 3, before[name].kill))
    check_undisturbed(answers, one_rank)
    wait_until(lambda: has_recovered(two), BACK_WITHIN_S, "the service did not recover")
    old = {before[rank].pid for rank in RANKS}
    wait_until(lambda: not old & pids(two), BACK_WITHIN_S, "ranks start and end together")
    wait_until(lambda: has_recovered(two), BACK_WITHIN_S, "the service did not recover again")


@pytest.mark.parametrize("name", [RANKS[0], *(pytest.param(name, marks=pytest.mark.long) for name in RANKS[1:])])
def test_streams_survive_a_rank_that_hangs(two: Service, one_rank: list[Received], lines: Path, name: str) -> None:
    """The line about it names the rank that hangs, not one that waits for it."""
    before = len(lines.read_text())
    answers = stream_all(two.address, SPECS, at_phase("decode", 1, two.children()[name].suspend))
    check_undisturbed(answers, one_rank)

    def told() -> list[str]:
        return [line for line in lines.read_text()[before:].splitlines() if "starting its group again" in line]

    # What the answers needed may have been computed before: then nobody waits, and the loss is found later.
    wait_until(lambda: bool(told()), BACK_WITHIN_S, "the supervisor did not notice")
    wait_until(lambda: has_recovered(two), BACK_WITHIN_S, "the service did not recover")
    said = told()
    assert len(said) == 1, said
    # On a busy machine the supervisor may be faster than the end of a rank that has waited: it then says "was stuck".
    assert " was stuck" in said[0] or f"rank {RANKS.index(name)} " in said[0], said


@pytest.fixture(scope="module")
def stages() -> Iterator[Service]:
    with serve(*STAGES) as service:
        yield service


def test_streams_survive_the_death_of_a_stage(stages: Service, one_rank: list[Received]) -> None:
    """And the answers of two stages are those of one rank."""
    answers = stream_all(stages.address, SPECS, at_phase("decode", 2, stages.children()["worker-0-1"].kill))
    check_undisturbed(answers, one_rank)
    wait_until(lambda: has_recovered(stages), BACK_WITHIN_S, "the service did not recover")


@pytest.mark.long
@pytest.mark.parametrize("phase", ["prefill", "decode", "last"])
@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize("harm", [psutil.Process.kill, psutil.Process.suspend], ids=["kill", "stop"])
def test_streams_survive_every_harm_to_a_stage(
    stages: Service, one_rank: list[Received], name: str, phase: str, harm: Callable[[psutil.Process], None]
) -> None:
    victim = stages.children()[name]
    answers = stream_all(stages.address, SPECS, at_phase(phase, 1, lambda: harm(victim)))
    check_undisturbed(answers, one_rank)
    wait_until(lambda: has_recovered(stages), BACK_WITHIN_S, "the service did not recover")


@pytest.mark.long
@pytest.mark.parametrize("harm", [psutil.Process.kill, psutil.Process.suspend], ids=["kill", "stop"])
def test_stages_of_two_ranks_answer_as_one_and_survive(
    one_rank: list[Received], harm: Callable[[psutil.Process], None]
) -> None:
    with serve(*FOUR, "--speculation", "ngram") as service:
        check_undisturbed(stream_all(service.address, SPECS), one_rank)
        victim = service.children()["worker-0-3"]
        harmed = at_phase("decode", 1, lambda: harm(victim))
        check_undisturbed(stream_all(service.address, SPECS, harmed), one_rank)
        wait_until(lambda: has_recovered(service), BACK_WITHIN_S, "the service did not recover")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize("harm", [psutil.Process.kill, psutil.Process.suspend], ids=["kill", "stop"])
def test_streams_survive_every_harm(
    two: Service, one_rank: list[Received], name: str, seed: int, harm: Callable[[psutil.Process], None]
) -> None:
    victim = two.children()[name]
    answers = stream_all(two.address, SPECS, at_phase("decode", seed, lambda: harm(victim)))
    check_undisturbed(answers, one_rank)
    wait_until(lambda: has_recovered(two), BACK_WITHIN_S, "the service did not recover")


@pytest.mark.long
def test_four_ranks_with_drafts_answer_as_one(one_rank: list[Received]) -> None:
    with serve(*OPTIONS, "--tensor-parallel-size", "4", "--speculation", "ngram") as service:
        check_undisturbed(stream_all(service.address, SPECS), one_rank)


@pytest.mark.long
def test_all_ranks_save_their_parts_of_the_cache_when_the_service_ends(
    one_rank: list[Received], tmp_path: Path
) -> None:
    disk = ("--disk-cache-dir", str(tmp_path), "--disk-cache-bytes", str(1 << 28), "--host-cache-bytes", str(1 << 28))
    for _ in range(2):
        with serve(*TWO, *disk) as service:
            check_undisturbed(stream_all(service.address, SPECS), one_rank)
        own, other = sorted((tmp_path / "engine-0").iterdir())
        saved = {file.name for file in own.glob("*.kv")}
        assert saved and saved == {file.name for file in other.glob("*.kv")}


@dataclasses.dataclass(frozen=True)
class Listening:
    """What processes listen on: addresses of the network, and paths."""

    addresses: set[str]
    paths: set[str]


def listening(service: Service) -> Listening:
    """Reads the sockets of every process of a service."""
    found = Listening(set(), set())
    for process in (psutil.Process(service.process.pid), *service.children().values()):
        with contextlib.suppress(psutil.NoSuchProcess):
            for socket in process.net_connections("inet"):
                if socket.status == psutil.CONN_LISTEN:
                    found.addresses.add(f"{socket.laddr.ip.removeprefix(MAPPED)}:{socket.laddr.port}")
            found.paths.update(str(socket.laddr) for socket in process.net_connections("unix") if socket.laddr)
    return found


def test_a_group_listens_nowhere_else(two: Service) -> None:
    """The gateway's address and files in the private run directory: nothing that the network reaches."""
    wait_until(lambda: has_recovered(two), BACK_WITHIN_S, "the service did not recover")
    found = listening(two)
    assert found.addresses == {two.address}
    run = {path.rpartition("/")[0] for path in found.paths}
    assert len(run) == 1 and "sluice-run-" in run.pop()
    assert {path.rpartition("/")[2] for path in found.paths} >= {"worker-0-0", "worker-0-1", "engine-0"}
