"""How often what a demo model writes is Python.

In: a model, its tokenizer and held-out documents. Out: the share of completed functions that `ast.parse` accepts.
Decoding is greedy and has no cache: it is a measurement, not a server.
"""

import ast
from collections.abc import Iterator, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo.bpe import END_OF_TEXT_ID
from demo.corpus import Document
from demo.model import Llama

NUM_PROMPTS = 100
MAX_PROMPT_TOKENS = 128
NUM_NEW_TOKENS = 96


def parse_rate(model: Llama, tokenizer: Tokenizer, documents: Sequence[Document]) -> float:
    """The share of completions, of `NUM_PROMPTS` prompts, that parse together with their prompt."""
    chosen = prompts(tokenizer, documents)
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in chosen]
    completions = [tokenizer.decode(ids) for ids in complete(model, encoded, NUM_NEW_TOKENS)]
    parsed = [is_python(prompt + trimmed(text)) for prompt, text in zip(chosen, completions, strict=True)]
    return sum(parsed) / len(parsed)


def prompts(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[str]:
    """Openings of held-out functions, evenly spread over all those short enough."""
    every = [text for document in documents for text in openings(document.text)]
    short = [text for text in every if len(tokenizer.encode(text, add_special_tokens=False).ids) <= MAX_PROMPT_TOKENS]
    wanted = min(NUM_PROMPTS, len(short))
    return [short[i * len(short) // wanted] for i in range(wanted)]


def openings(source: str) -> Iterator[str]:
    """Of each module-level function of more than its docstring: every line before its first statement."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # templates for code generators, and files kept for other versions
        return
    lines = source.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            rest = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if rest and rest[0].lineno > node.lineno:
                yield "".join(lines[node.lineno - 1 : rest[0].lineno - 1])


@torch.inference_mode()
def complete(model: Llama, prompt_ids: Sequence[list[int]], num_new: int) -> list[list[int]]:
    """The `num_new` likeliest tokens after each prompt, taken one by one; cut at the end of text."""
    lengths = torch.tensor([len(ids) for ids in prompt_ids])
    rows = torch.zeros(len(prompt_ids), int(lengths.max()) + num_new, dtype=torch.int64)
    for row, ids in zip(rows, prompt_ids, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    at = torch.arange(len(prompt_ids))
    for step in range(num_new):
        # The rows are padded on the right: a causal model does not see it.
        rows[at, lengths + step] = next_ids(model, rows[:, : int(lengths.max()) + step], lengths + step - 1)
    return [until_end(row[len(ids) : len(ids) + num_new].tolist()) for row, ids in zip(rows, prompt_ids, strict=True)]


def next_ids(model: Llama, rows: Tensor, last: Tensor) -> Tensor:
    """The likeliest id after place `last` [rows] of each row; in groups, so that the logits stay small."""
    groups = zip(torch.split(rows, 10), torch.split(last, 10), strict=True)
    return torch.cat([model(group)[torch.arange(group.shape[0]), places].argmax(1) for group, places in groups])


def until_end(ids: list[int]) -> list[int]:
    return ids[: ids.index(END_OF_TEXT_ID)] if END_OF_TEXT_ID in ids else ids


def trimmed(completion: str) -> str:
    """Up to where the function ends (a line that starts at the margin), or else to the last complete line."""
    kept: list[str] = []
    for line in completion.splitlines(keepends=True):
        if not line.endswith("\n") or not (line[0].isspace() or line[0] == "#"):
            break
        kept.append(line)
    return "".join(kept)


def is_python(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True
