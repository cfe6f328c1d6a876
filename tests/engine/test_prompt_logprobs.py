"""Log probabilities of a prompt's tokens against `transformers`, with chunks, cache hits, preemption and other rows."""

import dataclasses
from pathlib import Path

import pytest
import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.plan import TokenLogprob
from sluice_server.engine.request import EngineRequest, SamplingParams
from tests.engine.test_engine_oracle import GEMMA2, ROOMY, make_engine, some_prompts
from tests.oracle.checkpoints import Shape, make_checkpoint, reference

VOCAB = 97
NUM = 3
CHUNKED = dataclasses.replace(ROOMY, max_num_batched_tokens=7, block_size=4)
# Half of Gemma 2's layers give blocks back: the same pool holds more of it.
TIGHT = dataclasses.replace(CHUNKED, max_num_seqs=6, kv_cache_tokens=84, admission_watermark=-3.0)


SHAPES = [Shape("qwen2", vocab=VOCAB, tied=True), Shape("gemma2", vocab=VOCAB, tied=True, options=GEMMA2)]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.architecture)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("scored"), request.param, seed=2)


def expected(directory: Path, prompts: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """The log probabilities at every position of every prompt but the last: [P - 1, V]."""
    model = reference(directory)
    with torch.inference_mode():
        return {name: model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1) for name, ids in prompts.items()}


def scored(
    directory: Path, prompts: dict[str, list[int]], config: EngineConfig, n: int = 1, warm: bool = False
) -> tuple[dict[str, tuple[TokenLogprob, ...]], int]:
    """The scores of each prompt, reported exactly once, and the number of preemptions."""
    engine = make_engine(directory, config)
    asked = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, n=n, prompt_logprobs=NUM)
    if warm:  # others computed the same before
        for name, ids in prompts.items():
            engine.add(EngineRequest(f"warm-{name}", tuple(ids), dataclasses.replace(asked, prompt_logprobs=-1)))
        while engine.has_work:
            engine.step()
    for priority, (name, ids) in enumerate(prompts.items()):
        engine.add(EngineRequest(name, tuple(ids), asked, priority))
    told: dict[str, tuple[TokenLogprob, ...]] = {}
    while engine.has_work:
        events = engine.step()
        assert not events.failed
        for event in events.sampled:
            if event.admission is not None and event.admission.prompt_scores is not None:
                assert event.request_id not in told
                told[event.request_id] = event.admission.prompt_scores
    engine.scheduler.check()
    return told, engine.scheduler.num_preemptions


@pytest.mark.parametrize(
    ("config", "n", "warm"), [(ROOMY, 1, False), (CHUNKED, 3, False), (CHUNKED, 1, True), (TIGHT, 2, True)]
)
def test_they_are_the_models_own(directory: Path, config: EngineConfig, n: int, warm: bool) -> None:
    prompts = some_prompts(VOCAB, 9)
    told, num_preemptions = scored(directory, prompts, config, n, warm)
    assert (num_preemptions > 0) == (config is TIGHT) and told.keys() == prompts.keys()
    for name, logs in expected(directory, prompts).items():
        assert len(told[name]) == len(prompts[name]) - 1
        for token, place, found in zip(prompts[name][1:], logs, told[name], strict=True):
            assert found.logprob == pytest.approx(place[token].item(), abs=1e-3)
            assert found.top_logprobs == pytest.approx(place.topk(NUM).values.tolist(), abs=1e-3)
            assert abs(found.rank - 1 - int((place > place[token]).sum())) <= 1  # near ties


def test_only_the_requests_that_ask_get_them_and_others_reuse_the_blocks(directory: Path) -> None:
    engine = make_engine(directory, CHUNKED)
    ids = tuple(range(1, 40))
    cached = []
    for name, num in (("a", 0), ("b", -1), ("c", 0)):
        engine.add(EngineRequest(name, ids, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=num)))
        while engine.has_work:
            for event in engine.step().sampled:
                if event.admission is not None:
                    assert (event.admission.prompt_scores is None) == (num < 0)
                    cached.append(event.admission.num_cached)
    assert cached == [0, 36, 0]  # a request for them computes its whole prompt
