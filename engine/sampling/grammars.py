"""Grammars compiled for one model's tokenizer: from llguidance's own form to something that can follow an output.

Compiled ones are kept while somebody holds them, and the last used ones beyond that, bounded in bytes of their source.
Thread-safe; compiling and filling masks leave the interpreter to others. What a grammar may cost at most is said here,
and is the same in the process that tries grammars out first. Knows no request, no slot and no logits.
"""

import logging
import threading
import weakref
from collections import OrderedDict
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.errors import Code, ServiceError, invalid
from engine.models.fields import is_file

logger = logging.getLogger(__name__)

FIELD = "constraint"
MAX_KEPT_BYTES = 1 << 20  # of sources; a compiled one takes some ten times that
# A mask costs 14k of fuel a millisecond, and 20k items a millisecond; a lexer state takes 1 to 2 kB. An object with 100
# optional properties has rows of 500 items; with 2,000, the default, an ambiguous grammar takes 100 ms a token.
LIMITS = LLParserLimits(
    max_items_in_row=500,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class Grammar:
    """A compiled grammar at its beginning."""

    def __init__(self, source: str, start: LLMatcher) -> None:
        self.source = source
        self._start = start

    def matcher(self) -> LLMatcher:
        """One that follows an output from its first token."""
        return self._start.deep_copy()


class Grammars:
    """Compiles and keeps grammars."""

    def __init__(self, tokenizer: LLTokenizer | None) -> None:
        """Without a tokenizer every grammar is refused."""
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._alive: weakref.WeakValueDictionary[str, Grammar] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._num_bytes = 0

    def compiled(self, source: str) -> Grammar | None:
        """The grammar, if it has been compiled and somebody has it still."""
        with self._lock:
            return self._alive.get(source)

    def compile(self, source: str) -> Grammar:
        """The grammar. Raises ServiceError: no tokenizer, or it does not compile within the limits."""
        found = self.compiled(source)
        if found is not None:
            return found
        if self._tokenizer is None:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "NO_CONSTRAINTS",
                f"{FIELD}: output cannot be constrained with this model's tokenizer; leave it out",
                field=FIELD,
            )
        start = compile_grammar(self._tokenizer, source)
        if start.is_error():
            raise invalid(FIELD, "does not compile within this server's limits")
        made = Grammar(source, start)
        with self._lock:
            self._keep(made)
        return made

    def _keep(self, grammar: Grammar) -> None:
        """Two threads may have compiled the same: the later one stays."""
        replaced = self._kept.pop(grammar.source, None)
        self._num_bytes += 0 if replaced is not None else len(grammar.source)
        self._alive[grammar.source] = self._kept[grammar.source] = grammar
        while self._num_bytes > MAX_KEPT_BYTES:
            source, _ = self._kept.popitem(last=False)
            self._num_bytes -= len(source)


def compile_grammar(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """The matcher of a source, its first mask computed; in an error state if it does not compile within the limits."""
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # what it learns thereby, all its copies know
    return matcher


def load_tokenizer(path: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> LLTokenizer | None:
    """The tokenizer of a tokenizer.json, for logits of that width; None for one of a kind that grammars cannot follow.

    Takes 2 s for 152,000 ids, and leaves the interpreter to nobody meanwhile.
    """
    if not is_file(path) or not eos_ids:
        return None
    try:
        return LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=list(eos_ids))
    except ValueError as error:
        logger.info("no constrained output with %s: %s", path, error)
        return None
