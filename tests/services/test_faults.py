"""An exception in every role and every kind of work: one terminal status that names the role and leaks nothing, and
one line in the log that has request, trace, role and traceback."""

import ast
import dataclasses
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from sluice_server import services
from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.request import FinishReason, Limits, SamplingParams
from sluice_server.engine.sampling.grammars import Grammars
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.services.detokenizer import stage as detokenizer_stage
from sluice_server.services.detokenizer.output import Output
from sluice_server.services.detokenizer.stage import DetokenizerStage
from sluice_server.services.engine.grammar_gate import GrammarGate
from sluice_server.services.engine.membership import RingMembership
from sluice_server.services.engine.stage import EngineStage
from sluice_server.services.messages.details import Admitted
from sluice_server.services.messages.messages import Append, Envelope, Failed, Grant, Message, Prompt, Submit, Tokens
from sluice_server.services.messages.processes import Role
from sluice_server.services.messages.work import (
    ChatMessage,
    ChatPrompt,
    Constraint,
    ConstraintForm,
    Detokenize,
    Generate,
    Scheduling,
    Stops,
    TextPrompt,
    Tokenize,
    Work,
    pack_ids,
)
from sluice_server.services.ring.loop import RingLoop
from sluice_server.services.ring.stage import Stage
from sluice_server.services.telemetry.logs import FIELDS
from sluice_server.services.tokenizer import renderer
from sluice_server.services.tokenizer.chat import ChatTemplate, TemplateSource
from sluice_server.services.tokenizer.constraints import Constraints
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.sequencer import RequestSequencer
from sluice_server.services.tokenizer.stage import EncodingThreads, TokenizerStage
from tests.oracle.tokenizers import byte_level_bpe
from tests.services.ring.one_stage import NEXT, passed_on
from tests.services.test_stage_attempts import Nines, unrecorded
from tests.services.tokenizer.constrain import idle_constraints

LIMITS = Limits(context_length=100, vocab_size=400)
TRACE, SECRET = "ab" * 16, "0x7f3a99 of another tenant"
ENVELOPE = Envelope("0000000500000000000000000000000a", NEXT, traceparent=f"00-{TRACE}-{'cd' * 8}-01")
PARAMS = SamplingParams(max_tokens=4, temperature=0.0)
CHAT = ChatPrompt(messages=(ChatMessage(role="user", content="hi"),))
CONSTRAINT = Constraint(ConstraintForm.REGEX, "a+")


def broken(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(SECRET)


@pytest.fixture
def encoder(tmp_path: Path) -> TextEncoder:
    byte_level_bpe(tmp_path)
    return TextEncoder.load(tmp_path)


@dataclasses.dataclass(frozen=True)
class Case:
    """A method that is replaced by one that raises, and the messages that the stage gets then."""

    role: Role
    owner: object
    name: str
    messages: tuple[Message, ...]


def submit(work: Work) -> tuple[Message, ...]:
    return (Submit(ENVELOPE, work),)


def prompt(grammar: str = "", credit: int | None = None) -> Prompt:
    params = dataclasses.replace(PARAMS, grammar=grammar)
    return Prompt(ENVELOPE, pack_ids([5, 6]), params, Stops(), Scheduling(credit=credit), 0.0)


TEXT = Generate(TextPrompt("hello"), PARAMS)
TOKENS = (
    Tokens(ENVELOPE, 0, (300,), admitted=Admitted(3, 0, 8, Stops())),
    Tokens(ENVELOPE, 1, (301,), finish=FinishReason.LENGTH),
)
CASES = {
    "generate": Case(Role.TOKENIZER, TextEncoder, "encode", submit(TEXT)),
    "tokenize": Case(Role.TOKENIZER, TextEncoder, "encode", submit(Tokenize(TextPrompt("hello")))),
    "detokenize": Case(Role.TOKENIZER, TextEncoder, "decode", submit(Detokenize(pack_ids([1])))),
    "chat": Case(Role.TOKENIZER, ChatTemplate, "render", submit(Generate(CHAT, PARAMS))),
    "constraint": Case(
        Role.TOKENIZER, Constraints, "_compile", submit(Generate(TextPrompt("a"), PARAMS, constraint=CONSTRAINT))
    ),
    "known constraint": Case(
        Role.TOKENIZER, Constraints, "known", submit(Generate(TextPrompt("a"), PARAMS, constraint=CONSTRAINT))
    ),
    "append": Case(Role.TOKENIZER, TextEncoder, "encode_more", (Append(ENVELOPE, TextPrompt("more")),)),
    "lanes": Case(Role.TOKENIZER, RequestSequencer, "begin", submit(TEXT)),
    "prompt": Case(Role.ENGINE, Engine, "add", (prompt(),)),
    "step": Case(Role.ENGINE, Nines, "launch", (prompt(),)),
    "grammar": Case(Role.ENGINE, Grammars, "compile", (prompt("start: /a/"),)),
    "change": Case(Role.ENGINE, Engine, "grant", (prompt(credit=0), Grant(ENVELOPE, 3))),
    "tokens": Case(Role.DETOKENIZER, Output, "push", TOKENS),
    "joining": Case(Role.DETOKENIZER, detokenizer_stage, "joined", TOKENS),
}


def engine_gate(ring: RingLoop, pool: ThreadPoolExecutor) -> GrammarGate:
    scheduler = Scheduler(KVCache(40, 4, prefix_caching=True), LIMITS, (2,), 4, 40)
    stage = EngineStage(Engine(scheduler, Nines()), RingMembership("engine-0", 1), ring.emit, unrecorded)
    return GrammarGate(stage, Grammars(None), pool, ring.schedule, ring.emit)


def stage_of(role: Role, ring: RingLoop, encoder: TextEncoder, pool: ThreadPoolExecutor) -> Stage:
    if role is Role.TOKENIZER:
        threads = EncodingThreads(pool, lambda call: ring_loop_call(ring, call))
        return TokenizerStage(encoder, idle_constraints(), LIMITS, threads, ring.emit, unrecorded)
    if role is Role.ENGINE:
        return engine_gate(ring, pool)
    return DetokenizerStage(encoder, ring.emit, unrecorded)


def ring_loop_call(ring: RingLoop, call: Callable[[], None]) -> None:
    """Calls the stage as the tokenizer's process does."""
    loop = ring._loop
    assert loop is not None
    loop.call_soon_threadsafe(call)


def faults_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The log lines about the request."""
    return [one for one in caplog.records if vars(one).get(FIELDS, {}).get("request_id") == ENVELOPE.request_id]


def failures(came: list[Message]) -> list[Failed]:
    return [one for one in came if isinstance(one, Failed)]


def assert_told(failed: Failed, role: Role) -> None:
    """Checks a client's status: the role at fault and the trace, without the exception's text."""
    assert failed.code == 13 and failed.message.startswith(f"the {role} ") and TRACE in failed.message
    assert failed.details == {"role": str(role), "trace_id": TRACE}
    assert SECRET not in str(failed) and "RuntimeError" not in str(failed)


@pytest.mark.parametrize("name", CASES)
async def test_an_exception_is_one_status_and_one_line(
    name: str, encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    monkeypatch.setattr(case.owner, case.name, broken)
    with ThreadPoolExecutor(2) as pool:
        came = await passed_on(
            case.role,
            lambda ring: stage_of(case.role, ring, encoder, pool),
            case.messages,
            tmp_path,
            lambda came: bool(failures(came)),
        )
    (failed,) = failures(came)
    assert_told(failed, case.role)
    (line,) = faults_of(caplog)
    assert vars(line)[FIELDS]["role"] == case.role and vars(line)[FIELDS]["trace_id"] == TRACE
    assert line.exc_info is not None and SECRET in logging.Formatter().format(line)


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatTemplate]:
    """A template whose renderer is a child with a bug."""
    monkeypatch.setattr(renderer, "MODULE", "tests.services.tokenizer.crashing_child")
    template = ChatTemplate(TemplateSource("{{ messages }}"))
    yield template
    template.close()


async def test_a_child_with_a_bug_is_a_fault_of_ours_and_its_traceback_is_in_the_log(
    encoder: TextEncoder, crashing: ChatTemplate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(2) as pool:
        came = await passed_on(
            Role.TOKENIZER,
            lambda ring: stage_of(Role.TOKENIZER, ring, TextEncoder(encoder.tokenizer, crashing), pool),
            submit(Generate(CHAT, PARAMS)),
            tmp_path,
            lambda came: bool(failures(came)),
        )
    (failed,) = failures(came)
    assert_told(failed, Role.TOKENIZER)
    assert "a bug in a child" not in failed.message
    (line,) = faults_of(caplog)
    written = logging.Formatter().format(line)
    assert "a bug in a child" in written and "crashing_child.py" in written


def test_only_one_place_of_the_services_makes_faults() -> None:
    root = Path(services.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id == "engine_fault"
    }
    assert found == {"faults.py"}
