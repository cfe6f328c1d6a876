"""Logits processors in an engine: each output as if it ran alone, with everything else on, and failures kept to one."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.plugins.entry_points import find_plugins
from sluice_server.engine.request import EngineRequest, ProcessorCall, SamplingParams
from sluice_server.services.checkpoint.grammar_ids import grammars_of
from tests.engine.test_engine_oracle import ROOMY, TIGHT, named, some_prompts
from tests.oracle.checkpoints import Shape, make_checkpoint, reference
from tests.oracle.tokenizers import byte_level_bpe
from tests.plugins.installed import EXAMPLE, make_biased, write_package

SHAPE = Shape(vocab=404)
FOUND = (
    "[sluice.models]\nBiasedLlamaForCausalLM = sluice_plugin_example.models:BIASED_LLAMA\n[sluice.logits_processors]\n"
)
FOUND += "counting = sluice_plugin_example.processors:Counting\nfailing = sluice_plugin_example.processors:Failing\n"
FOUND += "[sluice.sampling_strategies]\nsecond = sluice_plugin_example.strategies:Second\n"
FOUND += "broken = sluice_plugin_example.strategies:Broken\n"
BY_THREE = (ProcessorCall("counting", (("of", "3"),)),)
BOTH = "counting,failing,second,broken"
DRAFTS = dataclasses.replace(TIGHT, speculation="ngram", draft_length="fixed", max_draft_tokens=4)


@pytest.fixture(scope="module", autouse=True)
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The example package, as if installed."""
    target = write_package(tmp_path_factory.mktemp("site"), "sluice_plugin_example_info", FOUND)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(target)
        patched.syspath_prepend(EXAMPLE)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_checkpoint(tmp_path_factory.mktemp("model"), SHAPE)
    byte_level_bpe(directory)
    return directory


def make_engine(directory: Path, config: EngineConfig, plugins: str = BOTH) -> Engine:
    found = find_plugins(plugins)
    model = read_config(directory, found.models)
    config = dataclasses.replace(config, plugins=plugins)
    limits = limits_of(config, model, 1 << 20, found)
    grammars = (
        grammars_of(directory, model.vocab_size, model.eos_ids) if (directory / "tokenizer.json").exists() else None
    )
    return build_engine(config, model, directory, limits, digests=named, grammars=grammars).engine


def run(
    engine: Engine, asked: dict[str, tuple[list[int], SamplingParams]]
) -> tuple[dict[tuple[str, int], list[int]], dict[str, ServiceError]]:
    """The tokens of every output, and the errors of those that failed."""
    for name, (prompt, params) in asked.items():
        engine.add(EngineRequest(name, tuple(prompt), params))
    found: dict[tuple[str, int], list[int]] = {}
    failed: dict[str, ServiceError] = {}
    while engine.has_work:
        events = engine.step()
        failed |= dict(events.failed)
        for event in events.sampled:
            found.setdefault((event.request_id, event.output_index), []).extend(event.token_ids)
    assert engine.scheduler.cache.pool.num_held == 0
    return found, failed


def params(calls: tuple[ProcessorCall, ...] = (), **more: Any) -> SamplingParams:  # noqa: ANN401 # of SamplingParams' types
    options = {"max_tokens": 14, "temperature": 0.0, "ignore_eos": True, **more}
    return SamplingParams(logits_processors=calls, **options)


@torch.inference_mode()
def counted(directory: Path, prompt: list[int], num: int, of: int, bias: torch.Tensor | None = None) -> list[int]:
    """The definition: the likeliest of the ids that are left, one after the other."""
    oracle, ids = reference(directory), list(prompt)
    for at in range(num):
        logits = oracle(torch.tensor([ids])).logits[0, -1]
        logits = logits if bias is None else logits + bias
        if of:
            logits[torch.arange(len(logits)) % of != at % of] = float("-inf")
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> dict[str, list[int]]:
    """Every second request counts by three, the others are plain."""
    prompts = some_prompts(SHAPE.vocab, 8)
    return {name: counted(checkpoint, one, 14, 3 * (at % 2)) for at, (name, one) in enumerate(prompts.items())}


@pytest.mark.parametrize("config", [ROOMY, TIGHT, DRAFTS], ids=["roomy", "tight", "drafts"])
def test_tokens_are_those_of_the_definition_and_those_of_others_their_own(
    config: EngineConfig, checkpoint: Path, wanted: dict[str, list[int]]
) -> None:
    engine = make_engine(checkpoint, config)
    prompts = some_prompts(SHAPE.vocab, 8)
    asked = {name: (one, params(BY_THREE if at % 2 else ())) for at, (name, one) in enumerate(prompts.items())}
    for _ in range(2):  # the second time behind cached prefixes
        found, failed = run(engine, asked)
        assert not failed and {name: found[name, 0] for name in prompts} == wanted
    assert (engine.scheduler.num_preemptions > 0) is (config is not ROOMY)


def test_each_output_counts_for_itself(checkpoint: Path) -> None:
    many = params(BY_THREE, n=3, temperature=0.9, seed=5, logprobs=1, presence_penalty=0.5)
    alone, _ = run(make_engine(checkpoint, ROOMY), {"a" * 32: ([5, 6, 7], many)})
    crowd = {"a" * 32: ([5, 6, 7], many), "b" * 32: ([5, 6, 7], params())}
    tight, _ = run(make_engine(checkpoint, DRAFTS), crowd)
    for index in range(3):
        ids = alone["a" * 32, index]
        assert [token % 3 for token in ids] == [at % 3 for at in range(14)]
        assert tight["a" * 32, index] == ids
    assert len({tuple(alone["a" * 32, index]) for index in range(3)}) == 3


def test_an_output_goes_on_behind_what_was_received(checkpoint: Path, wanted: dict[str, list[int]]) -> None:
    """As after the death of an engine: what a client has is part of the output that processors see."""
    prompts = some_prompts(SHAPE.vocab, 8)
    name = list(prompts)[3]
    engine = make_engine(checkpoint, TIGHT)
    ids = tuple(wanted[name][:5])
    engine.add(EngineRequest(name, tuple(prompts[name]), params(BY_THREE), resume_ids=(ids,)))
    found, failed = run(engine, {})
    assert not failed and found[name, 0] == wanted[name][5:]


def test_a_grammar_has_the_last_word(checkpoint: Path) -> None:
    grammar = '{"grammars":[{"lark_grammar":"start: /[a-z ]{6,9}/"}]}'
    bound = params(BY_THREE, grammar=grammar, ignore_eos=False, temperature=0.9, seed=1)
    found, failed = run(make_engine(checkpoint, ROOMY), {"a" * 32: ([5, 6, 7], bound)})
    assert not failed
    ids = found["a" * 32, 0]
    assert [token % 3 for token in ids[:-1]] == [at % 3 for at in range(len(ids) - 1)] or ids[-1] in (2,)


@pytest.mark.parametrize("by", [(), (("by", "nan"),), (("by", "-inf"),)])
@pytest.mark.parametrize("config", [ROOMY, DRAFTS], ids=["roomy", "drafts"])
def test_a_processor_that_fails_ends_its_request_and_no_other(
    by: tuple[tuple[str, str], ...], config: EngineConfig, checkpoint: Path, wanted: dict[str, list[int]]
) -> None:
    engine = make_engine(checkpoint, config)
    prompts = some_prompts(SHAPE.vocab, 8)
    fails = ProcessorCall("failing", (("at", "4"), *by))
    asked = {
        name: (one, params((*BY_THREE, fails) if at == 3 else BY_THREE if at % 2 else ()))
        for at, (name, one) in enumerate(prompts.items())
    }
    found, failed = run(engine, asked)
    (name,) = failed
    assert name == list(prompts)[3]
    error = failed[name]
    assert (error.code, error.reason) == (Code.INTERNAL, "LOGITS_PROCESSOR_FAILED")
    assert "logits processor 'failing'" in error.message and "secret" not in error.message
    assert ("RuntimeError" in error.message) is not bool(by)
    assert found[name, 0] == wanted[name][:4]
    assert {one: found[one, 0] for one in prompts if one != name} == {
        one: wanted[one] for one in prompts if one != name
    }


REFUSED = {
    "arguments": (params((ProcessorCall("counting", (("of", "10"),)),)), "'counting' refuses them: 'of' must be 2"),
    "a check that fails": (params((ProcessorCall("failing"),)), "logits processor 'failing' raised KeyError"),
    "an unknown name": (
        params((ProcessorCall("other"),)),
        r"\[0\].name: 'other' is not served; there are counting",
    ),
    "too many": (params(BY_THREE * 9), "has more than the 8 entries"),
    "too long": (
        params((ProcessorCall("counting", (("of", "é" * 2048),)),)),
        r"\[0\].arguments: have 4098 bytes; at most 4096",
    ),
    "beams": (params(BY_THREE, beam_width=2), "beam: a beam search ranks by .* leave logits_processors out"),
    "open inputs": (params(BY_THREE), "logits_processors and a strategy see a whole prompt: leave one of the two"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_a_processor_cannot_be_combined_with_is_refused_by_name(name: str, checkpoint: Path) -> None:
    asked, message = REFUSED[name]
    engine = make_engine(checkpoint, ROOMY)
    with pytest.raises(ServiceError, match=message):
        engine.add(EngineRequest("0" * 32, (3, 4, 5), asked, is_open=name == "open inputs"))
    assert not engine.has_work


def test_without_plugins_a_request_for_one_is_refused(checkpoint: Path) -> None:
    with pytest.raises(
        ServiceError, match=r"logits_processors: this server was started without any \(--plugins\)"
    ) as no:
        make_engine(checkpoint, ROOMY, "").add(EngineRequest("0" * 32, (3,), params(BY_THREE)))
    assert no.value.code is Code.UNIMPLEMENTED


def test_a_model_of_a_plugin_computes_and_names_its_blocks(tmp_path: Path, checkpoint: Path) -> None:
    bias = make_biased(tmp_path, SHAPE)
    with pytest.raises(ServiceError, match="'BiasedLlamaForCausalLM' is not supported"):
        make_engine(tmp_path, ROOMY, "")
    engine = make_engine(tmp_path, TIGHT, "BiasedLlamaForCausalLM,counting")
    prompts = some_prompts(SHAPE.vocab, 4)
    found, _ = run(engine, {name: (one, params()) for name, one in prompts.items()})
    for name, one in prompts.items():
        assert found[name, 0] == counted(checkpoint, one, 14, 0, bias)
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    shutil.copy(tmp_path / "config.json", broken)
    with pytest.raises(ServiceError, match=r"no safetensors file holds the tensor lm_head\.bias"):
        make_engine(broken, TIGHT, "BiasedLlamaForCausalLM")
    plain = make_engine(checkpoint, TIGHT, "BiasedLlamaForCausalLM,counting")
    assert "sluice_plugin_example" in engine.identity.plugin and not plain.identity.plugin
    assert engine.identity.encoded() != dataclasses.replace(engine.identity, plugin="").encoded()


def test_a_model_that_raises_at_load_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_biased(tmp_path, SHAPE)

    def fails(*_: object) -> None:
        raise KeyError("nothing\nelse")

    monkeypatch.setattr("sluice_plugin_example.models.BiasedLlama.__init__", fails)
    said = r"--plugins: 'BiasedLlamaForCausalLM' failed to load the checkpoint: KeyError: "
    with pytest.raises(ServiceError, match=said) as caught:
        make_engine(tmp_path, TIGHT, "BiasedLlamaForCausalLM")
    assert "\n" not in caught.value.message
