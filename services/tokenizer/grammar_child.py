"""Runs the child process that tests grammars, one after another, until its input ends. Its parent limits its time.

It compiles a grammar as an engine does, with the same ids and limits, and follows it for some random tokens. The
process holds no secrets, sockets or files, and its memory is limited.
"""

import random
import re
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from sluice_server.engine.sampling.grammars import compile_grammar
from sluice_server.services.checkpoint.grammar_ids import load_tokenizer
from sluice_server.services.messages.work import ConstraintForm
from sluice_server.services.process.background import lower_process
from sluice_server.services.tokenizer.child_pipe import ChildReady, Unready, begin, confine, receive, send, serve
from sluice_server.services.tokenizer.grammar_errors import FormError
from sluice_server.services.tokenizer.grammar_forms import grammar_of, place_of, schema_of
from sluice_server.services.tokenizer.grammar_frames import (
    Answer,
    Compiled,
    GrammarJob,
    GrammarSetup,
    InvalidGrammar,
    TooComplex,
    UnsupportedGrammar,
)

WALKS, STEPS = 2, 32  # random outputs for each grammar, and the tokens of each
MAX_MESSAGE = 300  # characters of the library's error message
_LIMITS = re.compile(r"too (many|complex|large|big|deep)|limit|exceed|fuel", re.IGNORECASE)
_LARK_PLACE = re.compile(r"^at \d+\(\d+\): ")


def main() -> None:
    """Serves the parent at the other end of stdin and stdout."""
    begin()
    lower_process()
    setup = receive(GrammarSetup)
    if setup is None:
        return
    tokenizer = load_tokenizer(Path(setup.tokenizer), setup.vocab_size, setup.eos_ids)
    if tokenizer is None:
        send(Unready())
        return
    confine(address_space() + setup.memory_bytes)
    send(ChildReady())
    serve(GrammarJob, lambda job: answer(tokenizer, job))


def address_space() -> int:
    """Returns the bytes of address space that this process has mapped."""
    return int(re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10


def answer(tokenizer: LLTokenizer, job: GrammarJob) -> Answer:
    """Compiles a job's grammar and follows it."""
    try:
        grammar = grammar_of(job)
        matcher = compile_grammar(tokenizer, grammar)
        if matcher.is_error():
            return _refused(job, matcher.get_error())
        is_sound = all(_follow(matcher.deep_copy(), random.Random(seed)) for seed in range(WALKS))
    except FormError as error:
        return InvalidGrammar(error.message[:MAX_MESSAGE], error.place)
    except (RecursionError, MemoryError):
        return TooComplex()
    return Compiled(grammar) if is_sound else TooComplex()


def _follow(matcher: LLMatcher, rng: random.Random) -> bool:
    """Follows random allowed tokens; returns False if the matcher fails."""
    for _ in range(STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return False
        if matcher.is_stopped():
            break
        matcher.consume_token(_any_bit(mask, rng))
    return True


def _any_bit(mask: bytes, rng: random.Random) -> int:
    """Returns the index of a set bit, searching from a random byte on."""
    start = rng.randrange(len(mask))
    turned = mask[start:] + mask[:start]
    skipped = len(turned) - len(turned.lstrip(b"\0"))
    byte = turned[skipped]
    bit = rng.choice([bit for bit in range(8) if byte >> bit & 1])
    return (start + skipped) % len(mask) * 8 + bit


def _refused(job: GrammarJob, error: str) -> Answer:
    """Builds the answer for a grammar that did not compile: the library's message, and the place where it is known."""
    first = error.strip().split("\n<")[0]
    constraint = job.constraint
    if _LIMITS.search(first.partition("\n")[0]):
        return TooComplex()
    if constraint is None or constraint.form is ConstraintForm.JSON_SCHEMA:
        place = "" if constraint is None else place_of(schema_of(constraint.source), error)
        kind = UnsupportedGrammar if first.startswith("Unimplemented") else InvalidGrammar
        return kind(first.partition("\n")[0][:MAX_MESSAGE], place)
    if constraint.form is ConstraintForm.REGEX:
        return _regex_refused(first)
    return InvalidGrammar(_LARK_PLACE.sub("", first.partition("\n")[0])[:MAX_MESSAGE])


def _regex_refused(error: str) -> InvalidGrammar:
    """Takes message and place from an error of the regex crate: the expression, a line with a caret, and `error: …`."""
    lines = error.splitlines()
    said = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    caret = next((line for line in lines if line.strip() and not line.strip("^ ")), "")
    return InvalidGrammar(said[:MAX_MESSAGE], f"character {caret.index('^') - 3}" if caret else "")


if __name__ == "__main__":
    main()
