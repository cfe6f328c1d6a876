"""Measures how fast cache blocks travel between two hosts, and what a cut link costs: two network namespaces, as root.

    python -m benchmarks.kv_network [--mbit 1000] [--blocks 512] [--kib 64] [--rounds 5] [--nixl]

The link has the rate that `tc` gives it. A round asks for all blocks and reads them in their order, as an engine does.
Last, the link is cut in the midst of a round: the reader must be done at its deadline. When it is mended, all blocks
come again. `--nixl`: the reader reads the owner's memory by NIXL (the extra `nixl`).
"""

import argparse
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sluice_server.engine.kv_cache.shared_slots import SharedSlots
from sluice_server.services.ring.keys import load_keys, make_keys
from sluice_server.services.transfer.by_nixl import read_by_nixl
from sluice_server.services.transfer.names import MAX_NAMES
from sluice_server.services.transfer.network import NetworkCarrier
from tests.faults.hosts import Namespaces

LAYOUT = b"benchmark"
OWNER, READER = "engine-0", "engine-1"
WAIT_S = 60.0
DEADLINE_S = 0.25


def say(**figures: object) -> None:
    """Prints figures at once."""
    print(json.dumps(figures), flush=True)


def carrier(  # what a connection is made of
    keys: str, name: str, places: dict[str, str], size: int, num: int, *, nixl: bool
) -> tuple[SharedSlots, NetworkCarrier]:
    """Returns one engine's end."""
    slots, own = SharedSlots(num, size, LAYOUT), load_keys(keys, name)
    assert own is not None
    others = {other: place for other, place in places.items() if other != name}
    made = NetworkCarrier(places[name], others, slots, LAYOUT, size, own)
    if nixl:
        read_by_nixl(made, name, places[name], size)
    return slots, made


def names_of(num: int) -> list[bytes]:
    """Returns the names of the blocks."""
    return [at.to_bytes(32, "little") for at in range(1, num + 1)]


def give(keys: str, places: dict[str, str], size: int, num: int, *, nixl: bool) -> None:
    """Offers blocks until standard input ends."""
    slots, made = carrier(keys, OWNER, places, size, num, nixl=nixl)
    for at, name in enumerate(names_of(num)):
        slots.write(at, name, secrets.token_bytes(size))
    print("ready", flush=True)
    sys.stdin.read()
    made.close()


def read(source: NetworkCarrier, names: list[bytes], seconds: float) -> tuple[int, float]:
    """Reads blocks for so long at most; returns how many came, and the seconds that took."""
    start_s = time.monotonic()
    end_s, num = start_s + seconds, 0
    for first in range(0, len(names), MAX_NAMES):
        some = names[first : first + MAX_NAMES]
        found = source.find(some, end_s)
        source.begin([name for name in some if name in found], end_s)
        num += sum(found[name]() is not None for name in some if name in found)
        source.release(list(found))
    return num, time.monotonic() - start_s


def take(keys: str, places: dict[str, str], size: int, num: int, rounds: int, *, nixl: bool) -> None:
    """Reads all blocks, round after round, and prints the rates; then says so, and reads once more, and again."""
    _, made = carrier(keys, READER, places, size, 1, nixl=nixl)
    names, end_s = names_of(num), time.monotonic() + WAIT_S
    while read(made, names[-1:], 1.0)[0] == 0 and time.monotonic() < end_s:
        time.sleep(0.1)
    rates = []
    for _ in range(rounds):
        came, took_s = read(made, names, WAIT_S)
        assert came == num, f"{came} of {num}"
        rates.append(num * size / took_s / 1e6)
    say(mb_per_s=[round(rate, 1) for rate in rates], median=round(statistics.median(rates), 1))
    sys.stdin.readline()
    came, took_s = read(made, names * 4, DEADLINE_S)
    say(came=came, of=4 * num, done_after_s=round(took_s, 3), deadline_s=DEADLINE_S)
    sys.stdin.readline()
    end_s = time.monotonic() + WAIT_S
    while (came := read(made, names, 5.0)[0]) < num and time.monotonic() < end_s:
        time.sleep(0.1)
    say(came_when_mended=came)
    made.close()


class End:
    """A program in one of the namespaces, which is told things and says others, until the block ends."""

    def __init__(self, command: list[str], closing: contextlib.ExitStack) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process: subprocess.Popen[str] = subprocess.Popen(command, **pipes)  # type: ignore[call-overload] # mixed
        closing.callback(self._process.wait)
        closing.callback(self._process.kill)

    def said(self) -> str:
        """Returns what it says next. Raises SystemExit if it has ended: it has written why."""
        assert self._process.stdout is not None
        line: str = self._process.stdout.readline()
        if not line:
            raise SystemExit("an end of the connection has ended")
        return line.strip()

    def go_on(self) -> None:
        """Tells it to go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()


def play(spaces: Namespaces, own: tuple[str, ...]) -> None:
    """Runs both ends, and prints what the reader says; cuts the link and mends it in between."""
    with contextlib.ExitStack() as closing:
        giver, taker = (
            End([*spaces.within(at), *own, "--end", end], closing) for at, end in enumerate(("give", "take"))
        )
        giver.said()
        print(taker.said(), flush=True)
        taker.go_on()
        time.sleep(DEADLINE_S / 3)
        spaces.set_link("down")
        print(taker.said(), flush=True)
        spaces.set_link("up")
        taker.go_on()
        print(taker.said(), flush=True)


def main() -> None:
    """Make the namespaces, and run both ends in them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--kib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nixl", action="store_true", help="read by NIXL")
    parser.add_argument("--end", choices=("give", "take"), help=argparse.SUPPRESS)
    parser.add_argument("--keys", help=argparse.SUPPRESS)
    options = parser.parse_args()
    spaces = Namespaces()
    places = {OWNER: f"tcp://{spaces.addresses[0]}:7100", READER: f"tcp://{spaces.addresses[1]}:7100"}
    sizes = options.kib << 10, options.blocks
    if options.end == "give":
        give(options.keys, places, *sizes, nixl=options.nixl)
        return
    if options.end == "take":
        take(options.keys, places, *sizes, options.rounds, nixl=options.nixl)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # behind what removes the namespaces
    os.environ.setdefault("UCX_TLS", "tcp,self")  # both ends are on one host here, and it would notice
    with tempfile.TemporaryDirectory() as keys:
        make_keys(Path(keys), (OWNER, READER))
        shape = ("--blocks", str(options.blocks), "--kib", str(options.kib), "--rounds", str(options.rounds))
        way = ("--nixl",) if options.nixl else ()
        own = (sys.executable, "-m", "benchmarks.kv_network", "--keys", keys, *shape, *way)
        try:
            spaces.make()
            rate = ("root", "tbf", "rate", f"{options.mbit}mbit", "burst", "256kb", "latency", "50ms")
            inside = ("tc", "qdisc", "add", "dev", spaces.links[0], *rate)
            subprocess.run([*spaces.within(0), *inside], check=True)
            play(spaces, own)
        finally:
            spaces.remove()


if __name__ == "__main__":
    main()
