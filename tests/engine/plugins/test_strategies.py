"""Sampling strategies in an engine: each output as the definition has it, with everything else on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.plan import TokenLogprob
from sluice_server.engine.request import EngineRequest, ProcessorCall, SamplingParams
from sluice_server.kernels.reference.philox import uniforms
from tests.engine.plugins.test_sampling_plugins import DRAFTS, FOUND, SHAPE, make_engine, run
from tests.engine.test_engine_oracle import ROOMY, TIGHT, some_prompts
from tests.oracle.checkpoints import make_checkpoint, reference
from tests.oracle.tokenizers import byte_level_bpe
from tests.plugins.installed import EXAMPLE, write_package

HALF = ProcessorCall("second", (("p", "0.5"),))
NUM = 12


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


def params(strategy: ProcessorCall | None = HALF, **more: object) -> SamplingParams:
    options = {"max_tokens": NUM, "ignore_eos": True, "seed": 9, **more}
    return SamplingParams(strategy=strategy, **options)  # type: ignore[arg-type] # of SamplingParams' types


@torch.inference_mode()
def defined(directory: Path, prompt: list[int], output: int = 0, banned: int | None = None) -> list[int]:
    """The definition: the second of the ids that are left where the draw of the position is below one half."""
    oracle, ids = reference(directory), list(prompt)
    for _ in range(NUM):
        logits = oracle(torch.tensor([ids])).logits[0, -1]
        if banned is not None:
            logits[banned] = float("-inf")
        where = torch.tensor([[9], [len(ids)], [output], [SHAPE.vocab]])
        draw = float(uniforms(where[0], where[1], where[2], where[3:]))
        ids.append(int(logits.topk(2).indices[1 if draw < 0.5 else 0]))
    return ids[len(prompt) :]


@pytest.mark.usefixtures("preempts_at_once")
@pytest.mark.parametrize("config", [ROOMY, TIGHT, DRAFTS], ids=["roomy", "tight", "drafts"])
def test_tokens_are_those_of_the_definition_in_any_company(config: EngineConfig, checkpoint: Path) -> None:
    prompts = some_prompts(SHAPE.vocab, 6)
    plain = params(None, temperature=0.0)
    asked = {name: (one, params() if at % 2 else plain) for at, (name, one) in enumerate(prompts.items())}
    alone, _ = run(make_engine(checkpoint, ROOMY), {name: one for name, one in asked.items() if not one[1].strategy})
    engine = make_engine(checkpoint, config)
    for _ in range(2):  # the second time behind cached prefixes
        found, failed = run(engine, asked)
        assert not failed
        for name, (prompt, one) in asked.items():
            assert found[name, 0] == (defined(checkpoint, prompt) if one.strategy else alone[name, 0]), name
    assert (engine.scheduler.num_preemptions > 0) is (config is not ROOMY)


def test_each_output_has_draws_of_its_own_and_what_is_banned_is_not_chosen(checkpoint: Path) -> None:
    prompt, name = [5, 6, 7], "a" * 32
    free = defined(checkpoint, prompt)
    found, failed = run(make_engine(checkpoint, ROOMY), {name: (prompt, params(n=2, bad_token_ids=(free[0],)))})
    assert not failed
    for output in range(2):
        assert found[name, output] == defined(checkpoint, prompt, output, banned=free[0])


def test_log_probabilities_are_those_of_the_chosen_ids(checkpoint: Path) -> None:
    engine, prompt = make_engine(checkpoint, ROOMY), [5, 6, 7]
    engine.add(EngineRequest("a" * 32, tuple(prompt), params(logprobs=2)))
    records: list[TokenLogprob] = []
    ids: list[int] = []
    while engine.has_work:
        for event in engine.step().sampled:
            records += event.logprobs
            ids += event.token_ids
    with torch.inference_mode():
        logits = reference(checkpoint)(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    wanted = logits.log_softmax(-1)
    assert {record.rank for record in records} == {1, 2}
    for at, (record, token) in enumerate(zip(records, ids, strict=True)):
        assert record.logprob == pytest.approx(float(wanted[at, token]), abs=1e-4)
        assert record.top_ids[0] == int(wanted[at].argmax())


def test_a_grammar_holds(checkpoint: Path) -> None:
    grammar = '{"grammars":[{"lark_grammar":"start: /[a-z ]{6,9}/"}]}'
    bound = params(grammar=grammar, ignore_eos=False)
    found, failed = run(make_engine(checkpoint, ROOMY), {"a" * 32: ([5, 6, 7], bound)})
    assert not failed and 3 <= len(found["a" * 32, 0]) <= 10


FAULTS = {
    "raises": ((), "raised RuntimeError"),
    "no id": ((("id", "404"),), "returned 404, which is no id"),
    "below": ((("id", "-1"),), "returned -1, which is no id"),
    "banned": ((("id", "8"),), "chose the id 8, which the request does not allow"),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_strategy_that_fails_ends_its_request_and_no_other(name: str, checkpoint: Path) -> None:
    arguments, said = FAULTS[name]
    asked = {
        "a" * 32: ([5, 6, 7], params(ProcessorCall("broken", arguments), bad_token_ids=(8,))),
        "b" * 32: ([5, 6, 7], params()),
    }
    found, failed = run(make_engine(checkpoint, ROOMY), asked)
    (error,) = failed.values()
    assert (error.code, error.reason) == (Code.INTERNAL, "SAMPLING_STRATEGY_FAILED")
    assert said in error.message and "secret" not in error.message
    assert found == {("b" * 32, 0): defined(checkpoint, [5, 6, 7])}


REFUSED = {
    "arguments": (params(ProcessorCall("second", (("p", "2"),))), "sampling.strategy.arguments: 'second' refuses them"),
    "no number": (params(ProcessorCall("second", (("p", "x"),))), "'second' refuses them: could not convert"),
    "an unknown name": (params(ProcessorCall("counting")), "'counting' is not served; there are second, broken"),
    "temperature": (params(temperature=0.0), "temperature: the sampling strategy 'second' chooses in its place"),
    "top_k": (params(top_k=3), "top_k: the sampling strategy 'second' chooses in its place"),
    "beams": (params(beam_width=2), "beam: a beam search ranks by .* leave the strategy out"),
    "open inputs": (params(), "logits_processors and a strategy see a whole prompt"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_a_strategy_cannot_be_combined_with_is_refused_by_name(name: str, checkpoint: Path) -> None:
    asked, message = REFUSED[name]
    engine = make_engine(checkpoint, ROOMY)
    with pytest.raises(ServiceError, match=message):
        engine.add(EngineRequest("0" * 32, (3, 4, 5), asked, is_open=name == "open inputs"))
    assert not engine.has_work
