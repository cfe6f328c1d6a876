"""The baseline for the neural models: an interpolated Kneser-Ney n-gram model over bytes or tokens.

In: sequences of small integers. Out: the log-probability of every symbol of other sequences. One discount for each
    order, estimated from the counts (Ney, Essen and Kneser 1994). The lowest order is interpolated with the uniform
    distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """The counts of one order, and the mass that each context leaves to the order below. Keys are numbers to base
    radix."""

    grams: Ids  # sorted keys of context and symbol
    counts: Ids  # per gram: occurrences at the top order, at lower orders the number of symbols seen before it
    contexts: Ids  # sorted keys of contexts
    totals: Ids  # per context: sum of its counts
    num_kinds: Ids  # per context: number of distinct symbols seen after it
    discount: float  # subtracted from each count


@dataclass(frozen=True)
class KneserNey:
    order: int  # length of a gram: the predicted symbol and order - 1 before it
    num_symbols: int  # symbols are 0 .. num_symbols - 1
    tables: tuple[Table, ...]  # by order, from 1

    def log_probabilities(self, sequence: Ids) -> Floats:
        """Returns the natural log-probability of each symbol after those before it; float64, as long as `sequence`."""
        keys = gram_keys([sequence], self.order, self.num_symbols)
        radix = self.num_symbols + 1
        probability = np.full(sequence.shape, 1 / self.num_symbols)
        for order, table in enumerate(self.tables, start=1):
            grams = keys % radix**order
            probability = interpolate(table, grams, grams // radix, probability)
        logarithms: Floats = np.log(probability)
        return logarithms


def fit(sequences: Sequence[Ids], order: int, num_symbols: int) -> KneserNey:
    """Count `sequences`, each preceded by order - 1 symbols that occur nowhere else."""
    radix = num_symbols + 1
    assert radix**order < 2**63, "a gram's key must fit in an int64"
    grams, counts = np.unique(gram_keys(sequences, order, num_symbols), return_counts=True)
    tables = [table_of(grams, counts.astype(np.int64), radix)]
    for lower in range(order - 1, 0, -1):
        grams, counts = np.unique(grams % radix**lower, return_counts=True)
        tables.append(table_of(grams, counts.astype(np.int64), radix))
    return KneserNey(order, num_symbols, tuple(reversed(tables)))


def gram_keys(sequences: Sequence[Ids], order: int, num_symbols: int) -> Ids:
    """Returns one key for each symbol of each sequence: the symbol in the lowest digit, the order - 1 before it
    above."""
    return np.concatenate([keys_of_one(sequence, order, num_symbols) for sequence in sequences])


def keys_of_one(sequence: Ids, order: int, num_symbols: int) -> Ids:
    padded = np.concatenate([np.full(order - 1, num_symbols, dtype=np.int64), sequence])
    keys = np.zeros(sequence.shape, dtype=np.int64)
    for place in range(order):
        keys = keys * (num_symbols + 1) + padded[place : place + sequence.shape[0]]
    return keys


def table_of(grams: Ids, counts: Ids, radix: int) -> Table:
    contexts, first, num_kinds = np.unique(grams // radix, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, first)
    return Table(grams, counts, contexts, totals, num_kinds.astype(np.int64), discount_of(counts))


def discount_of(counts: Ids) -> float:
    """Returns n1 / (n1 + 2 n2), where n1 grams were counted once and n2 twice; 0.5 if none were counted once."""
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2 * twice) if once else 0.5  # never 0, so that unseen grams keep some probability


def interpolate(table: Table, grams: Ids, contexts: Ids, lower: Floats) -> Floats:
    counts = look_up(table.grams, table.counts, grams)
    totals = look_up(table.contexts, table.totals, contexts)
    num_kinds = look_up(table.contexts, table.num_kinds, contexts)
    kept = np.maximum(counts - table.discount, 0.0) + table.discount * num_kinds * lower
    return np.where(totals > 0, kept / np.maximum(totals, 1), lower)


def look_up(keys: Ids, values: Ids, wanted: Ids) -> Ids:
    """Returns the value of each wanted key; 0 for unknown keys."""
    places = np.minimum(np.searchsorted(keys, wanted), keys.shape[0] - 1)
    found: Ids = np.where(keys[places] == wanted, values[places], 0)
    return found
