"""How often what a demo model writes is Python.

In: a model, its tokenizer and held-out documents. Out: the share of completed functions that `ast.parse` accepts and
that do something.
Decoding has no cache: it is a measurement, not a server.
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
TEMPERATURE = 0.7  # greedy, a model of this size falls into loops
SEED = 0
ROWS_AT_ONCE = 10  # of like length, so that little is computed for padding

Choice = Callable[[Tensor], Tensor]  # logits [rows, vocab] to ids [rows]


def parse_rate(model: Llama, tokenizer: Tokenizer, documents: Sequence[Document]) -> float:
    """The share of completions, of `NUM_PROMPTS` prompts, that make a function of their prompt."""
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
    """Openings of held-out functions, evenly spread over all those short enough."""
    every = [text for document in documents for text in openings(document.text)]
    short = [text for text in every if len(tokenizer.encode(text, add_special_tokens=False).ids) <= MAX_PROMPT_TOKENS]
    wanted = min(NUM_PROMPTS, len(short))
    return [short[i * len(short) // wanted] for i in range(wanted)]


def openings(source: str) -> Iterator[str]:
    """Of each module-level function of more than its docstring: every line before its first statement.

    The last line's end is left to the model: tokens join it with the indentation that follows.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:  # templates for code generators, and files kept for other versions
        return
    lines = source.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            rest = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if rest and rest[0].lineno > node.lineno:
                yield "".join(lines[node.lineno - 1 : rest[0].lineno - 1]).rstrip()


@torch.inference_mode()
def complete(model: Llama, prompt_ids: Sequence[list[int]], num_new: int, choose: Choice) -> list[list[int]]:
    """`num_new` tokens after each prompt, chosen one by one; cut at the end of text."""
    lengths = torch.tensor([len(ids) for ids in prompt_ids])
    rows = torch.zeros(len(prompt_ids), int(lengths.max()) + num_new, dtype=torch.int64)
    for row, ids in zip(rows, prompt_ids, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    at = torch.arange(len(prompt_ids))
    for step in range(num_new):
        # The rows are padded on the right: a causal model does not see it.
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
    """Up to where the function ends (a line that starts at the margin), or else to the last complete line."""
    head, *lines = completion.splitlines(keepends=True) or [""]
    kept = [head]  # the rest of the prompt's own last line
    for line in lines:
        if not line.endswith("\n") or not (line[0].isspace() or line[0] == "#"):
            break
        kept.append(line)
    return "".join(kept)


def is_function(source: str) -> bool:
    """Whether `source` parses, and begins with a function of more than its docstring."""
    try:
        (first, *_) = ast.parse(source).body
    except (SyntaxError, ValueError):
        return False
    return isinstance(first, ast.FunctionDef) and len(first.body) > (ast.get_docstring(first) is not None)
