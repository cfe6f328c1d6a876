"""Several outputs against `transformers` and against single ones: n, best of n, beam search, under preemption."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sluice_server.engine.engine import Engine
from sluice_server.engine.request import EngineRequest, FinishReason, SamplingParams
from sluice_server.engine.scheduler.events import Sampled
from tests.engine.test_engine_oracle import ROOMY, make_engine, some_prompts
from tests.oracle.checkpoints import Shape, beams, greedy, make_checkpoint, reference

# 30 blocks of 4 hold little more than one search of the prompts below; steps of 9 tokens cut every prompt.
TIGHT = dataclasses.replace(ROOMY, max_num_seqs=6, max_num_batched_tokens=9, block_size=4, kv_cache_tokens=168)
TIERED = dataclasses.replace(TIGHT, host_cache_bytes=20 * 4096)  # what is evicted or preempted goes to host memory
VOCAB = 31  # small: end-of-sequence turns up, and hypotheses complete at different lengths


@pytest.fixture(
    scope="module",
    params=[Shape("llama", vocab=VOCAB), Shape("mistral", vocab=VOCAB, options=(("sliding_window", 10),))],
)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param.architecture), request.param, seed=3)


def run(engine: Engine, prompts: dict[str, list[int]], **params: object) -> dict[str, dict[int, list[int]]]:
    """Tokens of every output of every prompt; each output and each request ends once.

    Each request has a higher priority than those before, so that a full engine must preempt.
    """
    out: dict[str, dict[int, list[int]]] = {name: {} for name in prompts}
    finished: list[tuple[str, int]] = []
    last: list[str] = []
    to_come = list(prompts)
    while engine.has_work or to_come:
        if to_come:
            name, priority = to_come.pop(0), len(prompts) - len(to_come)
            options = SamplingParams(**{"max_tokens": 12, **params})  # type: ignore[arg-type] # mixed values
            engine.add(EngineRequest(name, tuple(prompts[name]), options, priority))
        for _ in range(4):
            events = engine.step()
            engine.scheduler.check()
            assert not events.failed
            for event in events.sampled:
                _take(out[event.request_id], event)
                finished += [(event.request_id, event.output_index)] * (event.finish is not None)
                last += [event.request_id] * event.is_last
    assert sorted(last) == sorted(prompts)
    assert len(set(finished)) == len(finished) == sum(len(outputs) for outputs in out.values())
    assert engine.scheduler.cache.pool.num_held == 0
    return out


def _take(outputs: dict[int, list[int]], event: Sampled) -> None:
    ids = outputs.setdefault(event.output_index, [])
    assert event.first_index == len(ids)
    ids.extend(event.token_ids)


@pytest.mark.parametrize("options", [{}, {"length_penalty": 0.3}, {"length_penalty": 0.0, "early_stopping": True}])
def test_beams_equal_transformers_with_everything_on(directory: Path, options: dict[str, Any]) -> None:
    prompts = some_prompts(VOCAB, 6)
    oracle = reference(directory)
    want = {name: beams(oracle, prompt, 12, 3, **options) for name, prompt in prompts.items()}
    assert len({len(ids) for found in want.values() for ids in found}) > 1, "no hypothesis ends early"
    for config in (ROOMY, TIGHT, TIERED):
        engine = make_engine(directory, config)
        found = run(engine, prompts, beam_width=3, n=3, temperature=0.0, **options)
        assert {name: [outputs[i] for i in range(3)] for name, outputs in found.items()} == want
        assert config is ROOMY or engine.scheduler.num_preemptions > 0
    tiers = engine.scheduler.cache.tiers
    assert tiers is not None and tiers.stats.num_saved and tiers.stats.num_restored


def test_outputs_of_one_request_are_greedy_alike_and_sampled_apart(directory: Path) -> None:
    prompts = some_prompts(VOCAB, 5)
    oracle = reference(directory)
    want = {name: greedy(oracle, prompt, 12) for name, prompt in prompts.items()}
    tight = make_engine(directory, TIGHT)
    found = run(tight, prompts, n=3, temperature=0.0, ignore_eos=True)
    assert found == {name: {i: ids for i in range(3)} for name, ids in want.items()}
    assert tight.scheduler.num_preemptions > 0
    sampled = run(make_engine(directory, ROOMY), prompts, n=3, temperature=1.0, seed=5, ignore_eos=True)
    assert all(len({tuple(ids) for ids in outputs.values()}) == 3 for outputs in sampled.values())
    assert run(make_engine(directory, TIGHT), prompts, n=3, temperature=1.0, seed=5, ignore_eos=True) == sampled
    alone = run(make_engine(directory, ROOMY), prompts, n=1, temperature=1.0, seed=5, ignore_eos=True)
    assert {name: outputs[0] for name, outputs in alone.items()} == {n: o[0] for n, o in sampled.items()}


def test_best_of_returns_those_with_the_highest_mean(directory: Path) -> None:
    prompts = some_prompts(VOCAB, 3)
    engine = make_engine(directory, ROOMY)
    for name, prompt in prompts.items():
        engine.add(EngineRequest(name, tuple(prompt), SamplingParams(max_tokens=9, n=5, seed=2, logprobs=0)))
    scores: dict[tuple[str, int], list[float]] = {}
    ids: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for event in engine.step().sampled:
            key = (event.request_id, event.output_index)
            scores.setdefault(key, []).extend(one.logprob for one in event.logprobs)
            ids.setdefault(key, []).extend(event.token_ids)
    best = run(make_engine(directory, TIGHT), prompts, max_tokens=9, n=2, best_of=5, seed=2)
    for name in prompts:
        ranked = sorted((k for k in scores if k[0] == name), key=lambda k: -sum(scores[k]) / len(scores[k]))
        assert [best[name][i] for i in range(2)] == [ids[key] for key in ranked[:2]]


def test_a_resumed_output_goes_on_where_it_was_and_repeats_nothing(directory: Path) -> None:
    prompt = some_prompts(VOCAB, 1)["0" * 32]
    params = SamplingParams(max_tokens=12, n=3, seed=8, ignore_eos=True)
    whole = run(make_engine(directory, ROOMY), {"0" * 32: prompt}, n=3, seed=8, ignore_eos=True)["0" * 32]
    engine = make_engine(directory, TIGHT)
    received = (tuple(whole[0][:5]), None, tuple(whole[2]))
    engine.add(EngineRequest("0" * 32, tuple(prompt), params, resume_ids=received))
    events: list[Sampled] = []
    while engine.has_work:
        events += engine.step().sampled
    assert [token for event in events if event.output_index == 0 for token in event.token_ids] == whole[0][5:]
    assert [event.first_index for event in events if event.output_index == 0] == list(range(5, 12))
    ends = [(event.token_ids, event.finish) for event in events if event.output_index == 2]
    assert ends == [((), FinishReason.LENGTH)], "it was complete: only its end is told"
    assert {event.output_index for event in events} == {0, 2}


def test_a_beam_search_that_bypasses_the_cache_names_no_block(directory: Path) -> None:
    engine = make_engine(directory, ROOMY)
    params = SamplingParams(max_tokens=40, beam_width=3, ignore_eos=True)
    engine.add(EngineRequest("a", tuple(range(3, 20)), params, bypasses_cache=True))
    while engine.has_work:
        engine.step()
        assert len(engine.scheduler.cache.index) == 0
