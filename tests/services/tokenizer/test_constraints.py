"""Constraints in every form become grammars; wrong ones are refused by field and position, slow ones at a time limit,
and the next one is served."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from llguidance import LLMatcher, LLTokenizer

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.sampling.grammars import compile_grammar
from sluice_server.services.checkpoint.grammar_ids import load_tokenizer
from sluice_server.services.messages.work import Constraint, ConstraintForm
from sluice_server.services.process.background import NICENESS
from sluice_server.services.tokenizer import constraints as constraints_module
from sluice_server.services.tokenizer.child_pool import CpuTimeLimit
from sluice_server.services.tokenizer.constraints import Constraints
from sluice_server.services.tokenizer.grammar_frames import GrammarJob, Reasoning
from tests.oracle.tokenizers import byte_level_bpe, unigram

VOCAB, EOS = 420, 1
SCHEMA, REGEX, GRAMMAR = ConstraintForm.JSON_SCHEMA, ConstraintForm.REGEX, ConstraintForm.GRAMMAR
ENDLESS = 'root ::= x{1000}\nx ::= y{1000}\ny ::= "a"{1000}'


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    byte_level_bpe(directory)
    return directory / "tokenizer.json"


@pytest.fixture(scope="module")
def constraints(path: Path) -> Iterator[Constraints]:
    constraints = Constraints(path, VOCAB, (EOS,), 2, CpuTimeLimit(job_s=0.5))
    yield constraints
    constraints.close()


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> LLTokenizer:
    tokenizer = load_tokenizer(path, VOCAB, (EOS,))
    assert tokenizer is not None
    return tokenizer


def job(form: ConstraintForm, source: object = "", choices: tuple[str, ...] = ()) -> GrammarJob:
    return GrammarJob(Constraint(form, source if isinstance(source, str) else json.dumps(source), choices))


def accepts(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether the text follows the grammar, whole."""
    matcher: LLMatcher = compile_grammar(tokenizer, grammar)
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


def refusal(constraints: Constraints, asked: GrammarJob) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        constraints.compile(asked)
    assert len(caught.value.message) < 500
    return caught.value


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (job(SCHEMA, {"type": "integer"}), ["7", "-12"], ["7.5", '"7"', ""]),
        (job(SCHEMA, {"type": "object"}), ["{}", '{"a":\n  [1, null]}', '{"é" : {}}'], ["[]", "{", '{"a":      1}']),
        (job(SCHEMA, "true"), ["3", "[]"], ["x"]),
        (job(REGEX, r'a/b"\d+'), ['a/b"12'], ['a/b"', 'xa/b"1', 'a/b"1x']),
        (job(REGEX, "é\n?"), ["é", "é\n"], ["e"]),
        (job(REGEX, r"(x+x+)+y"), ["xxxy"], ["xy"]),  # which takes other engines for ever
        (job(GRAMMAR, 'root ::= "a" root | end\nend ::= [^x-z\\]]'), ["aab", "q"], ["ax", "a]"]),
        (job(GRAMMAR, 'root ::= "\\u0041\\u00e9" [\\u4e00-\\u9fff]'), ["Aé日"], ["Aéx"]),
        (job(ConstraintForm.CHOICE, choices=("yes", 'n"o', "日本\\")), ["yes", 'n"o', "日本\\"], ["y", "yesyes"]),
    ],
)
def test_every_form_is_followed(
    constraints: Constraints, tokenizer: LLTokenizer, asked: GrammarJob, good: list[str], bad: list[str]
) -> None:
    grammar = constraints.compile(asked)
    assert [accepts(tokenizer, grammar, text) for text in good] == [True] * len(good)
    assert [accepts(tokenizer, grammar, text) for text in bad] == [False] * len(bad)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "foo"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a/~": schema}}
    return schema


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        (job(SCHEMA, '{"type":'), Code.INVALID_ARGUMENT, "not JSON: Expecting value (at line 1, column 9)"),
        (job(SCHEMA, "[1]"), Code.INVALID_ARGUMENT, "must be an object"),
        (job(SCHEMA, nested(0)), Code.INVALID_ARGUMENT, "Invalid type: foo"),
        (job(SCHEMA, nested(2)), Code.INVALID_ARGUMENT, "(at /properties/a~1~0/properties/a~1~0)"),
        (job(SCHEMA, {"items": {"anyOf": [{}, {"type": "x"}]}}), Code.INVALID_ARGUMENT, "(at /items/anyOf/1)"),
        (job(SCHEMA, {"$ref": "#/$defs/x"}), Code.INVALID_ARGUMENT, "'/$defs/x' does not exist"),
        (job(SCHEMA, {"$ref": "http://a.b/c"}), Code.INVALID_ARGUMENT, "a.b"),
        (job(SCHEMA, {"enum": []}), Code.INVALID_ARGUMENT, "Unsatisfiable"),
        (job(SCHEMA, {"items": {"not": {}}}), Code.UNIMPLEMENTED, '"not"] (at /items)'),
        (job(SCHEMA, '{"a":' * 9000 + "1" + "}" * 9000), Code.INVALID_ARGUMENT, "too complex"),
        (job(SCHEMA, nested(300)), Code.INVALID_ARGUMENT, "too complex"),
        (job(REGEX, "ab(c"), Code.INVALID_ARGUMENT, "unclosed group (at character 3)"),
        (job(REGEX, r"(a)\1"), Code.INVALID_ARGUMENT, "backreferences are not supported (at character 4)"),
        (job(REGEX, "(" * 8000 + ")" * 8000), Code.INVALID_ARGUMENT, "nested"),
        (job(GRAMMAR, "root ::= foo"), Code.INVALID_ARGUMENT, "Rule 'foo' not found"),
        (job(GRAMMAR, 'root ::= "a'), Code.INVALID_ARGUMENT, "line 1"),
        (job(GRAMMAR, 'x ::= "a"'), Code.INVALID_ARGUMENT, "root"),
        (job(GRAMMAR, "root ::= " + "(" * 9000), Code.INVALID_ARGUMENT, "too complex"),
    ],
    ids=range(18),
)
def test_what_is_wrong_is_refused_where_it_is_and_the_next_is_served(
    constraints: Constraints, asked: GrammarJob, code: Code, words: str
) -> None:
    error = refusal(constraints, asked)
    assert asked.constraint is not None and error.field == f"constraint.{asked.constraint.form}"
    assert error.code is code and words in error.message
    assert constraints.compile(job(REGEX, f"a{{{len(words)}}}"))


def test_time_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints_module, "MEMORY_BYTES", 4 << 30)  # a fast machine fills the usual ones sooner
    constraints = Constraints(path, VOCAB, (EOS,), 1, CpuTimeLimit(job_s=0.1))
    try:
        error = refusal(constraints, job(GRAMMAR, ENDLESS))
        assert error.code is Code.INVALID_ARGUMENT and "did not compile within 0.1 s" in error.message
        assert constraints.compile(job(REGEX, "a"))
    finally:
        constraints.close()


def test_memory_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints_module, "MEMORY_BYTES", 4 << 20)
    constraints = Constraints(path, VOCAB, (EOS,))
    properties = {f"p{at}": {"type": "string", "pattern": f"^[a-z]{{1,{at + 1}}}x{{3,90}}$"} for at in range(900)}
    try:
        assert "too complex" in refusal(constraints, job(SCHEMA, {"type": "object", "properties": properties})).message
        assert constraints.compile(job(REGEX, "a"))
    finally:
        constraints.close()


def test_what_was_compiled_is_remembered_within_bytes(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = job(REGEX, "first")
    assert constraints.known(first) is None
    grammar = constraints.compile(first)
    for child in psutil.Process().children():
        child.suspend()
    try:
        assert constraints.compile(first) == constraints.known(first) == grammar
    finally:
        for child in psutil.Process().children():
            child.resume()
    monkeypatch.setattr(constraints_module, "MAX_REMEMBERED", 2000)
    for at in range(30):
        constraints.compile(job(REGEX, "x" * 50 + str(at)))
    assert constraints.known(first) is None and constraints.known(job(REGEX, "x" * 50 + "29")) is not None


def test_one_that_takes_long_delays_no_other(path: Path) -> None:
    constraints = Constraints(path, VOCAB, (EOS,), 2, CpuTimeLimit(job_s=30.0))
    before = set(psutil.Process().children())
    try:
        with ThreadPoolExecutor(2) as pool:
            slow = pool.submit(constraints.compile, job(GRAMMAR, ENDLESS))
            assert pool.submit(constraints.compile, job(REGEX, "a")).result()
            assert not slow.done()
            for child in set(psutil.Process().children()) - before:
                child.kill()
            assert isinstance(slow.exception(), ServiceError)
    finally:
        constraints.close()


def test_a_tokenizer_that_grammars_cannot_follow_is_named(tmp_path: Path) -> None:
    unigram(tmp_path)
    constraints = Constraints(tmp_path / "tokenizer.json", 200, (1,))
    try:
        for _ in range(2):
            error = refusal(constraints, job(REGEX, "a"))
            assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "NO_CONSTRAINTS")
    finally:
        constraints.close()


def test_grammars_are_tried_out_in_the_background(path: Path) -> None:
    before = set(psutil.Process().children())
    constraints = Constraints(path, VOCAB, (EOS,))
    try:
        constraints.compile(job(REGEX, "7"))
        (child,) = set(psutil.Process().children()) - before
        assert child.nice() == min(19, psutil.Process().nice() + NICENESS) and os.getsid(child.pid) == child.pid
    finally:
        constraints.close()


@pytest.mark.parametrize(
    ("is_open", "good", "bad"),
    [
        (True, ["hm <b>\n\n</think>\n\n7", "</think>7"], ["7", "<think>a</think>", "a</think>b"]),
        (False, ["7", "<think>hm</think>\n7"], ["hm</think>7", "<think>7"]),
    ],
)
def test_reasoning_may_come_before(
    constraints: Constraints, tokenizer: LLTokenizer, is_open: bool, good: list[str], bad: list[str]
) -> None:
    reasoning = Reasoning(is_open, '"<think>"', ('"</think>"',))
    grammar = constraints.compile(GrammarJob(Constraint(SCHEMA, '{"type": "integer"}'), reasoning=reasoning))
    assert [accepts(tokenizer, grammar, text) for text in good] == [True] * len(good)
    assert [accepts(tokenizer, grammar, text) for text in bad] == [False] * len(bad)


def test_marks_may_be_special_tokens(constraints: Constraints, tokenizer: LLTokenizer) -> None:
    """No text can be a special token."""
    grammar = constraints.compile(
        GrammarJob(Constraint(REGEX, "7"), reasoning=Reasoning(True, "<[0]>", ("<[2]>",))),
    )
    text, seven = tokenizer.tokenize_str("hm <|u"), tokenizer.tokenize_str("7")
    for ids, is_good in (([*text, 2, *seven], True), ([*text, *seven], False)):
        matcher = compile_grammar(tokenizer, grammar)
        assert (matcher.consume_tokens(ids) and matcher.is_accepting()) is is_good
