"""Prompts are openings of functions, completion is greedy row by row, and trimming ends with the function."""

import pytest
import torch

from demo import bpe, completion
from demo.corpus import Document
from demo.model import Llama, Shape, initialise

SOURCE = '''\
import os

def documented(a,
               b):
    """Two lines
    of text."""
    # why
    return a

def only_documented():
    """Nothing else."""

def one_line(): return 1

def plain():
    return 2
'''
OPENING = 'def documented(a,\n               b):\n    """Two lines\n    of text."""\n    # why\n'


def test_openings_end_before_the_first_statement() -> None:
    assert list(completion.openings(SOURCE)) == [OPENING, "def plain():\n"]
    assert list(completion.openings("def broken(:\n")) == []


def test_prompts_are_those_short_enough() -> None:
    tokenizer = bpe.train_tokenizer([SOURCE] * 5, 300)
    long = f"def long():\n    '''{'word ' * 200}'''\n    return 1\n"
    chosen = completion.prompts(tokenizer, [Document("a.py", SOURCE), Document("b.py", long)])
    assert chosen == [OPENING, "def plain():\n"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("    return a\n\n\ndef other():\n", "    return a\n\n\n"),
        ("    a = 1\n    b = (", "    a = 1\n"),
        ("\n    a\n# remark\n    b\nclass", "\n    a\n# remark\n    b\n"),
        ("", ""),
    ],
)
def test_trimming_ends_with_the_function_or_the_last_line(text: str, kept: str) -> None:
    assert completion.trimmed(text) == kept


def test_rows_of_different_lengths_go_on_as_if_alone() -> None:
    shape = Shape(40, 16, 24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=64)
    model = Llama(shape)
    initialise(model, 3)
    with torch.no_grad():  # the zeros of a fresh model would make every layer a no-op
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)) * 0.3)
    rows = [[5, 6, 7], [8] * 20, [9]]
    together = completion.complete(model, rows, 12)
    assert together == [completion.complete(model, [row], 12)[0] for row in rows]
    assert all(bpe.END_OF_TEXT_ID not in row for row in together)


def test_what_parses_is_python() -> None:
    assert completion.is_python("def f():\n    return 1\n")
    assert not completion.is_python("def f():\n") and not completion.is_python("x = '\0'")
