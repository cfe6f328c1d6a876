"""What an engine counts of its traffic: beside a count of every beginning by hand, on a real small engine."""

import dataclasses
import logging
import random
from pathlib import Path

import pytest

from sluice_server.engine.build import build_engine
from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.kv_cache.block_size import GRAIN, NUM_ENDS, Traffic
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker.startup.identity import Digests
from sluice_server.services.engine import traffic as module
from sluice_server.services.engine.traffic import WRITE_BEATS, TrafficKeeper, TrafficMeter
from tests.oracle.checkpoints import Shape, make_checkpoint

CONFIG = EngineConfig(
    device="cpu", dtype="float32", block_size=32, threads=1, max_num_seqs=4, kv_cache_tokens=2048, max_model_len=256
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), Shape())


@pytest.fixture
def built(checkpoint: Path) -> BuiltEngine:
    model = read_config(checkpoint)
    return build_engine(CONFIG, model, checkpoint, limits_of(CONFIG, model, 1 << 20), digests=lambda: Digests(b"w"))


def request(name: str, prompt: tuple[int, ...], num: int = 1, salt: bytes = b"") -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(max_tokens=num, n=1, ignore_eos=True), cache_salt=salt)


def finish(built: BuiltEngine, meter: TrafficMeter) -> dict[str, tuple[int, ...]]:
    """Computes all requests; the tokens of each."""
    found: dict[str, tuple[int, ...]] = {}
    while built.engine.has_work:
        meter.look()
        for sampled in built.engine.step().sampled:
            meter.follow(sampled)
            found[sampled.request_id] = (*found.get(sampled.request_id, ()), *sampled.token_ids)
    return found


def shared(before: list[tuple[int, ...]], prompt: tuple[int, ...]) -> int:
    """Whole grains with which the prompt begins as one before it, without its last token."""
    most = 0
    for other in before:
        same = next((at for at, (a, b) in enumerate(zip(other, prompt, strict=False)) if a != b), None)
        most = max(most, min(len(other), len(prompt)) if same is None else same)
    return min(most, len(prompt) - 1) // GRAIN


def test_beginnings_are_counted_with_the_outputs_of_others(built: BuiltEngine) -> None:
    rng, meter, before, ends = random.Random(3), TrafficMeter(built), list[tuple[int, ...]](), [0] * NUM_ENDS
    num_tokens = 0
    for at in range(40):
        begun = rng.choice(before)[: rng.randrange(160)] if before and rng.random() < 0.8 else ()
        prompt = (*begun, *(rng.randrange(3, 60) for _ in range(rng.randrange(1, 40))))
        found = shared(before, prompt)
        ends[found % NUM_ENDS] += found > 0
        one = request(f"r{at}", prompt, rng.randrange(1, 40))
        meter.take(one)
        built.engine.add(one)
        tokens = finish(built, meter)[one.request_id]
        before.append((*prompt, *tokens))
        num_tokens += len(before[-1])
    told = meter.traffic()
    assert told.ends == tuple(ends) and sum(ends) > 20
    assert (told.num_requests, told.num_tokens, told.block_size) == (40, num_tokens, 32)
    assert built.store is not None and told.block_bytes == built.store.block_bytes
    assert told.num_hits == built.engine.scheduler.cache.stats.hit_tokens > 0 and told.token_s > 0
    assert 0 < told.unused < 32 / 2048  # one sequence at a time
    assert not meter._outputs and not meter._prompts
    built.close()


def test_tenants_share_nothing_and_what_bypasses_the_cache_counts_only_as_a_request(built: BuiltEngine) -> None:
    meter, prompt = TrafficMeter(built), tuple(range(3, 53))
    meter.take(request("a", prompt, salt=b"1" * 32))
    meter.take(request("b", prompt, salt=b"2" * 32))
    meter.take(dataclasses.replace(request("c", prompt, salt=b"1" * 32), bypasses_cache=True))
    assert sum(meter.traffic().ends) == 0
    meter.take(request("d", prompt, salt=b"1" * 32))
    told = meter.traffic()
    assert told.ends[3] == sum(told.ends) == 1 and told.num_requests == 4
    built.close()


def test_the_last_token_of_a_prompt_is_computed_in_any_case(built: BuiltEngine) -> None:
    meter, prompt = TrafficMeter(built), tuple(range(3, 3 + 2 * GRAIN))
    for name in ("a", "b"):
        meter.take(request(name, prompt))
    assert meter.traffic().ends[1] == sum(meter.traffic().ends) == 1
    built.close()


def test_what_is_kept_is_bounded(built: BuiltEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAINS", 4)
    meter = TrafficMeter(built)
    for at in range(10):
        meter.take(request(f"r{at}", tuple(range(at, at + 3 * GRAIN))))
    assert len(meter._seen) == 4
    built.close()


def test_it_is_kept_now_and_then_and_at_the_end(built: BuiltEngine, caplog: pytest.LogCaptureFixture) -> None:
    meter, kept = TrafficMeter(built), list[Traffic]()
    keeper = TrafficKeeper(meter, kept.append)
    keeper.keep()
    assert kept == []  # nothing to say: what was kept before stays
    meter.take(request("a", (3, 4, 5)))
    for _ in range(2 * WRITE_BEATS):
        keeper.beat()
    keeper.keep()
    assert len(kept) == 3

    def full(traffic: Traffic) -> None:
        raise OSError(28, "No space left on device")

    keeper = TrafficKeeper(meter, full)
    with caplog.at_level(logging.WARNING):
        keeper.keep()
        keeper.keep()
    assert [record.getMessage() for record in caplog.records] == [
        "what the block size is chosen by is not kept: [Errno 28] No space left on device"
    ]
    built.close()
