"""Measures how often a demo model's completions are valid Python.

In: a model, its tokenizer and held-out documents. Out: the share of completed functions that `ast.parse` accepts and
    that have a statement besides their docstring. Decoding uses no cache.
"""

import ast
from collections.abc import Callable, Iterator, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sluice_server.demo.bpe import END_OF_TEXT_ID
from sluice_server.demo.corpus import Document
from sluice_server.demo.model import Llama

NUM_PROMPTS = 100
MAX_PROMPT_TOKENS = 128
NUM_NEW_TOKENS = 96
TEMPERATURE = 0.7  # with greedy sampling a model of this size repeats itself
SEED = 0
ROWS_AT_ONCE = 10  # rows of similar length, so that there is little padding

Choice = Callable[[Tensor], Tensor]  # logits [rows, vocab] to ids [rows]


def parse_rate(model: Llama, tokenizer: Tokenizer, documents: Sequence[Document]) -> float:
    """Returns the share of `NUM_PROMPTS` prompts whose completion makes a function of them."""
    chosen = prompts(tokenizer, documents)
    chosen.sort(key=len)
    choose = sampler(TEMPERATURE, SEED)
    num_parsed = 0
    for begin in range(0, len(chosen), ROWS_AT_ONCE):
        group = chosen[begin : begin + ROWS_AT_ONCE]
        encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in group]
        completions = [tokenizer.decode(ids) for ids in complete(model, encoded, NUM_NEW_TOKENS, choose)]
        num_parsed += sum(is_function(prompt + trimmed(text)) for prompt, text in zip(group, completions, strict=True))
    return num_parsed / len(chosen)


def prompts(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[str]:
    """Returns beginnings of held-out functions, evenly spread over all those that are short enough."""
    every = [text for document in documents for text in openings(document.text)]
    short = [text for text in every if len(tokenizer.encode(text, add_special_tokens=False).ids) <= MAX_PROMPT_TOKENS]
    wanted = min(NUM_PROMPTS, len(short))
    return [short[i * len(short) // wanted] for i in range(wanted)]


def openings(source: str) -> Iterator[str]:
    """Yields, for each module-level function with more than a docstring, every line before its first statement.

    The last line break is left to the model: tokens join it with the indentation that follows.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:  # templates of code generators, and files for other versions
        return
    lines = source.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            rest = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if rest and rest[0].lineno > node.lineno:
                yield "".join(lines[node.lineno - 1 : rest[0].lineno - 1]).rstrip()


@torch.inference_mode()
def complete(model: Llama, prompt_ids: Sequence[list[int]], num_new: int, choose: Choice) -> list[list[int]]:
    """Returns `num_new` sampled tokens for each prompt, cut at the end of text."""
    lengths = torch.tensor([len(ids) for ids in prompt_ids])
    rows = torch.zeros(len(prompt_ids), int(lengths.max()) + num_new, dtype=torch.int64)
    for row, ids in zip(rows, prompt_ids, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    at = torch.arange(len(prompt_ids))
    for step in range(num_new):
        # Rows are padded on the right, which a causal model never reads.
        logits = model(rows[:, : int(lengths.max()) + step])
        rows[at, lengths + step] = choose(logits[at, lengths + step - 1])
    return [until_end(row[len(ids) : len(ids) + num_new].tolist()) for row, ids in zip(rows, prompt_ids, strict=True)]


def sampler(temperature: float, seed: int) -> Choice:
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> Tensor:
        return torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)[:, 0]

    return choose


def until_end(ids: list[int]) -> list[int]:
    return ids[: ids.index(END_OF_TEXT_ID)] if END_OF_TEXT_ID in ids else ids


def trimmed(completion: str) -> str:
    """Cut the completion at the end of the function (a line that starts at the margin) or after its last whole line."""
    head, *lines = completion.splitlines(keepends=True) or [""]
    kept = [head]  # the rest of the prompt's own last line
    for line in lines:
        if not line.endswith("\n") or not (line[0].isspace() or line[0] == "#"):
            break
        kept.append(line)
    return "".join(kept)


def is_function(source: str) -> bool:
    """Whether `source` parses and begins with a function that has more than a docstring."""
    try:
        (first, *_) = ast.parse(source).body
    except (SyntaxError, ValueError):
        return False
    return isinstance(first, ast.FunctionDef) and len(first.body) > (ast.get_docstring(first) is not None)
