"""Two engines on TCP, as on two hosts: one finds the blocks of the other over the network, and does without when it is
lost."""

import contextlib
import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path

from sluice.v1 import inference_pb2, inference_pb2_grpc

from sluice_server.services.gateway.requests.engines import engine_of
from tests.system.roles import ROLES, SLUICE, Roles, free_ports, sluice
from tests.system.service import spec, wait_until

ENGINES = ("engine-0", "engine-1")
PROMPT = [*range(100, 740)]


@contextlib.contextmanager
def two_engines(folder: Path) -> Iterator[Roles]:
    """The four roles, and another engine on another address of the loopback's network."""
    roles = Roles(folder / "keys")
    assert sluice("keys", str(folder / "keys"), ENGINES[1]).returncode == 0
    inbox = f"tcp://127.0.0.2:{free_ports(1)[0]}"
    roles._environment |= {
        "SLUICE_ENGINE_PEERS": f"{ENGINES[0]}={roles._inboxes['engine']},{ENGINES[1]}={inbox}",
        "SLUICE_SHARED_CACHE_BYTES": str(1 << 26),
        "SLUICE_KV_PORT_OFFSET": "1000",
        "SLUICE_KV_CACHE_TOKENS": "8192",
    }
    try:
        for role in ROLES:
            roles.start(role)
        command = [*SLUICE, "serve", "--role", "engine", "--process-id", ENGINES[1], "--inbox", inbox, "--threads", "1"]
        other = subprocess.Popen([*command, "--dtype", "float32", "--model", "demo"], env=roles._environment, text=True)
        roles.processes[ENGINES[1]] = other
        yield roles
    finally:
        for process in roles.processes.values():
            process.kill()
            process.wait()


def answer(stub: inference_pb2_grpc.InferenceServiceStub, ids: list[int], engine: str) -> tuple[str, int]:
    """The text behind a prompt, computed by one engine, and how many of its tokens were cached there."""
    session = next(name for name in map(str, itertools.count()) if engine_of(f"default\0{name}", ENGINES) == engine)
    request = inference_pb2.GenerateRequest(spec=spec(ids, 12, seed=7, temperature=0.9))
    found = stub.Generate(request, timeout=60, metadata=(("x-sluice-session", session),))
    return found.outputs[0].text, found.usage.cached_tokens


def test_blocks_of_another_host_are_found_and_their_loss_costs_no_token(tmp_path: Path) -> None:
    with two_engines(tmp_path) as roles:
        wait_until(roles.is_serving, 120, "the ring did not come up")
        fresh = iter(range(800, 1000))
        with roles.service.stub() as stub:

            def is_found() -> bool:
                """Whether a prompt that one engine has computed is found by the other."""
                ids = [next(fresh), *PROMPT]
                first = answer(stub, ids, ENGINES[0])
                second = answer(stub, ids, ENGINES[1])
                assert first == (second[0], 0)
                return second[1] >= 0.95 * len(ids)

            wait_until(is_found, 60, "nothing is found")
            ids = [next(fresh), *PROMPT]
            text, _ = answer(stub, ids, ENGINES[0])
            roles.processes["engine"].kill()
            assert answer(stub, ids, ENGINES[1])[0] == text
