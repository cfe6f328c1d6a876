"""Reasoning and tool calls separated from the text, for any division into pieces; no half marker is streamed."""

import random

import pytest

from sluice_server.services.messages.work import Sections
from sluice_server.services.sections.split import Split
from sluice_server.services.sections.splitters import splitter_of
from sluice_server.services.sections.tool_format import MAX_DEPTH

HERMES = Sections(reasoning="think", tools="hermes")
LLAMA = Sections(tools="llama3_json")
PLAIN = Sections(reasoning="think")
OPEN = Sections(reasoning="think", is_reasoning=True, tools="hermes")
CALL = '{"name": "f", "arguments": {"a": "}</tool_call>{", "é": [1, "😀\\"", null]}}'
SAID = ("f", '{"a":"}</tool_call>{","é":[1,"😀\\"",null]}')
LLAMA_CALL = '{"name": "f", "parameters": {"q": "x;y"}}'
LLAMA_SAID = ("f", '{"q":"x;y"}')
CASES: dict[str, tuple[Sections, str, str, str, list[tuple[str, str]]]] = {  # → text, reasoning, calls
    "plain": (PLAIN, "a <b> c\n\n", "a <b> c\n\n", "", []),
    "reasoning": (PLAIN, "<think>\nwhy </thin\n\n</think>\n\nso\n", "so\n", "why </thin", []),
    "white space before": (PLAIN, " \n<think>why</think>so", "so", "why", []),
    "reasoning that does not end": (PLAIN, "<think>\nwhy </thi", "", "why </thi", []),
    "a mark later on": (PLAIN, "see <think>x</think>", "see <think>x</think>", "", []),
    "half a mark": (PLAIN, "<thin", "<thin", "", []),
    "nothing": (HERMES, "", "", "", []),
    "white space only": (HERMES, " \n", " \n", "", []),
    "opened by the prompt": (OPEN, "why\n</think>\n\nso", "so", "why", []),
    "opened by the prompt, without end": (OPEN, "why\n\nmore", "", "why\n\nmore", []),
    "a call": (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", "", [SAID]),
    "text and calls": (
        HERMES,
        f"Look:\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>\n",
        "Look:",
        "",
        [SAID, SAID],
    ),
    "reasoning and a call": (
        HERMES,
        f"<think>\nhm <tool_call>\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>",
        "",
        "hm <tool_call>",
        [SAID],
    ),
    "a call without its closing": (HERMES, f"<tool_call>\n{CALL}\n", "", "", [SAID]),
    "text behind a call": (HERMES, f"<tool_call>{CALL}</tool_call>\n\ndone", "\n\ndone", "", [SAID]),
    "quoted arguments": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        "",
        [("f", '{"a":1}')],
    ),
    "no JSON": (HERMES, "a <tool_call>no</tool_call> b", "a <tool_call>no</tool_call> b", "", []),
    "JSON that breaks": (
        HERMES,
        '<tool_call>{"name": f}</tool_call> b',
        '<tool_call>{"name": f}</tool_call> b',
        "",
        [],
    ),
    "JSON that is no call": (HERMES, '<tool_call>{"a": {}}</tool_call>', '<tool_call>{"a": {}}</tool_call>', "", []),
    "arguments that are no object": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        "",
        [],
    ),
    "JSON that does not end": (HERMES, 'x <tool_call>{"name": "f', 'x <tool_call>{"name": "f', "", []),
    "broken, then a call": (
        HERMES,
        f"<tool_call>x<tool_call>{CALL}</tool_call>",
        "<tool_call>x",
        "",
        [SAID],
    ),
    "bare": (LLAMA, LLAMA_CALL, "", "", [LLAMA_SAID]),
    "bare, many": (LLAMA, f" {LLAMA_CALL}; {LLAMA_CALL}", "", "", [LLAMA_SAID, LLAMA_SAID]),
    "bare with a type": (LLAMA, '{"type": "function", ' + LLAMA_CALL[1:], "", "", [LLAMA_SAID]),
    "tagged": (LLAMA, f"so <|python_tag|>{LLAMA_CALL}", "so ", "", [LLAMA_SAID]),
    "tagged code": (LLAMA, "<|python_tag|>f.call(x=1)", "<|python_tag|>f.call(x=1)", "", []),
    "JSON answer": (LLAMA, '{"answer": {"name": 1}}', '{"answer": {"name": 1}}', "", []),
    "JSON later on": (LLAMA, "so " + LLAMA_CALL, "so " + LLAMA_CALL, "", []),
    "unknown format": (Sections(tools="other"), f"<tool_call>{CALL}", f"<tool_call>{CALL}", "", []),
}


def joined(splits: list[Split]) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.name, call.arguments) for split in splits for call in split.calls]
    return "".join(one.text for one in splits), "".join(one.reasoning for one in splits), calls


@pytest.mark.parametrize("name", list(CASES))
def test_sections_whatever_the_pieces(name: str) -> None:
    sections, output, want_text, want_reasoning, calls = CASES[name]
    rng = random.Random(name)
    for number in range(60):
        splitter, splits, at = splitter_of(sections, {}), [], 0
        while at < len(output):
            num = 1 if number == 0 else len(output) if number == 1 else rng.randrange(1, 9)
            splits.append(splitter.feed(output[at : at + num]))
            at += num
            text, reasoning, _ = joined(splits)
            assert want_text.startswith(text) and want_reasoning.startswith(reasoning), "a mark was half shown"
        splits.append(splitter.flush())
        assert joined(splits) == (want_text, want_reasoning, calls)


def test_text_behind_the_only_call_is_dropped() -> None:
    splitter = splitter_of(Sections(tools="hermes", parallel=False), {})
    splits = [splitter.feed(f"a\n<tool_call>{CALL}</tool_call> b"), splitter.feed("c"), splitter.flush()]
    assert joined(splits) == ("a", "", [SAID]) and splitter.has_ended


PARTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", CALL, LLAMA_CALL),
    *('{"name"', "}", "\n", " ", "a", "<", "</", '"', ";", "{", "x<y", "\n\n", "é"),
]


def test_random_outputs_split_alike_whatever_the_pieces() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        output = "".join(rng.choices(PARTS, k=rng.randrange(1, 9)))
        sections = Sections(rng.choice(["", "think"]), rng.random() < 0.2, rng.choice(["", "hermes", "llama3_json"]))
        results = []
        for num_cuts in (0, 3, len(output)):
            cuts = (
                sorted(rng.choices(range(len(output) + 1), k=num_cuts))
                if num_cuts < len(output)
                else range(len(output))
            )
            splitter, splits, at = splitter_of(sections, {}), [], 0
            for cut in [*cuts, len(output)]:
                splits.append(splitter.feed(output[at:cut]))
                at = cut
            results.append(joined([*splits, splitter.flush()]))
        assert results[0] == results[1] == results[2], output


def test_text_is_streamed_as_soon_as_it_can_be_nothing_else() -> None:
    splitter = splitter_of(HERMES, {})
    assert [splitter.feed(piece).text for piece in ("a", "b<", "tool", "x", "\n", "c")] == [
        "a",
        "b",
        "",
        "<toolx",
        "",
        "\nc",
    ]
    plain = splitter_of(PLAIN, {})
    assert [plain.feed(piece).text for piece in ("a", "\n", "<think>")] == ["a", "\n", "<think>"]


def test_an_answer_in_json_is_not_held_back_as_a_call() -> None:
    splitter = splitter_of(LLAMA, {})
    assert [splitter.feed(piece).text for piece in ('{"', "ans", "wer")] == ["", '{"ans', "wer"]


def test_a_call_that_grows_too_large_is_text() -> None:
    splitter, opening = splitter_of(HERMES, {}), '<tool_call>{"name": "'
    text = splitter.feed(opening).text
    for _ in range(40):
        text += splitter.feed("x" * 10_000).text
    assert text == opening + "x" * 400_000


@pytest.mark.parametrize(("depth", "is_call"), [(MAX_DEPTH - 2, True), (MAX_DEPTH - 1, False), (5000, False)])
def test_nesting_that_is_too_deep_is_text(depth: int, is_call: bool) -> None:
    arguments = '{"a":' + "[" * depth + "]" * depth + "}"
    output = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    splitter = splitter_of(HERMES, {})
    found = joined([splitter.feed(output), splitter.flush()])
    assert found == (("", "", [("f", arguments)]) if is_call else (output, "", []))


def test_a_special_opening_is_no_text_where_special_tokens_are_skipped() -> None:
    splitter = splitter_of(LLAMA, {"<|python_tag|>": "\ufdd0"})
    assert joined([splitter.feed("\ufdd0f.call(x=1)"), splitter.flush()]) == ("f.call(x=1)", "", [])


def test_whether_the_next_text_is_reasoning_is_known() -> None:
    splitter = splitter_of(PLAIN, {})
    seen = []
    for piece in ("<think>", "a", "</think>", "b"):
        splitter.feed(piece)
        seen.append(splitter.is_reasoning)
    assert seen == [True, True, False, False]
