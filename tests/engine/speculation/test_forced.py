"""Drafts of what a grammar forces: which tokens, and for which requests."""

import dataclasses
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sluice_server.engine.engine import Engine
from sluice_server.engine.plan import DraftRequest, ProposerMemory
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.sampling.grammars import Grammars
from sluice_server.engine.speculation.forced import ForcedProposer
from sluice_server.services.checkpoint.grammar_ids import grammars_of
from sluice_server.services.messages.work import Constraint, ConstraintForm
from sluice_server.services.tokenizer.grammar_forms import grammar_of
from sluice_server.services.tokenizer.grammar_frames import GrammarJob
from tests.engine.test_engine_oracle import ROOMY, make_engine
from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.tokenizers import byte_level_bpe

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"type": "integer"}, "family_name": {"type": "integer"}},
    "required": ["first_name", "family_name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(tmp_path_factory.mktemp("forced"), Shape(vocab=404, context=4096), seed=1)
    byte_level_bpe(made)
    return made


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(directory: Path) -> Grammars:
    return grammars_of(directory, 404, (EOS,))


def grammar(form: ConstraintForm, source: str) -> str:
    return grammar_of(GrammarJob(Constraint(form, source)))


REGEX = grammar(ConstraintForm.REGEX, "red(green[0-9]blue|yellow)")
PERSON = grammar(ConstraintForm.JSON_SCHEMA, json.dumps(SCHEMA))


def ask(
    tokens: list[int], num_prompt: int, source: str = REGEX, num: int = 64, memory: ProposerMemory | None = None
) -> DraftRequest:
    params = SamplingParams(grammar=source)
    return DraftRequest(tokens, [], params, 0, num, memory or ProposerMemory(), num_prompt=num_prompt)


def test_what_is_forced_is_drafted_as_it_comes(grammars: Grammars, tokenizer: Tokenizer) -> None:
    proposer, memory = ForcedProposer(grammars), ProposerMemory()
    tokens = [7, 7, 7]

    def drafted() -> str:
        (found,) = proposer.propose([ask(tokens, 3, memory=memory)])
        text: str = tokenizer.decode(list(found))
        return text

    def add(text: str) -> None:
        tokens.extend(tokenizer.encode(text, add_special_tokens=False).ids)

    assert drafted() == "red"
    assert drafted() == "red"  # nothing new: the same again
    add("red")
    assert drafted() == ""
    add("g")
    assert drafted() == "reen"
    add("reen7")
    assert drafted() == "blue"
    assert memory.num_read == len(tokenizer.encode("reen7", add_special_tokens=False).ids)
    add("blue")
    (end,) = proposer.propose([ask(tokens, 3, memory=memory)])
    assert [*end] in ([], [EOS])


def test_a_new_matcher_follows_what_was_generated_before(grammars: Grammars, tokenizer: Tokenizer) -> None:
    tokens = [7, 8, *tokenizer.encode("redgreen7", add_special_tokens=False).ids]
    (found,) = ForcedProposer(grammars).propose([ask(tokens, 2)])
    assert tokenizer.decode(list(found)) == "blue"


@pytest.mark.parametrize("num", [1, 2])
def test_no_more_is_drafted_than_asked_for(num: int, grammars: Grammars) -> None:
    (found,) = ForcedProposer(grammars).propose([ask([7], 1, num=num)])
    assert len(found) <= num


def test_nothing_is_drafted_without_a_grammar_that_holds(grammars: Grammars, tokenizer: Tokenizer) -> None:
    proposer = ForcedProposer(grammars)
    left = [7, *tokenizer.encode("blue", add_special_tokens=False).ids]
    asks = [ask([7], 1, ""), ask([7], 1, "no grammar"), ask(left, 1), ask([7], 1)]
    first = [list(one) for one in proposer.propose(asks)]
    assert first[:3] == [[], [], []] and first[3]
    assert [list(one) for one in proposer.propose(asks)] == first
    assert list(ForcedProposer(Grammars(None)).propose([ask([7], 1)])[0]) == []


def run(engine: Engine, request: EngineRequest) -> tuple[list[int], int]:
    """The tokens of a request, and the steps that it took."""
    engine.add(request)
    tokens: list[int] = []
    steps = 0
    while engine.has_work:
        steps += 1
        for event in engine.step().sampled:
            tokens.extend(event.token_ids)
    return tokens, steps


@pytest.mark.parametrize("length", ["adaptive", "fixed"])
def test_a_long_prompt_is_no_reason_against_it(length: str, directory: Path) -> None:
    config = dataclasses.replace(ROOMY, kv_cache_tokens=8192, max_num_batched_tokens=512)
    drafting = make_engine(directory, dataclasses.replace(config, speculation="grammar", draft_length=length))
    params = SamplingParams(max_tokens=80, temperature=1.0, seed=3, grammar=PERSON)
    request = EngineRequest("a", tuple(range(3, 303)) * 10, params)
    wanted, most = run(make_engine(directory, config), request)
    assert run(drafting, request)[0] == wanted
    assert drafting.scheduler.draft_stats.num_accepted > 0 or length == "adaptive"
    assert run(drafting, dataclasses.replace(request, request_id="b"))[1] < most or length == "adaptive"


def test_free_outputs_are_not_drafted_for(directory: Path) -> None:
    engine = make_engine(directory, dataclasses.replace(ROOMY, speculation="grammar", draft_length="fixed"))
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    run(engine, EngineRequest("a", (5, 6, 7), params))
    assert engine.scheduler.draft_stats.num_drafted == 0
    run(engine, EngineRequest("b", (5, 6, 7), SamplingParams(max_tokens=20, grammar=REGEX, temperature=0.0)))
    assert engine.scheduler.draft_stats.num_drafted > 0


def test_white_space_is_drafted_as_the_output_wrote_it_before(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Between what is forced; up to the first token that has letters or digits and is not forced."""
    proposer, memory = ForcedProposer(grammars), ProposerMemory()
    before = tokenizer.encode('{\n "first_name" : 12 ,\n "', add_special_tokens=False).ids
    (first,) = proposer.propose([ask([7, *before], 1, PERSON, memory=memory)])
    assert tokenizer.decode([*first]).startswith('family_name" :')
    (again,) = proposer.propose([ask([7, *before], 1, PERSON, memory=memory)])
    assert [*again] == [*first]  # what was drafted was not taken for generated
    (few,) = proposer.propose([ask([7, *before], 1, PERSON, num=len(first) - 1, memory=memory)])
    assert [*few] == [*first][:-1]
