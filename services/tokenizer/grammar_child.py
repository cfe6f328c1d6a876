"""The process that tries grammars out, one after another, until its input ends. Its parent bounds its time.

It compiles them as an engine will, for the same ids and with the same limits, and follows each for a while: what passes
can be followed. It holds no secret, no socket and no file, and may use only so much memory.
"""

import random
import re
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from sluice_server.engine.sampling.grammars import compile_grammar
from sluice_server.services.checkpoint.grammar_ids import load_tokenizer
from sluice_server.services.messages.work import ConstraintForm
from sluice_server.services.tokenizer.child_pipe import Ready, Unready, begin, confine, receive, send, serve
from sluice_server.services.tokenizer.grammar_forms import FormError, grammar_of, place_of, schema_of
from sluice_server.services.tokenizer.grammar_frames import (
    Answer,
    Compiled,
    GrammarJob,
    GrammarSetup,
    InvalidGrammar,
    TooComplex,
    UnsupportedGrammar,
)

WALKS, STEPS = 2, 32  # of outputs that are tried, and their tokens
MAX_MESSAGE = 300  # characters of the library's own words
_LIMITS = re.compile(r"too (many|complex|large|big|deep)|limit|exceed|fuel", re.IGNORECASE)
_LARK_PLACE = re.compile(r"^at \d+\(\d+\): ")


def main() -> None:
    """Serve the parent at the other end of stdin and stdout."""
    begin()
    setup = receive(GrammarSetup)
    if setup is None:
        return
    tokenizer = load_tokenizer(Path(setup.tokenizer), setup.vocab_size, setup.eos_ids)
    if tokenizer is None:
        send(Unready())
        return
    confine(address_space() + setup.memory_bytes)
    send(Ready())
    serve(GrammarJob, lambda job: answer(tokenizer, job))


def address_space() -> int:
    """Bytes that this process has mapped."""
    return int(re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10


def answer(tokenizer: LLTokenizer, job: GrammarJob) -> Answer:
    """Compile and follow it."""
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
    """Whether it can be followed, some way chosen at random."""
    for _ in range(STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return False
        if matcher.is_stopped():
            break
        matcher.consume_token(_any_bit(mask, rng))
    return True


def _any_bit(mask: bytes, rng: random.Random) -> int:
    """Index of a bit that is set, from a byte drawn at random onwards."""
    start = rng.randrange(len(mask))
    turned = mask[start:] + mask[:start]
    skipped = len(turned) - len(turned.lstrip(b"\0"))
    byte = turned[skipped]
    bit = rng.choice([bit for bit in range(8) if byte >> bit & 1])
    return (start + skipped) % len(mask) * 8 + bit


def _refused(job: GrammarJob, error: str) -> Answer:
    """What the library says, without the text that it repeats, and the place where that can be told."""
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
    r"""The regex crate writes the expression, a line with a caret below it, and `error: …`."""
    lines = error.splitlines()
    said = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    caret = next((line for line in lines if line.strip() and not line.strip("^ ")), "")
    return InvalidGrammar(said[:MAX_MESSAGE], f"character {caret.index('^') - 3}" if caret else "")


if __name__ == "__main__":
    main()
