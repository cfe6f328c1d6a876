"""Compiles grammars for one model's tokenizer with llguidance, and caches them.

A grammar is kept while a request holds it. The last used ones are kept beyond that, bounded by an estimate of the bytes
that they take at most: llguidance reports no sizes, and its grammars grow while outputs are followed. Thread-safe;
compiling and filling masks release the GIL. The limits on a grammar's cost are defined here and are also those of the
process that tries grammars out first. Depends on llguidance's tokenizer, which is an argument; not on requests, slots,
logits or files.
"""

import threading
import weakref
from collections import OrderedDict

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from sluice_server.engine.errors import Code, ServiceError, invalid

FIELD = "constraint"
MAX_KEPT_BYTES = 32 << 20
NUM_KEPT = 4  # at least, however large: compiling a frequent grammar again takes time
# Measured with vocabularies of 1,300 and 49,000 ids: 30 to 200 kB once compiled, and 1.6 kB (a schema) to 45 kB
# (alternatives that overlap) more for each mask, until no lexer state is new.
COMPILED_BYTES = 256 << 10
BYTES_PER_SOURCE_BYTE = 16
BYTES_PER_MASK = 64 << 10
BYTES_PER_LEXER_STATE = 2 << 10
MAX_LEXER_STATES = 20_000
# A mask costs 14k of fuel a millisecond, and 20k items a millisecond; a lexer state takes 1 to 2 kB. An object with 100
# optional properties has rows of 500 items; with 2,000, the default, an ambiguous grammar takes 100 ms a token.
LIMITS = LLParserLimits(
    max_items_in_row=500,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=MAX_LEXER_STATES,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class Grammar:
    """A compiled grammar in its initial state.

    Attributes:
        num_masks: masks computed of it; its matchers share the lexer states that these add.
    """

    def __init__(self, source: str, start: LLMatcher) -> None:
        self.source = source
        self.num_masks = 0
        self._start = start

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes at most."""
        learnt = min(self.num_masks * BYTES_PER_MASK, MAX_LEXER_STATES * BYTES_PER_LEXER_STATE)
        return COMPILED_BYTES + len(self.source) * BYTES_PER_SOURCE_BYTE + learnt

    def matcher(self) -> LLMatcher:
        """Returns a matcher that follows an output from its first token."""
        return self._start.deep_copy()


class Grammars:
    """Compiles and caches grammars."""

    def __init__(self, tokenizer: LLTokenizer | None) -> None:
        """Creates an empty cache. Without a tokenizer `compile` raises for every grammar."""
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._alive: weakref.WeakValueDictionary[str, Grammar] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._dropped_bytes = 0
        self._signs: dict[int, bool] = {}  # by token, of those that were asked for

    @property
    def num_bytes(self) -> int:
        """The bytes that the cached grammars take at most; a request may hold them or not."""
        with self._lock:
            return sum([grammar.num_bytes for grammar in self._kept.values()])

    def take_dropped_bytes(self) -> int:
        """Returns the bytes dropped from the cache since the last call."""
        with self._lock:
            dropped, self._dropped_bytes = self._dropped_bytes, 0
            return dropped

    def is_sign(self, token: int) -> bool:
        """Returns whether a token's text has neither letters nor digits nor bytes beyond ASCII."""
        if self._tokenizer is None:
            return False
        found = self._signs.get(token)
        if found is None:
            text = self._tokenizer.decode_bytes([token])
            found = self._signs[token] = text.isascii() and not any(chr(one).isalnum() for one in text)
        return found

    def compiled(self, source: str) -> Grammar | None:
        """Returns the grammar if it is cached or in use, else None."""
        with self._lock:
            found = self._alive.get(source)
            if found is not None:
                self._keep(found)
            return found

    def compile(self, source: str) -> Grammar:
        """Returns the grammar, compiled if necessary.

        Raises ServiceError NO_CONSTRAINTS without a tokenizer, and an invalid-argument error beyond the limits.
        """
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
        """Makes the grammar the last used one. If two threads compiled the same, the later one is kept."""
        self._kept.pop(grammar.source, None)
        self._alive[grammar.source] = self._kept[grammar.source] = grammar
        num_bytes = sum([one.num_bytes for one in self._kept.values()])
        while num_bytes > MAX_KEPT_BYTES and len(self._kept) > NUM_KEPT:
            _, dropped = self._kept.popitem(last=False)
            num_bytes -= dropped.num_bytes
            self._dropped_bytes += dropped.num_bytes


def compile_grammar(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Returns a matcher with its first mask computed; it is in an error state if the source exceeds the limits."""
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # its copies share the states that this computes
    return matcher
