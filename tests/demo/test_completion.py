"""The completion benchmark: prompts are openings of functions, rows are completed, and text ends with the function."""

import pytest
import torch

from sluice_server.demo import bpe, completion
from sluice_server.demo.corpus import Document
from sluice_server.demo.model import Llama, ModelShape, initialise

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
OPENING = 'def documented(a,\n               b):\n    """Two lines\n    of text."""\n    # why'


def test_openings_end_before_the_first_statement() -> None:
    assert list(completion.openings(SOURCE)) == [OPENING, "def plain():"]
    assert list(completion.openings("def broken(:\n")) == []


def test_prompts_are_those_short_enough() -> None:
    tokenizer = bpe.train_tokenizer([SOURCE] * 5, 300)
    long = f"def long():\n    '''{'word ' * 200}'''\n    return 1\n"
    chosen = completion.prompts(tokenizer, [Document("a.py", SOURCE), Document("b.py", long)])
    assert chosen == [OPENING, "def plain():"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("\n    return a\n\n\ndef other():\n", "\n    return a\n\n\n"),
        (" # same line\n    a = 1\n    b = (", " # same line\n    a = 1\n"),
        ("\n    a\n# remark\n    b\nclass", "\n    a\n# remark\n    b\n"),
        ("", ""),
    ],
)
def test_trimming_ends_with_the_function_or_the_last_line(text: str, kept: str) -> None:
    assert completion.trimmed(text) == kept


def test_rows_of_different_lengths_go_on_as_if_alone() -> None:
    shape = ModelShape(40, 16, 24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=64)
    model = Llama(shape)
    initialise(model, 3)
    with torch.no_grad():  # the zeros of a fresh model would make every layer a no-op
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)) * 0.3)
    rows = [[5, 6, 7], [8] * 20, [9]]
    together = completion.complete(model, rows, 12, likeliest)
    assert together == [completion.complete(model, [row], 12, likeliest)[0] for row in rows]
    assert all(bpe.END_OF_TEXT_ID not in row for row in together)


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1)


def test_sampling_follows_the_seed_and_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, -50.0]]).expand(2000, 3)
    drawn = completion.sampler(0.5, seed=1)(logits)
    assert torch.equal(drawn, completion.sampler(0.5, seed=1)(logits))
    assert not torch.equal(drawn, completion.sampler(0.5, seed=2)(logits))
    assert drawn.float().mean().item() == pytest.approx(torch.tensor(2.0).sigmoid().item(), abs=0.03)


def test_a_function_does_something() -> None:
    assert completion.is_function("def f():\n    return 1\n")
    assert completion.is_function("def f():\n    '''Said.'''\n    return 1\n")
    for source in ("def f():\n", "x = '\0'", "def f():\n    '''Said.'''\n", "x = 1", ""):
        assert not completion.is_function(source), source


def test_the_rate_counts_what_the_model_made(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = bpe.train_tokenizer([SOURCE] * 5, 300)
    answers = {OPENING: "\n    return a\n", "def plain():": " ("}

    def complete(model: object, prompt_ids: list[list[int]], num_new: int, choose: object) -> list[list[int]]:
        return [tokenizer.encode(answers[tokenizer.decode(ids)]).ids for ids in prompt_ids]

    monkeypatch.setattr(completion, "complete", complete)
    model = Llama(ModelShape(300, 16, 24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8))
    assert completion.parse_rate(model, tokenizer, [Document("a.py", SOURCE)]) == 0.5
