"""One model over ranks of two hosts: its answers, what it listens on, who may join, and hosts that are lost."""

import contextlib
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import zmq

from benchmarks.streams import Received, at_phase, stream_all, varied
from sluice_server.engine.parallel.messages import Place
from sluice_server.services.ranks.codec import ORDERS
from sluice_server.services.ring.keys import make_keys
from tests.faults.faulty import faults
from tests.faults.hosts import OPTIONS, Hosts, Namespaces, serve_command, two_hosts
from tests.faults.test_faults_kill import check_undisturbed, is_serving, nothing_is_left
from tests.faults.test_faults_ranks import listening
from tests.system.roles import free_ports
from tests.system.service import wait_until
from tests.system.test_system_checkpoints import start

SPECS = varied(16, 48)
A, B = "127.0.0.1", "127.0.0.2"
BACK_WITHIN_S = 90.0
TWO = (*OPTIONS, "--tensor-parallel-size", "2")
FOUR = (*OPTIONS, "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--speculation", "ngram")


def table(*hosts: str) -> dict[str, str]:
    names = ("engine-0", *(f"worker-0-{rank}" for rank in range(1, len(hosts))))
    return {name: f"tcp://{host}:{port}" for name, host, port in zip(names, hosts, free_ports(len(hosts)), strict=True)}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts(TWO, table(A, B), "127.0.0.1:0") as running:
        yield running


def has_recovered(hosts: Hosts) -> bool:
    return is_serving(hosts.service) and nothing_is_left(hosts.service)


def listens(process: psutil.Process) -> set[str]:
    """The addresses of the network that a process listens on."""
    found = process.net_connections("inet")
    return {f"{one.laddr.ip}:{one.laddr.port}" for one in found if one.status == psutil.CONN_LISTEN}


def test_ranks_of_two_hosts_answer_as_one_and_listen_where_told(hosts: Hosts, one_rank: list[Received]) -> None:
    """Beside the addresses told there is one of gloo for each rank, on the rank's own address."""
    check_undisturbed(stream_all(hosts.service.address, SPECS), one_rank)
    ranks = {name: address.removeprefix("tcp://") for name, address in hosts.peers.items()}
    worker = hosts.worker("worker-0-1")
    assert worker is not None
    for name, found, told, host in (
        ("rank 0's host", listening(hosts.service).addresses, {ranks["engine-0"], hosts.service.address}, A),
        ("worker-0-1", listens(worker), {ranks["worker-0-1"]}, B),
    ):
        assert found >= told, name
        assert [one.rpartition(":")[0] for one in found - told] == [host], f"{name} listens on {found}"


def test_who_has_no_key_of_the_group_disturbs_nothing(hosts: Hosts, one_rank: list[Received]) -> None:
    """Neither at the sockets of ranks, in the clear or with a key that the group does not know, nor at gloo's."""
    worker = hosts.worker("worker-0-1")
    assert worker is not None
    strays = (listening(hosts.service).addresses | listens(worker)) - {hosts.service.address}
    assert len(strays) == 4
    with contextlib.ExitStack() as closing:
        context = closing.enter_context(zmq.Context())
        for address in strays:
            plain = closing.enter_context(context.socket(zmq.PUSH))
            plain.linger = 0
            plain.connect(f"tcp://{address}")
            plain.send(ORDERS.encode(Place([0], [], [-1])))
            host, port = address.split(":")
            raw = closing.enter_context(socket.create_connection((host, int(port))))
            raw.sendall(bytes(64))
        check_undisturbed(stream_all(hosts.service.address, SPECS), one_rank)
    assert hosts.worker("worker-0-1") == worker


@pytest.mark.long
def test_streams_survive_the_death_of_a_rank_of_another_host(hosts: Hosts, one_rank: list[Received]) -> None:
    worker = hosts.worker("worker-0-1")
    assert worker is not None
    check_undisturbed(stream_all(hosts.service.address, SPECS, at_phase("decode", 3, worker.kill)), one_rank)
    wait_until(lambda: has_recovered(hosts), BACK_WITHIN_S, "the service did not recover")


@pytest.mark.long
@pytest.mark.parametrize("phase", ["prefill", "decode", "last"])
@pytest.mark.parametrize("name", ["engine-0", "worker-0-1"])
@pytest.mark.parametrize("harm", [psutil.Process.kill, psutil.Process.suspend], ids=["kill", "stop"])
def test_streams_survive_every_harm_to_a_rank_of_either_host(
    hosts: Hosts, one_rank: list[Received], name: str, phase: str, harm: Callable[[psutil.Process], None]
) -> None:
    victim = hosts.worker(name) or hosts.service.children()[name]
    answers = stream_all(hosts.service.address, SPECS, at_phase(phase, 1, lambda: harm(victim)))
    check_undisturbed(answers, one_rank)
    wait_until(lambda: has_recovered(hosts), BACK_WITHIN_S, "the service did not recover")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_stages_of_two_hosts_with_two_ranks_each_answer_as_one_and_survive(one_rank: list[Received]) -> None:
    with two_hosts(FOUR, table(A, A, B, B), "127.0.0.1:0") as hosts:
        check_undisturbed(stream_all(hosts.service.address, SPECS), one_rank)
        for name in ("worker-0-1", "worker-0-2", "worker-0-3"):
            victim = hosts.worker(name) or hosts.service.children()[name]
            check_undisturbed(stream_all(hosts.service.address, SPECS, at_phase("decode", 1, victim.kill)), one_rank)
            wait_until(lambda: has_recovered(hosts), BACK_WITHIN_S, "the service did not recover")


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    if shutil.which("ip") is None:
        pytest.skip("needs ip")
    made = Namespaces()
    try:
        made.make()
        yield made
    except subprocess.CalledProcessError as error:
        pytest.skip(f"may not make network namespaces: {error.stderr!r}")
    finally:
        made.remove()


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("options", [TWO, FOUR], ids=["sums", "stages"])
def test_a_cut_link_is_noticed_and_streams_go_on_once_it_is_mended(
    namespaces: Namespaces, one_rank: list[Received], tmp_path: Path, options: Sequence[str]
) -> None:
    """Both hosts notice within seconds, in a step or between two."""
    num = 2 if options is TWO else 4
    own = [namespaces.addresses[2 * at // num] for at in range(num)]
    within = namespaces.within(0), namespaces.within(1)
    lines = tmp_path / "lines"
    with lines.open("a") as log, two_hosts(options, table(*own), f"unix:{tmp_path}/door", within, log) as hosts:
        service = hosts.service
        check_undisturbed(stream_all(service.address, SPECS), one_rank)
        noticed_s: list[float] = []

        def cut_and_mend() -> None:
            """Cuts the link until both hosts have noticed."""
            before = lines.stat().st_size
            namespaces.set_link("down")

            def told() -> bool:
                new = lines.read_text()[before:]
                return "engine-0 cannot go on" in new and f"worker-0-{num - 1} ERROR this rank ends" in new

            noticed_s.append(wait_until(told, 60, "it was not noticed"))
            namespaces.set_link("up")

        beside = threading.Thread(target=cut_and_mend)
        check_undisturbed(stream_all(service.address, SPECS, at_phase("decode", 3, beside.start)), one_rank)
        beside.join(60)
        wait_until(lambda: has_recovered(hosts), BACK_WITHIN_S, "the service did not recover")
        cut_and_mend()
        wait_until(lambda: has_recovered(hosts), BACK_WITHIN_S, "the service did not recover")
        in_step_s, between_s = noticed_s
        print(f"noticed after {in_step_s:.1f} s in a step, after {between_s:.1f} s between two")


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--ring-keys", "/nowhere"), "--ring-keys: cannot use /nowhere/worker-0-1.key_secret"),
        (("--sum-dtype", "int4"), "--sum-dtype: 'int4' is not one of"),
        (("--ring-keys", ""), "--ring-keys: is needed for tcp://127.0.0.1:1"),
    ],
)
def test_a_worker_that_cannot_be_a_rank_says_why(tmp_path: Path, options: Sequence[str], text: str) -> None:
    make_keys(tmp_path, ("engine-0", "worker-0-1"))
    peers = "engine-0=tcp://127.0.0.1:1,worker-0-1=tcp://127.0.0.2:2"
    command = serve_command(
        "worker", "worker-0-1", (*TWO, "--rank-peers", peers, "--ring-keys", str(tmp_path), *options)
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and text in done.stderr, done.stderr


@pytest.mark.long
def test_a_rank_of_another_build_ends_its_group(tmp_path: Path) -> None:
    make_keys(tmp_path, ("engine-0", "worker-0-1"))
    peers = ",".join(f"{name}={address}" for name, address in table(A, B).items())
    both = (*TWO, "--rank-peers", peers, "--ring-keys", str(tmp_path))
    environment = {**os.environ, **faults(version="9.9.9")}
    worker = subprocess.Popen(serve_command("worker", "worker-0-1", both), env=environment)
    try:
        ended = start(*both, "--listen", f"unix:{tmp_path}/s")
        assert ended.returncode and "rank 1 has another version, 9.9.9; rank 0 has" in ended.stderr
        assert worker.wait(60) == 2
    finally:
        worker.kill()
        worker.wait()
