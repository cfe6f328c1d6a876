"""What a client of the HTTP edge sees while another holds thousands of connections: real processes, default settings.

    python -m benchmarks.attacks.edge [--seconds 10] [--connections 4096] [--write]

The attacker, a process of its own, opens connections, sends one byte on each, and opens another for each that is cut.
"""

import argparse
import asyncio
import contextlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.gateway_rig import service
from benchmarks.machine import end_as_asked, write

STEP_S = 0.001
EVERY_S = 0.02
TIMEOUT_S = 10.0
OPENED_A_SECOND = 1000
SETTLE_S = 5.0
BODY = b'{"model": "demo", "prompt": "a", "max_tokens": 1}'
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
)


@contextlib.contextmanager
def edge(address: str) -> Iterator[int]:
    """A real `sluice edge` in front of `address`; its port."""
    command = [sys.executable, "-m", "sluice_server", "edge", "--address", address, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline().split(" on ")[1].split()[0].rpartition(":")[2])
        finally:
            process.terminate()


async def ask(port: int) -> bool:
    """One request of one token on a fresh connection; whether it was answered."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(REQUEST)
                return b" 200 " in await reader.readline() and b"choices" in await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def watch(port: int, seconds: float) -> dict[str, float]:
    """Ask one after the other for so long: milliseconds, and how many were not answered."""
    taken: list[float] = []
    failed, end_s = 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        start_s = time.monotonic()
        if await ask(port):
            taken.append((time.monotonic() - start_s) * 1e3)
        else:
            failed += 1
        await asyncio.sleep(EVERY_S)
    cuts = statistics.quantiles(taken, n=100) if len(taken) > 1 else [-1.0] * 99
    return {"p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2), "answered": len(taken), "failed": failed}


async def hold(port: int, number: int) -> None:
    """Hold so many connections of one byte each, for ever."""
    open_now = asyncio.Semaphore(number)

    async def one() -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"G")
            await reader.read()
            writer.close()
        except OSError:
            pass
        finally:
            open_now.release()

    tasks: set[asyncio.Task[None]] = set()
    while True:
        await open_now.acquire()
        task = asyncio.create_task(one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(1 / OPENED_A_SECOND)


def main() -> None:
    """The neighbour alone, then beside the attacker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=4096)
    parser.add_argument("--attack", type=int, help="attack this port: what the attacker is started with")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/attacks_edge.json")
    chosen = parser.parse_args()
    end_as_asked()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if chosen.attack:
        return asyncio.run(hold(chosen.attack, chosen.connections))
    with service(STEP_S) as rig, edge(rig.address) as port:
        asyncio.run(watch(port, 2.0))
        alone = asyncio.run(watch(port, chosen.seconds))
        command = [sys.executable, "-m", "benchmarks.attacks.edge", "--attack", str(port)]
        with subprocess.Popen([*command, "--connections", str(chosen.connections)]) as attacker:
            time.sleep(SETTLE_S)
            attacked = asyncio.run(watch(port, chosen.seconds))
            attacker.kill()
    figures: dict[str, object] = {"connections": chosen.connections, "alone": alone, "attacked": attacked}
    print(figures)
    if chosen.write:
        write("attacks_edge", "python -m benchmarks.attacks.edge", figures)


if __name__ == "__main__":
    main()
