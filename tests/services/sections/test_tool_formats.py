"""Every format of tool calls and of reasoning: what models write is read alike for any division into pieces, and what
only resembles it is text."""

import json
import random

import pytest

from sluice_server.services.messages.work import Sections
from sluice_server.services.sections.reasoning import REASONING
from sluice_server.services.sections.split import Split
from sluice_server.services.sections.splitters import marks_of, splitter_of
from sluice_server.services.sections.tool_format import MAX_CALL
from sluice_server.services.sections.tools import FORMATS

TOOLS = {"names": ("f", "g"), "typed": (("f", "n"), ("f", "o"))}
Found = tuple[str, str, list[tuple[str, object]]]  # text, reasoning, calls


def sections(tools: str, reasoning: str = "", *, is_reasoning: bool = False, parallel: bool = True) -> Sections:
    return Sections(reasoning, is_reasoning, tools, parallel, **TOOLS)  # type: ignore[arg-type] # of both kinds


def read(asked: Sections, output: str, cuts: list[int]) -> Found:
    """Feeds the output in pieces; checks that what was sent in parts are the calls."""
    splitter, splits, at = splitter_of(asked, {}), [], 0
    for cut in [*cuts, len(output)]:
        splits.append(splitter.feed(output[at:cut]))
        at = cut
    splits.append(splitter.flush())
    check_parts(splits)
    calls: list[tuple[str, object]] = [(one.name, json.loads(one.arguments)) for split in splits for one in split.calls]
    return "".join(one.text for one in splits), "".join(one.reasoning for one in splits), calls


def check_parts(splits: list[Split]) -> None:
    """The parts of a call that became complete are its arguments, and only the first has its name."""
    parts: dict[int, list[tuple[str, str]]] = {}
    for part in (part for split in splits for part in split.parts):
        parts.setdefault(part.number, []).append((part.name, part.arguments))
    for call in (call for split in splits for call in split.calls):
        names, pieces = zip(*parts[call.number], strict=True)
        assert names[0] == call.name and not any(names[1:])
        written = json.loads("".join(pieces))
        assert (json.loads(written) if isinstance(written, str) else written) == json.loads(call.arguments)


FN: tuple[str, object] = ("f", {"n": 1, "s": 'a}"]'})
ARGS = '{"n": 1, "s": "a}\\"]"}'
XML = '<function=f>\n<parameter=n>\n1\n</parameter>\n<parameter=s>\na}"]\n</parameter>\n</function>'
G: tuple[str, object] = ("g", {})
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
TO_F = f"{CHANNEL}commentary to=functions.f <|constrain|>json{MESSAGE}{ARGS}"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}hm{END}{START}assistant"
KEYS = '<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n<arg_value>a}"]</arg_value>\n'
SECTION, KIMI = "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.f:"
CALLS, CALL, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
END_CALLS, END_CALL = "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"
M2_CALLS = (
    '<minimax:tool_call>\n<invoke name="f">\n<parameter name="n">1</parameter>\n<parameter name="s">a}"]</parameter>\n'
    '</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>'
)
DSML_CALLS = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="s" string="true">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
CASES: list[tuple[str, str, str, Found]] = [
    ("mistral", "", f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGS}}}]', ("", "", [FN])),
    (
        "mistral",
        "",
        f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGS}}}, {{"name": "g", "arguments": {{}}}}]',
        ("", "", [FN, G]),
    ),
    ("mistral", "", f"so[TOOL_CALLS]f[ARGS]{ARGS}[TOOL_CALLS]g[ARGS]{{}}", ("so", "", [FN, G])),
    ("mistral", "", f"[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{ARGS}", ("", "", [FN])),
    ("mistral", "", f"[TOOL_CALLS]f{ARGS}", ("", "", [FN])),
    ("mistral", "", "[TOOL_CALLS]no name{}", ("[TOOL_CALLS]no name{}", "", [])),
    ("mistral", "", "[TOOL_CALLS]f\nx", ("[TOOL_CALLS]f\nx", "", [])),
    ("mistral", "", "[TOOL_CALLS]f[ARGS]{", ("[TOOL_CALLS]f[ARGS]{", "", [])),
    ("mistral", "mistral", f"[THINK]why[/THINK]so[TOOL_CALLS]f[ARGS]{ARGS}", ("so", "why", [FN])),
    ("granite", "", f'<|tool_call|>[{{"name": "f", "arguments": {ARGS}}}]', ("", "", [FN])),
    ("phi4_mini_json", "", f'functools[{{"name": "f", "arguments": {ARGS}}}]', ("", "", [FN])),
    ("json", "", f'[{{"name": "f", "parameters": {ARGS}}}, {{"name": "g", "parameters": {{}}}}]', ("", "", [FN, G])),
    ("json", "", '[1, {"name": "f"}]', ('[1, {"name": "f"}]', "", [])),
    ("qwen3_coder", "", f"so\n<tool_call>\n{XML}\n</tool_call>", ("so", "", [FN])),
    (
        "qwen3_coder",
        "",
        f"<tool_call>{XML}</tool_call><tool_call>\n<function=g>\n</function>\n</tool_call>",
        ("", "", [FN, G]),
    ),
    ("qwen3_coder", "think", f"<think>a</think>{XML}\n</tool_call>", ("", "a", [FN])),
    (
        "qwen3_coder",
        "",
        '<tool_call><function=f><parameter=o>{"a": [True]}</parameter><parameter=s>\n<b>\n\n1\n</parameter></function>',
        ("", "", [("f", {"o": '{"a": [True]}', "s": "<b>\n\n1"})]),
    ),
    (
        "qwen3_coder",
        "",
        "<tool_call><function=f><parameter=n>True</parameter></function>",
        ("", "", [("f", {"n": True})]),
    ),
    ("qwen3_coder", "", f"<tool_call>\n{XML[:-5]}", (f"<tool_call>\n{XML[:-5]}", "", [])),
    ("qwen3_coder", "", "<tool_call>{}", ("<tool_call>{}", "", [])),
    ("pythonic", "", '[f(n=1, s="a}\\"]"), g()]', ("", "", [FN, G])),
    (
        "pythonic",
        "",
        "[a.f(x=[1, None, {'k': (1, 2)}], y=-1.5)]",
        ("", "", [("a.f", {"x": [1, None, {"k": [1, 2]}], "y": -1.5})]),
    ),
    ("pythonic", "", "[1, 2]", ("[1, 2]", "", [])),
    ("pythonic", "", "[see above]", ("[see above]", "", [])),
    ("pythonic", "", "[f(open('x'))]", ("[f(open('x'))]", "", [])),
    ("pythonic", "", "[f(**{'a': 1})]", ("[f(**{'a': 1})]", "", [])),
    ("pythonic", "", "so [f()]", ("so [f()]", "", [])),
    ("gemma3", "", '```tool_code\nprint(f(n=1, s="a}\\"]"))\n```', ("", "", [FN])),
    ("gemma3", "", "so\n```tool_code\n[g(), g()]\n```\n", ("so", "", [G, G])),
    ("gemma3", "", f'```json\n{{"name": "f", "parameters": {ARGS}}}\n```', ("", "", [FN])),
    ("gemma3", "", f'{{"name": "f", "parameters": {ARGS}}}', ("", "", [FN])),
    ("gemma3", "", "[g()]", ("", "", [G])),
    ("gemma3", "", "```json\n[1, 2]\n```\n", ("```json\n[1, 2]\n```\n", "", [])),
    ("gemma3", "", "```tool_code\nimport os\n```", ("```tool_code\nimport os\n```", "", [])),
    ("openai", "openai_gptoss", f"{ANALYSIS}{CHANNEL}final{MESSAGE}so<b>", ("so<b>", "hm", [])),
    ("openai", "openai_gptoss", f"{ANALYSIS}{TO_F}<|call|>", ("", "hm", [FN])),
    (
        "openai",
        "openai_gptoss",
        f"{ANALYSIS}{CHANNEL}commentary{MESSAGE}I look.{END}"
        f"{START}assistant to=functions.g{CHANNEL}commentary json{MESSAGE}<|call|>",
        ("I look.", "hm", [G]),
    ),
    ("openai", "openai_gptoss", f"{TO_F}<|call|>{START}assistant{TO_F}", ("", "", [FN, FN])),
    ("openai", "openai_gptoss", " plain <|x", (" plain <|x", "", [])),
    (
        "openai",
        "openai_gptoss",
        f"{CHANNEL}commentary to=functions.f{MESSAGE}no",
        (f"{CHANNEL}commentary to=functions.f{MESSAGE}no", "", []),
    ),
    ("openai", "openai_gptoss", f"{CHANNEL}final{MESSAGE}so<|return|>", ("so", "", [])),
    ("", "openai_gptoss", f"{ANALYSIS}{CHANNEL}final{MESSAGE}so", ("so", "hm", [])),
    ("glm45", "", f"so\n<tool_call>f\n{KEYS}</tool_call>", ("so", "", [FN])),
    (
        "glm45",
        "think",
        f"\n<think>a</think>\n<tool_call>f\n{KEYS}</tool_call>\n<tool_call>g\n</tool_call>",
        ("", "a", [FN, G]),
    ),
    ("glm45", "", f"<tool_call>f{KEYS.replace(chr(10), '')}</tool_call><tool_call>g</tool_call>", ("", "", [FN, G])),
    (
        "glm45",
        "",
        '<tool_call>f\n<arg_key>o</arg_key>\n<arg_value>{"a": [1]}</arg_value>\n'
        "<arg_key>s</arg_key>\n<arg_value>\n<b>\n</arg_value>\n</tool_call>",
        ("", "", [("f", {"o": {"a": [1]}, "s": "\n<b>\n"})]),
    ),
    ("glm45", "", "<tool_call>I think</tool_call>", ("<tool_call>I think</tool_call>", "", [])),
    (
        "glm45",
        "",
        f'<tool_call>\n{{"name": "f", "arguments": {ARGS}}}\n</tool_call>',
        (f'<tool_call>\n{{"name": "f", "arguments": {ARGS}}}\n</tool_call>', "", []),
    ),
    ("glm45", "", f"<tool_call>f\n{KEYS}", (f"<tool_call>f\n{KEYS}", "", [])),
    (
        "kimi_k2",
        "",
        f"so{SECTION}{KIMI}0<|tool_call_argument_begin|>{ARGS}<|tool_call_end|><|tool_calls_section_end|>",
        ("so", "", [FN]),
    ),
    (
        "kimi_k2",
        "think",
        f"<think>a</think>{SECTION}\n{KIMI}3<|tool_call_argument_begin|> {ARGS} <|tool_call_end|>"
        f"<|tool_call_begin|>g<|tool_call_argument_begin|>{{}}<|tool_call_end|><|tool_calls_section_end|>",
        ("", "a", [FN, G]),
    ),
    ("kimi_k2", "", f"{KIMI}0<|tool_call_argument_begin|>{ARGS}", ("", "", [FN])),
    ("kimi_k2", "", f"{SECTION}no call{{}}", (f"{SECTION}no call{{}}", "", [])),
    ("kimi_k2", "", f"{SECTION}{KIMI}0{{}}", (f"{SECTION}{KIMI}0{{}}", "", [])),
    ("minimax_m2", "think", f"<think>\na\n</think>\n\nso\n{M2_CALLS}", ("so", "a", [FN, G])),
    ("minimax_m2", "", f"{M2_CALLS}\n\nso <b>", ("\n\nso <b>", "", [FN, G])),
    ("minimax_m2", "", M2_CALLS[:60], (M2_CALLS[:60], "", [])),
    ("minimax_m2", "", "<minimax:tool_call>\n<call>", ("<minimax:tool_call>\n<call>", "", [])),
    (
        "minimax",
        "",
        f'<tool_calls>\n{{"name": "f", "arguments": {ARGS}}}\n{{"name": "g", "arguments": {{}}}}\n</tool_calls>',
        ("", "", [FN, G]),
    ),
    ("minimax", "", "<tool_calls>\nnone</tool_calls>", ("<tool_calls>\nnone</tool_calls>", "", [])),
    (
        "deepseek_v31",
        "",
        f"so{CALLS}{CALL}f{SEP}{ARGS}{END_CALL}{CALL}g{SEP}{{}}{END_CALL}{END_CALLS}",
        ("so", "", [FN, G]),
    ),
    (
        "deepseek_v3",
        "think",
        f"<think>a</think>{CALLS}{CALL}function{SEP}f\n```json\n{ARGS}\n```{END_CALL}\n"
        f"{CALL}function{SEP}g\n```json\n{{}}\n```{END_CALL}{END_CALLS}",
        ("", "a", [FN, G]),
    ),
    ("deepseek_v31", "", f"{CALLS}{CALL}function{SEP}f\n{ARGS}{END_CALL}{END_CALLS}", ("", "", [FN])),
    ("deepseek_v31", "", f"{CALLS}{CALL}f{{}}", (f"{CALLS}{CALL}f{{}}", "", [])),
    ("deepseek_v3", "", f"{CALLS}{CALL}function{SEP}f\n```python", (f"{CALLS}{CALL}function{SEP}f\n```python", "", [])),
    ("deepseek_v3", "", f"{CALLS}{CALL}f{SEP}{ARGS[:-1]}", (f"{CALLS}{CALL}f{SEP}{ARGS[:-1]}", "", [])),
    ("deepseek_v32", "", f"so\n\n{DSML_CALLS}", ("so", "", [("f", {"n": 1, "s": "2"}), G])),
    ("deepseek_v32", "", DSML_CALLS.replace("true", "no"), (DSML_CALLS.replace("true", "no"), "", [])),
    ("", "granite", "Here is my thought process:\nwhy\n\nHere is my response:\nso", ("so", "why\n\n"[:-2], [])),
    ("", "granite", "Here's my thought process: a Here's my response: b", (" b", " a ", [])),
    ("", "granite", "Here is nothing", ("Here is nothing", "", [])),
    ("", "seed_oss", "<seed:think>a</seed:think>b", ("b", "a", [])),
]


@pytest.mark.parametrize(("tools", "reasoning", "output", "want"), CASES)
def test_read_alike_whatever_the_pieces(tools: str, reasoning: str, output: str, want: Found) -> None:
    asked = sections(tools, reasoning)
    assert read(asked, output, []) == want
    assert read(asked, output, list(range(len(output)))) == want
    rng = random.Random(output)
    for _ in range(30):
        assert read(asked, output, sorted(rng.choices(range(len(output) + 1), k=3))) == want


@pytest.mark.parametrize("reasoning", ["openai_gptoss", "deepseek_r1"])
def test_reasoning_that_the_prompt_opened_goes_on(reasoning: str) -> None:
    asked = sections("", reasoning, is_reasoning=True)
    closing = f"{END}{START}assistant{CHANNEL}final{MESSAGE}" if reasoning == "openai_gptoss" else "</think>"
    assert read(asked, f"why{closing}so", [1]) == ("so", "why", [])


def test_an_opening_that_the_model_repeats_is_dropped() -> None:
    asked = sections("", "deepseek_r1", is_reasoning=True)
    for cuts in ([], [3], list(range(10))):
        assert read(asked, "\n<think>why</think>so", cuts) == ("so", "why", [])


@pytest.mark.parametrize("key", [key for key in FORMATS if key != "openai"])
def test_random_outputs_end_in_text_or_calls_alike_whatever_the_pieces(key: str) -> None:
    """Marks, calls, halves of them, and what is none, in any order."""
    rng = random.Random(key)
    own = [output for tools, _, output, _ in CASES if tools.removesuffix("_args") == key.removesuffix("_args")]
    halves = [output[: rng.randrange(len(output))] for output in own for _ in range(3)]
    parts = [
        *own,
        *halves,
        *marks_of(sections(key, "think")),
        *"{}[]<>\"'(),;:=\n a1é",
        "```",
        '{"name"',
        "</parameter>",
    ]
    for _ in range(400):
        output = "".join(rng.choices(parts, k=rng.randrange(1, 8)))
        asked = sections(key, rng.choice(["", "think"]), parallel=rng.random() < 0.8)
        cuts = sorted(rng.choices(range(len(output) + 1), k=3))
        whole = read(asked, output, [])
        assert whole == read(asked, output, cuts) == read(asked, output, list(range(len(output)))), output


def test_random_channels_end_alike_whatever_the_pieces() -> None:
    rng = random.Random(7)
    parts = [
        *marks_of(sections("openai", "openai_gptoss")),
        "analysis",
        "final",
        "commentary",
        " to=functions.f",
        ARGS,
        "assistant",
    ]
    parts += [*"{}<|\n a", TO_F, ANALYSIS]
    for _ in range(1500):
        output = "".join(rng.choices(parts, k=rng.randrange(1, 9)))
        asked = sections(rng.choice(["", "openai"]), "openai_gptoss", parallel=rng.random() < 0.8)
        cuts = sorted(rng.choices(range(len(output) + 1), k=3))
        whole = read(asked, output, [])
        assert whole == read(asked, output, cuts) == read(asked, output, list(range(len(output)))), output


VALUES = {  # texts in which a value has begun
    "qwen3_coder": ["<tool_call><function=f><parameter=s>"],
    "glm45": ["<tool_call>f<arg_key>s</arg_key><arg_value>", "<tool_call>f<arg_key>n</arg_key><arg_value>"],
    "minimax_m2": ['<minimax:tool_call><invoke name="f"><parameter name="s">'],
    "deepseek_v32": ['<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="s" string="true">'],
}


@pytest.mark.parametrize("key", list(FORMATS))
@pytest.mark.parametrize("filler", ["[", '"', "x", '{"a":', "f(a="])
def test_what_has_no_end_becomes_text(key: str, filler: str) -> None:
    """Nested, quoted or long beyond every limit: all of it is text, and a call behind it is not looked for inside."""
    known = FORMATS[key]
    begins = [*known.openings, *known.bare] or [TO_F[:-1]]
    begins += VALUES.get(key, [])
    for begin in begins:
        output = begin + filler * (MAX_CALL // len(filler) + 10)
        text, reasoning, calls = read(sections(key), output, [len(begin), MAX_CALL])
        assert not calls and not reasoning and len(text) >= MAX_CALL


def test_marks_that_are_special_tokens_are_never_shown() -> None:
    asked = sections("mistral", "mistral")
    signs = {mark: chr(0xFDD0 + at) for at, mark in enumerate(marks_of(asked))}
    spelt = f"[THINK]why[/THINK]a [TOOL_CALLS] b[TOOL_CALLS]f[ARGS]{ARGS}"
    output = spelt
    for mark, sign in signs.items():
        output = output.replace(mark, sign) if len(mark) > 1 else output
    signs.pop("]")
    splitter = splitter_of(asked, signs)
    splits = [splitter.feed(output), splitter.flush()]
    assert "".join(one.text for one in splits) == "a  b"
    splitter = splitter_of(asked, signs)  # text that only spells the marks
    splits = [splitter.feed(spelt), splitter.flush()]
    assert "".join(one.text for one in splits) == spelt and not splits[0].calls


@pytest.mark.parametrize(
    "key", ["glm45", "kimi_k2", "minimax", "minimax_m2", "deepseek_v3", "deepseek_v31", "deepseek_v32"]
)
def test_calls_whose_marks_are_special_tokens_are_read(key: str) -> None:
    tools, reasoning, output, want = next(case for case in CASES if case[0] == key and case[3][2])
    asked = sections(tools, reasoning)
    signs = {mark: chr(0xFDD0 + at) for at, mark in enumerate(marks_of(asked)) if mark[0] == "<"}
    seen = output
    for mark, sign in signs.items():
        seen = seen.replace(mark, sign)
    splitter = splitter_of(asked, signs)
    splits = [*[splitter.feed(one) for one in seen], splitter.flush()]
    assert "".join(one.text for one in splits) == want[0]
    assert [(one.name, json.loads(one.arguments)) for split in splits for one in split.calls] == want[2]
    splitter = splitter_of(asked, signs)  # text that only spells the marks
    splits = [splitter.feed(output), splitter.flush()]
    assert "".join(one.text for one in splits) == output and not any(split.calls for split in splits)


def test_names_of_formats_are_unique() -> None:
    assert len({row.key for row in FORMATS.values()}) == len(FORMATS) and "think" in REASONING
