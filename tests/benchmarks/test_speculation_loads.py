"""The loads of the speculation benchmark: which part of a text is kept, and the statistics of outputs."""

import json
import random

from benchmarks.speculation_loads import EVERY, ClosedLoad, LoadPrompt, copied, distinct, edited, edits, grammar_of

LINES = [f"    value_{i} = count(i)\n" for i in range(4 * EVERY)]


def test_one_line_in_six_is_changed_and_the_others_are_kept() -> None:
    parts = edited(LINES, random.Random(3), renames=False)
    changed = set(LINES) - {part for part in parts if part is not None}
    assert 1 <= len(changed) + parts.count(None) <= 2 * 4
    for i, part in enumerate(parts):
        if part is None:  # behind its indent, before the end of its line
            assert (parts[i - 1], parts[i + 1]) == ("    ", "\n")
    assert [part for part in parts if part in LINES] == [line for line in LINES if line not in changed]


def test_a_name_is_changed_wherever_it_stands() -> None:
    parts = edited(LINES, random.Random(3), renames=True)
    text = "".join(part for part in parts if part is not None)
    assert "new_count(" in text and " count(" not in text


def test_the_grammar_leaves_open_only_what_is_to_be_written() -> None:
    (grammar,) = json.loads(grammar_of(["a\n", '"b"\n', "  ", None, "\n", None]))["grammars"]
    assert grammar["lark_grammar"] == r'start: "a\n\"b\"\n  " /[^\n]{8,40}/ "\n" /[^\n]{8,40}/ ""'


def test_prompts_differ_and_none_is_empty() -> None:
    prompts = edits(96)
    assert len({tuple(prompt.ids) for prompt in prompts}) == 96
    assert min(len(prompt.ids) for prompt in prompts) > 100


def test_copies_and_loops_are_told_from_what_is_new() -> None:
    load = ClosedLoad([LoadPrompt([1, 2, 3, 4, 5, 6])], 1, 8)
    name = next(load.requests()).request_id
    assert copied(load, {name: [1, 2, 3, 4, 5, 6, 9, 9]}) == 2 / 8
    assert copied(load, {name: [7, 8, 7, 8]}) == 0
    assert distinct({name: [1, 2, 3, 4, 5]}) == 1
    assert distinct({name: [7] * 8}) == 1 / 5
