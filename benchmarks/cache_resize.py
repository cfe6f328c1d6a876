"""A service's cache that shrinks and grows under greedy streams: equal tokens, the pause it costs, memory given back.

    python -m benchmarks.cache_resize [--streams 32] [--length 300] [--tokens 49152] [--rounds 3]

Starts the demo service with one engine. First the streams run without a resize, then with a random one every 200 ms:
tokens must be equal, and no stream may fail. Then it shrinks once while they run: the p99 of the time between two
tokens meanwhile over that before, and the share of the bytes behind the limit that the engine's process has less within
two seconds. Figures of a busy machine are ratios of the same run only.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import random
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import sluice
from sluice.v1 import inference_pb2, inference_pb2_grpc

from benchmarks.machine import write
from tests.system.service import Service, serve, spec

INTERVAL_S = 0.2
GIVE_BACK_S = 2.0


def prompts(num: int) -> list[list[int]]:
    """Prompts of 60 to 400 tokens."""
    rng = random.Random(7)
    return [[rng.randrange(3, 250) for _ in range(rng.randrange(60, 400))] for _ in range(num)]


def stream(
    stub: "inference_pb2_grpc.InferenceServiceStub", prompt: list[int], num: int
) -> tuple[list[int], list[float]]:
    """The tokens of one stream, and the times at which messages with tokens came."""
    ids, times = list[int](), list[float]()
    for event in stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec(prompt, num)), timeout=300):
        if event.WhichOneof("event") == "delta":
            times.append(time.monotonic())
            ids += [token.id for token in event.delta.tokens]
    return ids, times


def run(service: Service, num: int, length: int) -> list[tuple[list[int], list[float]]]:
    """Runs all streams at once."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.insecure_channel(service.address, options=options) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with concurrent.futures.ThreadPoolExecutor(num) as threads:
            return list(threads.map(lambda prompt: stream(stub, prompt, length), prompts(num)))


def resize(client: sluice.Client, tokens: int) -> int:
    """Resizes the cache; returns the bytes given back, or -1 if an open request needs more."""
    try:
        return [report.released_bytes for report in client.resize_cache(tokens)][-1]
    except sluice.SluiceError as error:
        if error.reason != "CACHE_IN_USE":
            raise
        return -1


@contextlib.contextmanager
def resizing(address: str, most: int) -> Iterator[list[int]]:
    """Resizes at random every 200 ms until the block ends; the results."""
    is_over, results, rng = threading.Event(), list[int](), random.Random(3)

    def repeat() -> None:
        with sluice.Client(address) as client:
            while not is_over.wait(INTERVAL_S):
                results.append(resize(client, rng.randrange(most // 8, most)))

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield results
    finally:
        is_over.set()
        thread.join()


def rss(pid: int) -> int:
    """Resident bytes of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def p99(times: list[list[float]], since_s: float, until_s: float) -> float:
    """The p99 of the time between two messages of a stream, of those that came within the interval."""
    gaps = [b - a for own in times for a, b in itertools.pairwise(own) if since_s <= b <= until_s]
    return sorted(gaps)[int(len(gaps) * 0.99)] if gaps else 0.0


def shrink(service: Service, num: int, length: int, most: int) -> dict[str, float]:
    """Shrinks once in the middle of streams; the figures."""
    engine = service.children()["engine-0"].pid
    with sluice.Client(service.address) as client:
        resize(client, most)
        run(service, num, length)  # touches the memory
        with concurrent.futures.ThreadPoolExecutor(1) as aside:
            running = aside.submit(run, service, num, length)
            time.sleep(1.0)
            before, start_s = rss(engine), time.monotonic()
            given = resize(client, most // 3)
            took_s = time.monotonic() - start_s
            time.sleep(max(0.0, GIVE_BACK_S - took_s))
            after = rss(engine)
            times = [own for _, own in running.result()]
    alone, meanwhile = p99(times, start_s - 1.0, start_s), p99(times, start_s, start_s + took_s + 0.2)
    return {
        "shrink_s": took_s,
        "released_mib": given / 2**20,
        "rss_less_mib": (before - after) / 2**20,
        "share_back": (before - after) / given if given > 0 else 0.0,
        "gap_p99_before_ms": alone * 1e3,
        "gap_p99_meanwhile_ms": meanwhile * 1e3,
        "gap_p99_ratio": meanwhile / alone if alone else 0.0,
    }


def main() -> None:
    """Run it and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--length", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with serve("--kv-cache-tokens", str(options.tokens), "--kv-cache-max-tokens", str(options.tokens)) as service:
        plain = [ids for ids, _ in run(service, options.streams, options.length)]
        with resizing(service.address, options.tokens) as results:
            again = [ids for ids, _ in run(service, options.streams, options.length)]
        assert again == plain, "tokens differ"
        print(f"{len(results)} resizes ({sum(one < 0 for one in results)} refused): tokens of all streams are equal")
        rounds = [shrink(service, options.streams, options.length, options.tokens) for _ in range(options.rounds)]
    figures = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    command = f"python -m benchmarks.cache_resize --streams {options.streams} --tokens {options.tokens}"
    write("cache_resize", command, {name: round(value, 2) for name, value in figures.items()})


if __name__ == "__main__":
    main()
