"""Time from rank 0's plan to another rank that has it decoded, over the sockets that a service uses.

Run with `python -m benchmarks.rank_plans`. Both ends read the monotonic clock, which processes of a host share.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.kv_cache.table import BlockRun
from sluice_server.engine.parallel.messages import Launch, Launched, Place
from sluice_server.engine.parallel.options import shape_of
from sluice_server.engine.plan import StepPlan
from sluice_server.services.process.heartbeat import Heartbeat
from sluice_server.services.ranks.codec import ORDERS
from sluice_server.services.ranks.leader import RankGroup
from sluice_server.services.ranks.membership import hello_of
from sluice_server.services.ranks.process import RankProcess
from sluice_server.services.ranks.sockets import RankSockets

ROWS = 32
ROUNDS = 2000
CONFIG = EngineConfig(dtype="float32", tensor_parallel_size=2)


def addresses(directory: str) -> dict[str, str]:
    """Returns the inboxes of both ranks."""
    return {"engine-0": f"ipc://{directory}/0", "worker-0-1": f"ipc://{directory}/1"}


def plan() -> StepPlan:
    """Returns the plan of a decode step."""
    slots = list(range(ROWS))
    starts = [1000 + 7 * i for i in slots]
    return StepPlan(1, slots, [1] * ROWS, starts, [31_000 + i for i in slots], [True] * ROWS, [], [])


def lead(directory: str) -> None:
    """Sends plans as rank 0, each when the one before was answered, and prints how long they took."""
    sockets = RankSockets(addresses(directory), "engine-0", ["worker-0-1"])
    group = RankGroup(sockets, hello_of(CONFIG, 0, 1, "", ""), shape_of(CONFIG))
    group.gather()
    encoded = len(ORDERS.encode(Launch(time.monotonic_ns(), plan(), False, [])))
    taken, turns = [], []
    for num in range(ROUNDS):
        if num % 32 == 0:
            group.send(Place([], [BlockRun(slot, 40, [slot]) for slot in range(ROWS)], []))
        made, sent_ns = plan(), time.monotonic_ns()
        group.send(Launch(sent_ns, made, False, []))
        (answer,) = group.launched(sent_ns)
        turns.append((time.monotonic_ns() - sent_ns) / 1e3)
        taken.append(answer.compute_s * 1e6)
    print(f"a plan of {ROWS} rows, {encoded} bytes, {ROUNDS} times; microseconds, smallest / median / 99th of 100")
    for what, times in (("plan to a rank, decoded", taken), ("and its answer at rank 0", turns)):
        print(
            f"{what:26} {min(times):7.1f} {statistics.median(times):7.1f} {statistics.quantiles(times, n=100)[98]:7.1f}"
        )
    group.close()


def follow(directory: str) -> None:
    """Answers as rank 1 with the seconds since the plan was sent."""
    rank = RankProcess(1, RankSockets(addresses(directory), "worker-0-1", ["engine-0"]), Heartbeat("", "worker-0-1"))
    rank.tell(hello_of(CONFIG, 1, 1, "", ""))
    left = ROUNDS
    for order in rank.orders():
        if isinstance(order, Launch):
            rank.tell(Launched(1, order.num, compute_s=(time.monotonic_ns() - order.num) / 1e9))
            left -= 1
        if not left:
            time.sleep(1)  # the last answer must leave before the process ends
            return


def main() -> None:
    """Runs both ranks."""
    if len(sys.argv) > 1:
        follow(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as directory:
        worker = subprocess.Popen([sys.executable, "-m", "benchmarks.rank_plans", directory])
        try:
            lead(str(Path(directory)))
        finally:
            worker.kill()
            worker.wait()


if __name__ == "__main__":
    main()
