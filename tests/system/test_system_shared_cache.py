"""Two engines by turns: the second fetches what the first has computed."""

import itertools

from sluice.v1 import inference_pb2

from tests.system.service import serve, spec, wait_until


def test_an_engine_fetches_the_blocks_that_another_has_computed() -> None:
    fresh = itertools.count(1)
    options = ("--engines", "2", "--routing", "round-robin", "--shared-cache-bytes", str(1 << 24))
    with serve(*options, "--dtype", "float32", "--metrics-port", "0") as service, service.stub() as stub:

        def is_found_at_the_other() -> bool:
            """Whether a prompt that is new to both is cached when it comes again, to the other engine."""
            ids = [next(fresh), *range(100, 420)]
            wanted = inference_pb2.GenerateRequest(spec=spec(ids, 4))
            first, second = (stub.Generate(wanted, timeout=60) for _ in range(2))
            assert first.usage.cached_tokens == 0
            assert first.outputs[0].text == second.outputs[0].text
            return second.usage.cached_tokens == len(ids) // 32 * 32

        wait_until(is_found_at_the_other, 60, "the engines do not reach each other's memory")
