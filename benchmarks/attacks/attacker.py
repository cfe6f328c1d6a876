"""The process that attacks, so that its load is its own: prints what it did as JSON.

    python -m benchmarks.attacks.attacker NAME HOST:PORT SECONDS

`burn` connects to nothing: it uses the processor for the share of the time that it is given in place of an address.
"""

import json
import sys
import time

from benchmarks.attacks.http2 import Target
from benchmarks.attacks.table import ATTACKS

TURN_S = 0.002


def burn(share: float, seconds: float) -> None:
    """Use one processor for `share` of the time."""
    end_s = time.monotonic() + seconds
    while (now_s := time.monotonic()) < end_s:
        while time.monotonic() < now_s + TURN_S * share:
            pass
        time.sleep(TURN_S * (1 - share))


def main() -> None:
    """One attack."""
    name, address, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    start_s = time.monotonic()
    if name == "burn":
        burn(min(1.0, float(address)), seconds)
        return
    host, _, port = address.rpartition(":")
    target = Target(host, int(port), start_s + seconds)
    ATTACKS[name].run(target)
    spent = {"sent": target.num_sent, "connections": target.num_connections, "cpu_s": time.process_time()}
    print(json.dumps({**spent, "seconds": time.monotonic() - start_s}))


if __name__ == "__main__":
    main()
