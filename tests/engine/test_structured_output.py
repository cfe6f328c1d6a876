"""Output that follows a JSON Schema, from a model of random weights: valid for any schema, seed and batch."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from sluice_server.engine.engine import Engine
from sluice_server.engine.models.model import Model as LanguageModel
from sluice_server.engine.plan import TokenLogprob
from sluice_server.engine.request import EngineRequest, FinishReason, SamplingParams
from sluice_server.engine.worker.runner import Runner
from sluice_server.kernels.reference.adjust import TokenMask
from sluice_server.services.messages.work import Constraint, ConstraintForm
from sluice_server.services.tokenizer.grammar_forms import grammar_of
from sluice_server.services.tokenizer.grammar_frames import GrammarJob
from tests.engine.test_engine_oracle import ROOMY, make_engine
from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.schemas import SCHEMAS
from tests.oracle.tokenizers import byte_level_bpe

CONFIG = dataclasses.replace(ROOMY, max_num_seqs=16, kv_cache_tokens=16 * 1024)
TIGHT = dataclasses.replace(CONFIG, max_num_batched_tokens=9, kv_cache_tokens=528, admission_watermark=-3.0)
PROMPT = (5, 6, 7, 300)
EOS = 2
HEAT = (1.0, 0.0, 3.0)


@dataclasses.dataclass(frozen=True)
class Model:
    """A checkpoint and its vocabulary."""

    directory: Path
    tokenizer: Tokenizer

    def engine(self, config: Any = CONFIG) -> Engine:  # noqa: ANN401 # an EngineConfig
        return make_engine(self.directory, config)

    def text(self, ids: list[int]) -> str:
        decoded: str = self.tokenizer.decode(ids[:-1] if ids[-1:] == [EOS] else ids)
        return decoded


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    directory = make_checkpoint(tmp_path_factory.mktemp("structured"), Shape(vocab=404, context=1024), seed=1)
    yield Model(directory, byte_level_bpe(directory))


def grammar(form: ConstraintForm, source: str) -> str:
    return grammar_of(GrammarJob(Constraint(form, source)))


def schema_grammar(schema: dict[str, Any]) -> str:
    return grammar(ConstraintForm.JSON_SCHEMA, json.dumps(schema))


def params(**fields: Any) -> SamplingParams:  # noqa: ANN401 # of SamplingParams' types
    return SamplingParams(**{"max_tokens": 900, "temperature": 2.0, **fields})


Outputs = dict[tuple[str, int], tuple[list[int], FinishReason]]


def run(engine: Engine, requests: dict[str, SamplingParams], **fields: Any) -> Outputs:  # noqa: ANN401 # of EngineRequest
    """Ids and end of each output of each request; later requests have higher priority, so a full engine preempts."""
    for priority, (name, asked) in enumerate(requests.items()):
        engine.add(EngineRequest(name, PROMPT, asked, min(priority, 1000), **fields))
    ids: dict[tuple[str, int], list[int]] = {}
    ended: Outputs = {}
    while engine.has_work:
        events = engine.step()
        assert not events.failed
        for event in events.sampled:
            key = (event.request_id, event.output_index)
            ids.setdefault(key, []).extend(event.token_ids)
            if event.finish is not None:
                ended[key] = (ids[key], event.finish)
    engine.scheduler.check()
    return ended


def generate_all(model: Model, num_seeds: int) -> None:
    engine = model.engine()
    asked = {
        f"{name}:{seed}": params(
            seed=seed, grammar=schema_grammar(schema), temperature=(1.0, 0.0, 3.0)[(seed + at) % 3]
        )
        for at, (name, schema) in enumerate(SCHEMAS.items())
        for seed in range(num_seeds)
    }
    ended = run(engine, asked)
    assert len(ended) == len(SCHEMAS) * num_seeds
    for (name, _), (ids, finish) in ended.items():
        schema = SCHEMAS[name.partition(":")[0]]
        assert finish is FinishReason.EOS, (name, model.text(ids))
        jsonschema.validate(json.loads(model.text(ids)), schema, format_checker=jsonschema.FormatChecker())


def test_every_schema_is_followed(model: Model) -> None:
    generate_all(model, 1)


@pytest.mark.long
def test_a_thousand_generations_are_valid(model: Model) -> None:
    generate_all(model, 34)


PERSON = SCHEMAS["person"]
REGEX = r"[a-c]{3,30}-[0-9]{2}"


def test_outputs_of_one_request_follow_it_each_for_itself(model: Model) -> None:
    ended = run(model.engine(), {"r": params(seed=4, n=5, grammar=schema_grammar(PERSON))})
    texts = [model.text(ended["r", index][0]) for index in range(5)]
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


def test_the_best_of_several_follow_it(model: Model) -> None:
    ended = run(model.engine(), {"r": params(seed=4, n=2, best_of=4, grammar=schema_grammar(PERSON))})
    for ids, _ in ended.values():
        jsonschema.validate(json.loads(model.text(ids)), PERSON)
    assert len(ended) == 2


def test_tokens_do_not_depend_on_company_or_preemption(model: Model) -> None:
    """Matchers are rebuilt from the tokens when a sequence comes back, and prompts are cut into chunks."""
    names = ["person", "order", "expression", "array", "unicode-keys", "tree"]
    asked = {
        name: params(seed=at, n=2, grammar=schema_grammar(SCHEMAS[name]), max_tokens=250)
        for at, name in enumerate(names)
    }
    alone: Outputs = {}
    for name in names:
        alone |= run(model.engine(), {name: asked[name]})
    crowded = model.engine(TIGHT)
    together = run(crowded, dict(reversed(asked.items())) | {"free": params(seed=9, max_tokens=120)})
    assert {key: value for key, value in together.items() if key[0] != "free"} == alone
    assert crowded.scheduler.num_preemptions > 0


def test_drafts_change_nothing_but_the_steps(model: Model) -> None:
    names = ["person", "order", "expression", "array", "unicode-keys", "nested-arrays"]
    asked = {name: params(seed=at, n=2, grammar=schema_grammar(SCHEMAS[name])) for at, name in enumerate(names)}
    plain = model.engine()
    drafting = model.engine(dataclasses.replace(CONFIG, speculation="ngram", draft_length="fixed"))
    assert run(plain, asked) == run(drafting, asked)
    assert drafting.stats.num_steps < plain.stats.num_steps


def with_broken_logits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have all logits that are not read be no numbers; returns the numbers of rows of which a part is read, by call."""
    found: list[int] = []

    @torch.inference_mode()
    def wanted_logits(self: LanguageModel, hidden: Tensor, wanted: TokenMask | None) -> Tensor:
        logits = self.logits(hidden)
        if wanted is not None:
            bits = np.unpackbits(wanted.bits.numpy().view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
            logits[wanted.rows] = logits[wanted.rows].masked_fill(torch.from_numpy(bits) == 0, torch.nan)
        found.append(0 if wanted is None else len(wanted.rows))
        return logits

    monkeypatch.setattr(LanguageModel, "wanted_logits", wanted_logits)
    return found


def with_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LanguageModel, "wanted_logits", lambda self, hidden, _: self.logits(hidden))


MANNERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "truncated": {"temperature": 0.9, "top_p": 0.9, "top_k": 20},
    "greedy": {"temperature": 0.0},
    "penalised": {"presence_penalty": 2.0, "repetition_penalty": 1.5, "logit_bias": ((40, 9.0),)},
    "scored": {"logprobs": 3},
    "with ids scored": {"logprobs": 0, "logprob_token_ids": (3, 17)},
}


@pytest.mark.parametrize("speculation", ["none", "grammar", "ngram"])
def test_logits_of_ids_that_a_grammar_forbids_are_not_read(
    model: Model, monkeypatch: pytest.MonkeyPatch, speculation: str
) -> None:
    """But by rows that report log probabilities, and by those that follow none."""
    asked = {
        f"{name}:{manner}": params(seed=at, grammar=schema_grammar(SCHEMAS[name]), max_tokens=60, **fields)
        for at, name in enumerate(["person", "order"])
        for manner, fields in MANNERS.items()
    }
    asked["free"] = params(seed=9, max_tokens=60)
    asked["restricted"] = params(seed=9, max_tokens=60, allowed_token_ids=(30, 40, 50))
    config = dataclasses.replace(CONFIG, speculation=speculation)

    def outputs() -> dict[tuple[str, int], tuple[list[int], list[TokenLogprob]]]:
        engine, found = model.engine(config), dict[tuple[str, int], tuple[list[int], list[TokenLogprob]]]()
        for name, one in asked.items():
            engine.add(EngineRequest(name, PROMPT, one))
        while engine.has_work:
            events = engine.step()
            assert not events.failed
            for event in events.sampled:
                ids, scores = found.setdefault((event.request_id, event.output_index), ([], []))
                ids += event.token_ids
                scores += event.logprobs
        return found

    with monkeypatch.context() as patch:
        with_all_logits(patch)
        expected = outputs()
    assert outputs() == expected
    nums = with_broken_logits(monkeypatch)
    assert outputs() == expected
    assert max(nums) >= 2 * sum("logprobs" not in fields for fields in MANNERS.values())


def fails_in(owner: type, name: str, monkeypatch: pytest.MonkeyPatch, rows_of: Callable[..., int]) -> list[int]:
    """Have every third call that is of several rows raise when it has done its work; calls so far."""
    real, calls = getattr(owner, name), [0]

    def failing(*args: object) -> object:
        done = real(*args)
        calls[0] += rows_of(*args) > 1
        if rows_of(*args) > 1 and calls[0] % 3 == 0:
            raise RuntimeError("a step fails")
        return done

    monkeypatch.setattr(owner, name, failing)
    return calls


@pytest.mark.parametrize("speculation", ["none", "grammar"])
@pytest.mark.parametrize("where", ["forward", "launch"])
def test_steps_that_are_computed_again_change_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch, where: str, speculation: str
) -> None:
    """Steps fail while masks are being filled, and after they are done and the next masks are begun."""
    asked = {
        name: params(seed=at, grammar=schema_grammar(SCHEMAS[name]), max_tokens=40, presence_penalty=0.5)
        for at, name in enumerate(["person", "order", "array"])
    }
    expected = run(model.engine(), asked)
    if where == "forward":
        calls = fails_in(LanguageModel, "forward", monkeypatch, lambda *args: len(args[4].counts))
    else:
        calls = fails_in(Runner, "launch", monkeypatch, lambda _, plan: len(plan.slots))
    assert run(model.engine(dataclasses.replace(CONFIG, speculation=speculation)), asked) == expected
    assert calls[0] > 20


def test_slots_are_taken_from_those_who_followed_another_grammar(model: Model) -> None:
    """Requests are cancelled between two steps; the next ones in their slots get what they would get alone."""
    engine = model.engine(dataclasses.replace(CONFIG, max_num_seqs=2))
    asked = {name: params(seed=3, grammar=schema_grammar(SCHEMAS[name])) for name in ("person", "array")}
    expected = {name: run(model.engine(), {name: one}) for name, one in asked.items()}
    for num_steps in (2, 3, 7):
        for name in ("gone", "also"):
            engine.add(EngineRequest(name, PROMPT, params(seed=9, grammar=schema_grammar(SCHEMAS["order"]))))
        for _ in range(num_steps):
            engine.step()
        assert engine.cancel("gone") and engine.cancel("also")
        assert run(engine, asked) == expected["person"] | expected["array"]


@pytest.mark.parametrize("received", [0, 1, 7, -1])
def test_an_output_goes_on_behind_what_was_received(model: Model, received: int) -> None:
    asked = params(seed=3, n=2, grammar=schema_grammar(PERSON))
    whole = run(model.engine(), {"r": asked})
    had = tuple(tuple(whole["r", index][0][:received]) for index in range(2))
    rest = run(model.engine(), {"r": asked}, resume_ids=had)
    for index in range(2):
        assert [*had[index], *rest["r", index][0]] == whole["r", index][0]


def test_what_was_received_and_does_not_follow_it_fails_that_request_only(model: Model) -> None:
    engine = model.engine()
    wrong = tuple(model.tokenizer.encode("hello").ids)
    engine.add(EngineRequest("w", PROMPT, params(grammar=grammar(ConstraintForm.REGEX, REGEX)), resume_ids=(wrong,)))
    engine.add(EngineRequest("r", PROMPT, params(seed=1, grammar=grammar(ConstraintForm.REGEX, REGEX))))
    failed, ended = [], []
    while engine.has_work:
        events = engine.step()
        failed += events.failed
        ended += [event.request_id for event in events.sampled if event.finish is FinishReason.EOS]
    assert [(name, error.field) for name, error in failed] == [("w", "constraint")] and ended == ["r"]


def test_a_grammar_at_its_end_outweighs_min_tokens(model: Model) -> None:
    asked = params(seed=1, min_tokens=50, grammar=grammar(ConstraintForm.REGEX, "(a|b)c{0,3}"))
    ((ids, finish),) = run(model.engine(), {"r": asked}).values()
    assert finish is FinishReason.EOS and model.text(ids)[1:] == "ccc"  # as long as it may be


def test_an_output_cut_short_is_the_beginning_of_one_that_follows_it(model: Model) -> None:
    asked = params(seed=1, max_tokens=3, grammar=grammar(ConstraintForm.REGEX, "x{40}"))
    ((ids, finish),) = run(model.engine(), {"r": asked}).values()
    assert finish is FinishReason.LENGTH and set(model.text(ids)) == {"x"}


def test_log_probabilities_are_the_models_own(model: Model) -> None:
    """A constraint does not change the reported log probabilities."""
    engine = model.engine()
    engine.add(EngineRequest("r", PROMPT, params(seed=1, logprobs=3, grammar=grammar(ConstraintForm.REGEX, "zz"))))
    ranks = []
    while engine.has_work:
        for event in engine.step().sampled:
            ranks += [logprob.rank for logprob in event.logprobs]
            assert all(len(logprob.top_ids) == 3 for logprob in event.logprobs)
    assert max(ranks) > 3


def test_penalties_and_biases_go_with_it(model: Model) -> None:
    constraint = schema_grammar(PERSON)
    asked = params(seed=1, presence_penalty=2.0, repetition_penalty=1.5, logit_bias=((40, 9.0),), grammar=constraint)
    found = run(model.engine(), {"adjusted": asked, "plain": params(seed=1, grammar=constraint)})
    (adjusted, _), (plain, _) = found["adjusted", 0], found["plain", 0]
    assert adjusted != plain
    jsonschema.validate(json.loads(model.text(adjusted)), PERSON)
