"""Two engines, one of which computes prompts only: long prompts are handed off behind their first token."""

import contextlib
import threading
from collections.abc import Iterator

from sluice.v1 import control_pb2, inference_pb2

from tests.system.service import Service, generate, serve, spec, wait_until

PROMPT = [*range(100, 740)]
OPTIONS = ("--engines", "2", "--prefill-engines", "1", "--routing", "kv-cost", "--shared-cache-bytes", str(1 << 26))


def engines(service: Service) -> dict[str, control_pb2.EngineLoad]:
    with service.control() as control:
        load = control.GetLoad(control_pb2.GetLoadRequest()).load
        return {one.engine_id: one for one in load.engines}


@contextlib.contextmanager
def streams(service: Service, num: int) -> Iterator[None]:
    """So many streams run meanwhile, one after another ends."""
    over = threading.Event()

    def stream() -> None:
        with service.stub() as stub:
            while not over.is_set():
                call = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec([7], 2000)))
                for _ in call:
                    if over.is_set():
                        call.cancel()
                        return

    threads = [threading.Thread(target=stream) for _ in range(num)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_long_prompt_is_handed_off_with_its_blocks() -> None:
    fresh = iter(range(800, 1000))
    told: list[tuple[list[int], str]] = []

    def is_handed_off() -> bool:
        """Whether a prompt that no engine knows is computed by engine-0 and found by engine-1."""
        ids = [next(fresh), *PROMPT]
        before = engines(service)
        told.append((ids, generate(stub, spec(ids, 24, seed=7, temperature=0.9)).text))

        def queried(name: str) -> int:
            return engines(service)[name].prefix_query_tokens - before[name].prefix_query_tokens

        wait_until(lambda: sum(map(queried, before)) >= len(ids), 60, "the engines do not report")
        found = engines(service)["engine-1"].prefix_hit_tokens - before["engine-1"].prefix_hit_tokens
        return queried("engine-0") >= len(ids) and found >= 0.95 * len(ids)

    with serve(*OPTIONS, "--dtype", "float32", "--kv-cache-tokens", "16384") as service, service.stub() as stub:
        wait_until(lambda: engines(service).keys() == {"engine-0", "engine-1"}, 60, "an engine is silent")
        with streams(service, 2):
            wait_until(lambda: engines(service)["engine-1"].running_requests > 0, 60, "no stream runs at engine-1")
            wait_until(is_handed_off, 60, "no prompt is handed off")
        assert engines(service)["engine-0"].routed["prefill"] and engines(service)["engine-1"].routed["hand-off"]
        for ids, text in told:  # at one engine, without a hand-off
            assert generate(stub, spec(ids, 24, seed=7, temperature=0.9)).text == text
