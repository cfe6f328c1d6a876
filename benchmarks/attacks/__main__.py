"""What a well-behaved neighbour sees while another client attacks: real processes, default settings, no key.

    python -m benchmarks.attacks [--only NAME …] [--seconds 10] [--write]

For each attack: the neighbour alone; with the attack; and with a control that connects to nothing but uses as much of
the processors as the attacker did and the gateway did for it, as all of them share the machine. And the gateway's
memory before, at most, and after; it has a minute to give it back. The attacker is a process of its own with a bounded
rate.
"""

import argparse
import asyncio
import contextlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.attacks import neighbour
from benchmarks.attacks.table import ATTACKS
from benchmarks.gateway_memory import GATEWAY
from benchmarks.gateway_rig import GatewayRig, service
from benchmarks.machine import end_as_asked, write
from tests.services.certificates import Authority

ATTACKER = "benchmarks.attacks.attacker"
STEP_S = 0.001
CALM_S = 60.0
MIB = 1 << 20
SETTLE_S = 1.0


@contextlib.contextmanager
def attackable(over_tls: bool) -> Iterator[tuple[GatewayRig, bytes]]:
    """A service, and the authority of its certificate if it has one."""
    if not over_tls:
        with service(STEP_S) as rig:
            yield rig, b""
        return
    authority = Authority()
    with tempfile.TemporaryDirectory(prefix="bench") as directory:
        certificate, key = authority.issue("gateway").write(Path(directory))
        with service(STEP_S, authority=authority.pem, tls_cert=str(certificate), tls_key=str(key)) as rig:
            yield rig, authority.pem


async def beside(
    rig: GatewayRig, name: str, where: str, seconds: float, num: int = 1, authority: bytes = b""
) -> tuple[dict[str, object], dict[str, float], int]:
    """What the neighbour sees beside `num` processes of the attacker, what the last says, and the gateway's most
    memory."""
    command = [sys.executable, "-m", ATTACKER, name, where, str(seconds + SETTLE_S)]
    processes = [await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE) for _ in range(num)]
    most = rig.rss(GATEWAY)

    async def measure() -> None:
        nonlocal most
        while True:
            most = max(most, rig.rss(GATEWAY))
            await asyncio.sleep(0.05)

    measuring = asyncio.create_task(measure())
    await asyncio.sleep(SETTLE_S)
    try:
        seen = await neighbour.watch(rig.address, seconds, authority)
        said = [(await process.communicate())[0] for process in processes][-1]
    finally:
        measuring.cancel()
    return seen.figures(), json.loads(said or b"{}"), most


async def calm(rig: GatewayRig, most: int) -> float:
    """Seconds until the gateway has no more than `most` bytes, or a minute."""
    start_s = time.monotonic()
    while rig.rss(GATEWAY) > most and time.monotonic() - start_s < CALM_S:
        await asyncio.sleep(0.25)
    return round(time.monotonic() - start_s, 1)


async def attacked(name: str, seconds: float) -> dict[str, object]:
    """One attack on a service of its own."""
    with attackable(ATTACKS[name].over_tls) as (rig, authority):
        await neighbour.watch(rig.address, 2.0, authority)
        before, cpu_s = rig.rss(GATEWAY), rig.cpu_s(GATEWAY)
        alone = (await neighbour.watch(rig.address, seconds, authority)).figures()
        own_cpu_s = rig.cpu_s(GATEWAY) - cpu_s
        cpu_s = rig.cpu_s(GATEWAY)
        during, did, most = await beside(rig, name, rig.address, seconds, authority=authority)
        gateway_cpu_s = rig.cpu_s(GATEWAY) - cpu_s
        calm_s = await calm(rig, 2 * before)
        after = rig.rss(GATEWAY)
        share = (did["cpu_s"] + max(0.0, gateway_cpu_s - own_cpu_s)) / did["seconds"]
        num = max(1, math.ceil(share))
        control, _, _ = await beside(rig, "burn", f"{share / num:.3f}", seconds, num, authority)
    return {
        "does": ATTACKS[name].says,
        "rate": ATTACKS[name].rate,
        "did": did,
        "neighbour_alone": alone,
        "neighbour_attacked": during,
        "neighbour_beside_as_much_cpu": control,
        "cpu_share_of_control": round(share, 2),
        "gateway_cpu_share": {"alone": round(own_cpu_s / seconds, 2), "attacked": round(gateway_cpu_s / seconds, 2)},
        "gateway_mib": {"before": before // MIB, "most": most // MIB, "after": after // MIB, "calm_after_s": calm_s},
    }


def line(name: str, found: dict[str, object]) -> str:
    """One row for people."""
    parts = [found[key] for key in ("neighbour_alone", "neighbour_attacked", "neighbour_beside_as_much_cpu")]
    columns = " | ".join(
        f"{one['p50_ms']}/{one['p99_ms']} fresh {one['fresh_p50_ms']}/{one['fresh_p99_ms']} errors {one['errors']}"
        for one in parts
        if isinstance(one, dict)
    )
    return f"{name} | {columns} | {found['gateway_mib']} | {found['gateway_cpu_share']} | {found['did']}"


def main() -> None:
    """All attacks, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/attacks.json")
    chosen = parser.parse_args()
    end_as_asked()
    figures: dict[str, object] = {}
    for name in chosen.only:
        found = asyncio.run(attacked(name, chosen.seconds))
        figures[name] = found
        print(line(name, found), flush=True)
    if chosen.write:
        write("attacks", "python -m benchmarks.attacks", figures)


if __name__ == "__main__":
    main()
