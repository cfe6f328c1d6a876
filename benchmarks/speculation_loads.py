"""The prompts of the speculation benchmark, of two kinds, and statistics of their outputs.

*Edits*: code to be written out again with changes. The demo model has never learnt to copy (asked to go on with a text
that it was given, it ends an eighth of its tokens behind five that the prompt has), so a grammar stands in for that
skill: it holds the output to the lines that stay and to the new name of what is renamed; the lines that are replaced or
inserted the model writes itself. *Continuations*: texts begun again, to be gone on with freely: what comes is the
model's own, loops among it, and hardly an edit.
"""

import inspect
import json
import keyword
import random
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path

from tokenizers import Tokenizer

from sluice_server.engine.request import EngineRequest, SamplingParams

DEMO = Path(str(resources.files("sluice_server.demo")))
CONTINUED = ("heapq", "bisect", "textwrap", "shlex", "fnmatch", "netrc", "stat", "reprlib", "queue", "sched")
EDITED = ("argparse", "calendar", "configparser", "difflib", "gzip", "imaplib", "locale", "mailbox", "optparse")
GIVEN, AGAIN = 900, 300  # characters of a text, and how many of them are begun again
EVERY = 6  # lines, of which one is replaced, deleted, or followed by a new one
WRITTEN = r"/[^\n]{8,40}/"  # of a line that the model writes: as the grammar has it
COPIED = 5  # tokens that stand in the prompt one behind the other: the last of them is copied
Outputs = Mapping[str, Sequence[int]]  # ids, by request


@dataclass(frozen=True)
class LoadPrompt:
    """Attributes:
    grammar: that the output follows, in llguidance's form; empty: none.
    """

    ids: Sequence[int]
    grammar: str = ""


@dataclass(frozen=True)
class ClosedLoad:
    """Prompts of which `concurrency` are decoded at any time: when one ends, the next begins. Two thirds are
    sampled at temperature 0.7, the rest greedily, unless `temperature` says otherwise."""

    prompts: Sequence[LoadPrompt]
    concurrency: int
    num_tokens: int
    temperature: float | None = None

    def requests(self) -> Iterator[EngineRequest]:
        """The requests, in order."""
        for i, prompt in enumerate(self.prompts):
            warmth = self.temperature if self.temperature is not None else 0.7 * (i % 3 > 0)
            is_free = not prompt.grammar  # an output that follows a grammar is longer than what is asked for
            params = SamplingParams(
                max_tokens=self.num_tokens, temperature=warmth, seed=i, ignore_eos=is_free, grammar=prompt.grammar
            )
            yield EngineRequest(f"{i:032x}", tuple(prompt.ids), params)


def continuations(num: int) -> list[LoadPrompt]:
    """Texts to be continued."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    prompts = []
    for i in range(num):
        source = inspect.getsource(import_module(CONTINUED[i % len(CONTINUED)]))
        first = 100 + 700 * (i // len(CONTINUED))
        text = source[first : first + GIVEN]
        prompts.append(LoadPrompt(tokenizer.encode(f"{text}\n\n\n{text[:AGAIN]}").ids))
    return prompts


def edits(num: int) -> list[LoadPrompt]:
    """Texts, each with the grammar of its edits."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    prompts = []
    for i in range(num):
        source = inspect.getsource(import_module(EDITED[i % len(EDITED)]))
        first = source.index("\n", 1000 + 700 * (i // len(EDITED))) + 1
        lines = source[first : first + GIVEN].splitlines(keepends=True)[:-1]  # the last is cut
        ids = tokenizer.encode("".join(lines) + "\n\n# Revised:\n\n").ids
        prompts.append(LoadPrompt(ids, grammar_of(edited(lines, random.Random(i), renames=bool(i % 2)))))
    return prompts


def edited(lines: Sequence[str], rng: random.Random, *, renames: bool) -> list[str | None]:
    """Lines with changes: kept lines, and None where new text is to be written, up to the end of its line."""
    if renames:
        names = Counter(re.findall(r"\b[a-z_]\w{3,}(?=[(),.= ])", "".join(lines)))
        name = next((one for one, _ in names.most_common() if not keyword.iskeyword(one)), "self")
        lines = [re.sub(rf"\b{name}\b", f"new_{name}", line) for line in lines]
    parts: list[str | None] = []
    for i, line in enumerate(lines):
        if i % EVERY != EVERY // 2 or not line.strip():
            parts.append(line)
            continue
        change = rng.choice(("replace", "delete", "insert"))
        if change == "insert":
            parts.append(line)
        if change != "delete":
            parts += [line[: len(line) - len(line.lstrip())], None, "\n"]
    return parts


def grammar_of(parts: Sequence[str | None]) -> str:
    """The grammar of an output of these lines."""
    ends = [i for i, part in enumerate(parts) if part is None]
    runs = [parts[first:last] for first, last in zip([0, *(i + 1 for i in ends)], [*ends, len(parts)], strict=True)]
    kept = [json.dumps("".join(part for part in run if part), ensure_ascii=False) for run in runs]
    return json.dumps({"grammars": [{"lark_grammar": "start: " + f" {WRITTEN} ".join(kept)}]})


def distinct(outputs: Outputs) -> float:
    """Share of 4-grams that differ within each output: loops have few."""
    grams = [[tuple(ids[i : i + 4]) for i in range(len(ids) - 3)] for ids in outputs.values()]
    return statistics.mean(len(set(found)) / len(found) for found in grams)


def copied(load: ClosedLoad, outputs: Outputs) -> float:
    """Share of tokens that are copied from the prompt: see COPIED."""
    shares = []
    for request in load.requests():
        prompt, output = list(request.prompt_ids), outputs[request.request_id]
        given = {tuple(prompt[i : i + COPIED]) for i in range(len(prompt) - COPIED + 1)}
        ids = [*prompt[-COPIED + 1 :], *output]
        shares.append(sum(tuple(ids[i : i + COPIED]) in given for i in range(len(output))) / len(output))
    return statistics.mean(shares)
