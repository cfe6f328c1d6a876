"""Tool calls in every format are held to the schemas of the tools: required ones, and those of strict tools in text."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.request import SamplingParams
from sluice_server.engine.sampling.grammars import compile_grammar
from sluice_server.services.checkpoint.grammar_ids import load_tokenizer
from sluice_server.services.messages.work import ChatMessage, ChatPrompt, Generate, Sections, Tool
from sluice_server.services.sections.splitters import splitter_of
from sluice_server.services.sections.tools import FORMATS
from sluice_server.services.tokenizer.chat import ChatTemplate, TemplateSource
from sluice_server.services.tokenizer.constrained import job_of
from sluice_server.services.tokenizer.constraints import Constraints
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.grammar_frames import GrammarJob
from tests.oracle.tokenizers import byte_level_bpe

VOCAB, EOS = 440, 1
POINT = json.dumps(
    {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/n"}, "s": {"type": "string"}, "e": {"enum": ["C", "F"]}},
        "required": ["p"],
        "$defs": {"n": {"type": "integer"}},
    },
)
TOOLS = (Tool("f", None, POINT, strict=True), Tool("g", None, "{}"))
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"]
SPECIAL += ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "</arg_value>"]
CHANNEL = "<|channel|>commentary to=functions."
Compile = Callable[[Sections, bool, bool], str]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer = byte_level_bpe(directory)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return TextEncoder(tokenizer, ChatTemplate(TemplateSource()), path)


@pytest.fixture(scope="module")
def tokenizer(encoder: TextEncoder) -> LLTokenizer:
    found = load_tokenizer(path_of(encoder), VOCAB, (EOS,))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def constraints(encoder: TextEncoder) -> Iterator[Constraints]:
    made = Constraints(path_of(encoder), VOCAB, (EOS,))
    yield made
    made.close()


def path_of(encoder: TextEncoder) -> Path:
    assert encoder._path is not None
    return encoder._path


def job(
    encoder: TextEncoder, key: str, *, must: bool, one: bool = False, tools: tuple[Tool, ...] = TOOLS
) -> GrammarJob:
    names = tuple(tool.name for tool in tools) if must else ()
    prompt = ChatPrompt((ChatMessage("user", "hi"),), tools=tools, must_call=names, parallel=not one)
    reasoning = "openai_gptoss" if key == "openai" else ""
    made = job_of(Generate(prompt, SamplingParams()), Sections(reasoning, tools=key), encoder.mark)
    assert made is not None
    return made


def accepted(encoder: TextEncoder, tokenizer: LLTokenizer, grammar: str, texts: list[str]) -> list[str]:
    """Those of the texts that follow the grammar, whole."""
    found = []
    for text in texts:
        ids = encoder.tokenizer.encode(text, add_special_tokens=False).ids
        matcher = compile_grammar(tokenizer, grammar)
        if matcher.consume_tokens(ids) and matcher.is_accepting():
            found.append(text)
    return found


# By format: a call of f, its form for an argument of the wrong type, a call of g, and what joins calls.
F_JSON, BAD_JSON = '"{}": {{"p": 3}}}}', '"{}": {{"p": "3"}}}}'


def json_call(name: str, key: str, value: str) -> str:
    return f'{{"name": "{name}", "{key}": {value}}}'


def xml(p: str, more: str = "") -> str:
    return f"<tool_call>\n<function=f>\n<parameter=p>\n{p}\n</parameter>\n{more}</function>\n</tool_call>"


def hermes(name: str, value: str) -> str:
    return f"<tool_call>\n{json_call(name, 'arguments', value)}\n</tool_call>"


def channel(name: str, value: str) -> str:
    return f"{CHANNEL}{name} <|constrain|>json<|message|>{value}"


def glm(p: str, more: str = "") -> str:
    return f"<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>{p}</arg_value>\n{more}</tool_call>"


def kimi(*calls: str) -> str:
    written = "".join([f"<|tool_call_begin|>functions.{one}<|tool_call_end|>" for one in calls])
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def minimax(*calls: str) -> str:
    written = "".join([f"<invoke name={one}</invoke>\n" for one in calls])
    return f"<minimax:tool_call>\n{written}</minimax:tool_call>"


def dsml(*calls: str) -> str:
    written = "".join([f"<｜DSML｜invoke name={one}</｜DSML｜invoke>\n" for one in calls])
    return f"<｜DSML｜function_calls>\n{written}</｜DSML｜function_calls>"


def deepseek(*calls: str, between: str = "") -> str:
    written = between.join([f"<｜tool▁call▁begin｜>{one}<｜tool▁call▁end｜>" for one in calls])
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def fenced(name: str, value: str) -> str:
    return f"function<｜tool▁sep｜>{name}\n```json\n{value}\n```"


GOOD, BAD = '{"p": 3}', '{"p": "3"}'
P, TO = "<|tool_call_argument_begin|>", "<｜tool▁sep｜>"
M2_P = '"f">\n<parameter name="p">{}</parameter>\n'
V32_P = '"f">\n<｜DSML｜parameter name="p" string="false">{}</｜DSML｜parameter>\n'
# format → outputs with calls that are held to the schemas, outputs that violate them, and whether text may surround
CALLS: dict[str, tuple[list[str], list[str], bool]] = {
    "hermes": ([hermes("f", GOOD), f"{hermes('f', GOOD)}\n{hermes('g', '{}')}"], [hermes("f", BAD)], True),
    "llama3_json": (
        [
            json_call("f", "parameters", GOOD),
            f"{json_call('f', 'parameters', GOOD)}; {json_call('g', 'parameters', '{}')}",
        ],
        [json_call("f", "parameters", BAD), json_call("h", "parameters", "{}")],
        False,
    ),
    "mistral": (
        [f"[TOOL_CALLS][{json_call('f', 'arguments', GOOD)}, {json_call('g', 'arguments', '{}')}]"],
        [f"[TOOL_CALLS][{json_call('f', 'arguments', BAD)}]"],
        True,
    ),
    "mistral_args": (
        [f"[TOOL_CALLS]f[ARGS]{GOOD}", f"[TOOL_CALLS]f[ARGS]{GOOD}[TOOL_CALLS]g[ARGS]{{}}"],
        [f"[TOOL_CALLS]f[ARGS]{BAD}", "[TOOL_CALLS]h[ARGS]{}"],
        True,
    ),
    "qwen3_coder": (
        [xml("3"), xml("3", "<parameter=s>\na</b>\n\n</parameter>\n<parameter=e>\nC\n</parameter>\n")],
        [xml('"3"'), xml("3").replace("=p", "=q"), xml("3", "<parameter=e>\nX\n</parameter>\n")],
        True,
    ),
    "glm45": (
        [
            glm("3"),
            f"{glm('3')}\n<tool_call>g\n</tool_call>",
            glm("3", "<arg_key>s</arg_key>\n<arg_value>\na</b></arg_value>\n"),
        ],
        [glm('"3"'), glm("3").replace(">p<", ">q<"), glm("3", "<arg_key>e</arg_key>\n<arg_value>X</arg_value>\n")],
        True,
    ),
    "kimi_k2": (
        [kimi(f"f:0{P}{GOOD}"), kimi(f"f:0{P}{GOOD}", f"g:1{P}{{}}")],
        [kimi(f"f:0{P}{BAD}"), kimi(f"f:x{P}{GOOD}"), kimi()],
        True,
    ),
    "minimax_m2": (
        [minimax(M2_P.format("3")), minimax(M2_P.format("3") + '<parameter name="s">a</parameter>\n', '"g">\n')],
        [minimax(M2_P.format('"3"')), minimax('"f">\n'), minimax('"h">\n')],
        True,
    ),
    "minimax": (
        [
            f"<tool_calls>\n{json_call('f', 'arguments', GOOD)}\n</tool_calls>",
            f"<tool_calls>\n{json_call('f', 'arguments', GOOD)}\n{json_call('g', 'arguments', '{}')}\n</tool_calls>",
        ],
        [f"<tool_calls>\n{json_call('f', 'arguments', BAD)}\n</tool_calls>"],
        True,
    ),
    "deepseek_v3": (
        [deepseek(fenced("f", GOOD)), deepseek(fenced("f", GOOD), fenced("g", "{}"), between="\n")],
        [deepseek(fenced("f", BAD)), deepseek(fenced("h", "{}")), deepseek()],
        True,
    ),
    "deepseek_v31": (
        [deepseek(f"f{TO}{GOOD}"), deepseek(f"f{TO}{GOOD}", f"g{TO}{{}}")],
        [deepseek(f"f{TO}{BAD}"), deepseek(f"h{TO}{{}}")],
        True,
    ),
    "deepseek_v32": (
        [
            dsml(V32_P.format("3")),
            dsml(V32_P.format("3") + '<｜DSML｜parameter name="s" string="true">"a"</｜DSML｜parameter>\n', '"g">\n'),
        ],
        [dsml(V32_P.format('"3"')), dsml(V32_P.format("3").replace("false", "true")), dsml('"f">\n')],
        True,
    ),
    "gemma3": ([json_call("f", "parameters", GOOD)], [json_call("f", "parameters", BAD), "[f(p='3')]"], False),
    "granite": (
        [f"<|tool_call|>[{json_call('f', 'arguments', GOOD)}]"],
        [f"<|tool_call|>[{json_call('f', 'arguments', BAD)}]"],
        True,
    ),
    "phi4_mini_json": (
        [f"functools[{json_call('f', 'arguments', GOOD)}]"],
        [f"functools[{json_call('f', 'arguments', BAD)}]"],
        True,
    ),
    "openai": ([channel("f", GOOD), channel("g", "{}")], [channel("f", BAD)], False),
    "json": ([f"[{json_call('f', 'parameters', GOOD)}]"], [f"[{json_call('f', 'parameters', BAD)}]"], False),
}


@pytest.mark.parametrize("key", list(CALLS))
def test_required_calls_are_held_to_the_schema(
    encoder: TextEncoder, tokenizer: LLTokenizer, constraints: Constraints, key: str
) -> None:
    good, bad, _ = CALLS[key]
    grammar = constraints.compile(job(encoder, key, must=True))
    assert accepted(encoder, tokenizer, grammar, [*good, *bad, "", "hello"]) == good
    splitter = splitter_of(Sections(tools=key, names=("f", "g"), typed=(("f", "p"),)), {})
    calls = (*splitter.feed(good[0]).calls, *splitter.flush().calls)  # they are read as they are written
    assert json.loads(calls[0].arguments) in ({"p": 3}, {})


@pytest.mark.parametrize("key", [key for key in CALLS if key != "json"])
def test_strict_tools_are_held_to_the_schema_within_any_text(
    encoder: TextEncoder, tokenizer: LLTokenizer, constraints: Constraints, key: str
) -> None:
    good, bad, is_in_text = CALLS[key]
    grammar = constraints.compile(job(encoder, key, must=False))
    free = ["<|channel|>final<|message|>hello <b>"] if key == "openai" else ["hello <b>", ""]
    around = [f"a {one}" for one in good] if is_in_text else []
    texts = [*good, *free, *around, *bad, *([f"a {one}" for one in bad] if is_in_text else [])]
    assert accepted(encoder, tokenizer, grammar, texts) == [*good, *free, *around]


@pytest.mark.parametrize("must", [True, False])
def test_one_call_is_all_where_one_is_allowed(
    encoder: TextEncoder, tokenizer: LLTokenizer, constraints: Constraints, must: bool
) -> None:
    one, two = CALLS["hermes"][0]
    grammar = constraints.compile(job(encoder, "hermes", must=must, one=True))
    assert accepted(encoder, tokenizer, grammar, [one, two]) == [one]


def test_a_tool_that_cannot_be_enforced_is_refused(encoder: TextEncoder, constraints: Constraints) -> None:
    for key, parameters in (
        ("hermes", {"type": "array"}),
        ("hermes", {"type": "object", "properties": {"a": {"type": "foo"}}}),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}),
        ("qwen3_coder", {"type": "object", "properties": {}, "required": ["a"]}),
        ("qwen3_coder", {"type": "object", "properties": {"a>": {}}}),
    ):
        with pytest.raises(ServiceError) as caught:
            constraints.compile(job(encoder, key, must=True, tools=(Tool("f", None, json.dumps(parameters)),)))
        assert caught.value.field == "chat.tools" and caught.value.code is Code.INVALID_ARGUMENT
    with pytest.raises(ServiceError) as caught:
        job(encoder, "pythonic", must=False)
    assert caught.value.field == "chat.tools.strict" and FORMATS["pythonic"].grammar is None
