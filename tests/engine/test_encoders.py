"""Encoders against `transformers`: every family, chunks, batches, pairs, preemption, failing steps, refusals."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.build_encoder import build_encoder
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import OutOfDeviceMemory, ServiceError
from sluice_server.engine.executor.step_retry import StepRetry
from sluice_server.engine.models.encoders.model import Encoder
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.request import EngineRequest, Pooling, SamplingParams
from sluice_server.engine.scheduler.events import Pooled
from tests.oracle.encoders import FAMILIES, VOCAB, make_encoder

WIDE = EngineConfig(device="cpu", dtype="float32", block_size=8, threads=1)
CHUNKED = dataclasses.replace(WIDE, max_num_batched_tokens=7, max_num_seqs=3)
MIDDLE = dataclasses.replace(WIDE, max_num_batched_tokens=40)
CONFIGS = {"wide": WIDE, "chunked": CHUNKED, "middle": MIDDLE}
LENGTHS = (1, 2, 9, 17, 33, 62, 64)
CLASSIFIER = "ForSequenceClassification"


def make_engine(directory: Path, config: EngineConfig = WIDE) -> Engine:
    model = read_served(directory)
    return build_encoder(config, model, directory, limits_of(config, model, 1 << 20)).engine


def some_inputs() -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(8)
    return {
        f"{num}-{copy}": torch.randint(0, VOCAB, (num,), generator=generator).tolist()
        for num in LENGTHS
        for copy in range(2)
    }


def run(
    engine: Engine, inputs: dict[str, list[int]], pooling: Pooling, num_first: int | None = None
) -> dict[str, torch.Tensor]:
    """The vector of every input, all sent at once; each ends once."""
    for name, ids in inputs.items():
        first = None if num_first is None else min(num_first, len(ids))
        engine.add(EngineRequest(name, tuple(ids), SamplingParams(), pooling=pooling, num_first=first))
    found: dict[str, torch.Tensor] = {}
    while engine.has_work:
        events = engine.step()
        engine.scheduler.check()
        assert not events.failed
        for event in events.pooled:
            assert event.request_id not in found
            found[event.request_id] = vector(event)
    assert found.keys() == inputs.keys() and engine.scheduler.cache.pool.num_held == 0
    return found


def vector(event: Pooled) -> torch.Tensor:
    return torch.frombuffer(bytearray(event.vector), dtype=torch.float32)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5), (got - want).abs().max()


POOLED: dict[Pooling, Callable[[torch.Tensor], torch.Tensor]] = {
    Pooling.FIRST: lambda states: states[0],
    Pooling.LAST: lambda states: states[-1],
    Pooling.MEAN: lambda states: states.mean(0),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_the_models_own(tmp_path: Path, family: str) -> None:
    oracle, inputs = make_encoder(tmp_path, family), some_inputs()
    states = {name: oracle.states(ids) for name, ids in inputs.items()}
    for config in CONFIGS.values():
        engine = make_engine(tmp_path, config)
        for pooling, take in POOLED.items():
            found = run(engine, inputs, pooling)
            for name in inputs:
                assert_close(found[name], take(states[name]))


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_classes_are_the_models_own(tmp_path: Path, family: str, num_labels: int) -> None:
    oracle, inputs = make_encoder(tmp_path, family, CLASSIFIER, num_labels=num_labels), some_inputs()
    for config in (WIDE, CHUNKED):
        engine = make_engine(tmp_path, config)
        for num_first in (None, 6):  # only BERT tells the texts of a pair apart
            found = run(engine, inputs, Pooling.CLASSES, num_first)
            for name, ids in inputs.items():
                assert found[name].shape == (num_labels,)
                assert_close(found[name], oracle.classes(ids, num_first))


def test_types_of_a_pair_change_what_bert_computes(tmp_path: Path) -> None:
    """Else the test above could not fail."""
    oracle = make_encoder(tmp_path, "Bert", CLASSIFIER, num_labels=1)
    ids = some_inputs()["17-0"]
    assert (oracle.classes(ids) - oracle.classes(ids, 6)).abs().max() > 1e-3


def test_a_head_may_read_the_mean(tmp_path: Path) -> None:
    oracle = make_encoder(tmp_path, "ModernBert", CLASSIFIER, num_labels=2, classifier_pooling="mean")
    inputs = some_inputs()
    found = run(make_engine(tmp_path), inputs, Pooling.CLASSES)
    for name, ids in inputs.items():
        assert_close(found[name], oracle.classes(ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_masked_language_models_are_served_for_vectors(tmp_path: Path, family: str) -> None:
    oracle, inputs = make_encoder(tmp_path, family, "ForMaskedLM"), some_inputs()
    found = run(make_engine(tmp_path), inputs, Pooling.MEAN)
    for name, ids in inputs.items():
        assert_close(found[name], oracle.states(ids).mean(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_company(tmp_path: Path, family: str, dtype: str) -> None:
    make_encoder(tmp_path, family, CLASSIFIER, num_labels=2, **_wide(family))
    config = dataclasses.replace(WIDE, dtype=dtype, batch_invariant=True)
    inputs = some_inputs()
    for pooling in (Pooling.FIRST, Pooling.MEAN, Pooling.CLASSES):
        together = run(make_engine(tmp_path, config), inputs, pooling)
        pairs = run(make_engine(tmp_path, dataclasses.replace(config, max_num_batched_tokens=50)), inputs, pooling)
        alone = make_engine(tmp_path, config)
        for name, ids in inputs.items():
            single = run(alone, {name: ids}, pooling)[name]
            assert torch.equal(single, together[name]) and torch.equal(single, pairs[name]), name


def _wide(family: str) -> dict[str, Any]:
    """An MLP whose rows do not fill vectors, so that loops over several rows would show."""
    return {"hidden_dim" if family == "DistilBert" else "intermediate_size": 1037}


def test_vectors_in_bfloat16_are_close(tmp_path: Path) -> None:
    oracle, inputs = make_encoder(tmp_path, "Bert"), some_inputs()
    found = run(make_engine(tmp_path, dataclasses.replace(WIDE, dtype="bfloat16")), inputs, Pooling.MEAN)
    for name, ids in inputs.items():
        assert torch.cosine_similarity(found[name], oracle.states(ids).mean(0), dim=0) > 0.999


def test_an_input_that_is_preempted_is_computed_whole(tmp_path: Path) -> None:
    """Requests of a higher priority take the slot of one that has some chunks computed."""
    oracle, inputs = make_encoder(tmp_path, "Roberta"), some_inputs()
    config = dataclasses.replace(CHUNKED, max_num_seqs=1, scheduling_policy="priority")
    engine = make_engine(tmp_path, config)
    long, short = inputs["64-0"], inputs["9-0"]
    engine.add(EngineRequest("long", tuple(long), SamplingParams(), pooling=Pooling.MEAN))
    engine.step()
    engine.add(EngineRequest("short", tuple(short), SamplingParams(), pooling=Pooling.MEAN, priority=900))
    found: dict[str, torch.Tensor] = {}
    while engine.has_work:
        found |= {one.request_id: vector(one) for one in engine.step().pooled}
    assert engine.scheduler.num_preemptions == 1 and list(found) == ["short", "long"]
    assert_close(found["long"], oracle.states(long).mean(0))
    assert_close(found["short"], oracle.states(short).mean(0))


@pytest.mark.parametrize("config", [WIDE, CHUNKED], ids=["wide", "chunked"])
def test_a_step_that_fails_once_is_computed_again(
    tmp_path: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, inputs = make_encoder(tmp_path, "Bert"), some_inputs()
    engine, whole = make_engine(tmp_path, config), StepRetry.result

    def again(self: StepRetry) -> object:
        self._pending = None  # as if the launch had failed after it was computed
        return whole(self)

    monkeypatch.setattr(StepRetry, "result", again)
    found = run(engine, inputs, Pooling.MEAN)
    for name, ids in inputs.items():
        assert_close(found[name], oracle.states(ids).mean(0))


def test_an_input_for_which_memory_is_short_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, inputs = make_encoder(tmp_path, "Bert"), some_inputs()
    engine, forward = make_engine(tmp_path), Encoder.forward

    def short(self: Encoder, given: Any) -> list[torch.Tensor]:  # noqa: ANN401 # its inputs
        if any(len(one.ids) > 60 for one in given):
            raise OutOfDeviceMemory
        return forward(self, given)

    monkeypatch.setattr(Encoder, "forward", short)
    failed: list[str] = []
    found: dict[str, torch.Tensor] = {}
    for name, ids in inputs.items():
        engine.add(EngineRequest(name, tuple(ids), SamplingParams(), pooling=Pooling.MEAN))
    while engine.has_work:
        events = engine.step()
        failed += [name for name, _ in events.failed]
        found |= {one.request_id: vector(one) for one in events.pooled}
    assert sorted(failed) == ["62-0", "62-1", "64-0", "64-1"] and len(found) == len(inputs) - 4
    for name, got in found.items():
        assert_close(got, oracle.states(inputs[name]).mean(0))


def test_a_vector_without_usable_numbers_fails_its_request_alone(tmp_path: Path) -> None:
    make_encoder(tmp_path, "Bert")
    engine = make_engine(tmp_path)
    engine.runner._model._words[5] = math.nan  # type: ignore[attr-defined] # its own runner
    for name, ids in (("bad", (1, 5)), ("good", (1, 2))):
        engine.add(EngineRequest(name, ids, SamplingParams(), pooling=Pooling.LAST))
    events = engine.step()
    assert [name for name, _ in events.failed] == ["bad"] and [one.request_id for one in events.pooled] == ["good"]


@pytest.mark.parametrize(("family", "most"), [("Bert", 66), ("Roberta", 64), ("MPNet", 64), ("ModernBert", 66)])
def test_an_input_may_fill_the_context(tmp_path: Path, family: str, most: int) -> None:
    oracle = make_encoder(tmp_path, family)
    engine = make_engine(tmp_path, CHUNKED)
    inputs = {str(num): [(7 * i + 3) % VOCAB for i in range(num)] for num in (1, most - 1, most)}
    for name, got in run(engine, inputs, Pooling.MEAN).items():
        assert_close(got, oracle.states(inputs[name]).mean(0))
    with pytest.raises(ServiceError, match=f"prompt has {most + 1} tokens; this model allows {most}"):
        engine.add(EngineRequest("more", (1,) * (most + 1), SamplingParams(), pooling=Pooling.MEAN))
    assert not engine.has_work


def test_the_length_of_sentence_transformers_is_the_models(tmp_path: Path) -> None:
    make_encoder(tmp_path, "Bert")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20, "do_lower_case": False}))
    assert read_served(tmp_path).context_length == 20
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 2000}))
    assert read_served(tmp_path).context_length == 66


def test_old_names_of_norms_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    oracle, inputs = make_encoder(tmp_path, "Bert"), some_inputs()
    path = tmp_path / "model.safetensors"
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): one
        for name, one in load_file(path).items()
    }
    save_file(old, path, metadata={"format": "pt"})
    found = run(make_engine(tmp_path), inputs, Pooling.MEAN)
    for name, ids in inputs.items():
        assert_close(found[name], oracle.states(ids).mean(0))
