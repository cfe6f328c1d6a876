"""Reads a checkpoint's tokenizer for grammars: for the engine, and for the child process that tests grammars."""

import logging
from pathlib import Path

from llguidance import LLTokenizer

from sluice_server.engine.models.fields import is_file
from sluice_server.engine.sampling.grammars import Grammars

logger = logging.getLogger(__name__)


def load_tokenizer(path: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> LLTokenizer | None:
    """Returns the tokenizer of a tokenizer.json for logits of that width; None if grammars cannot follow its kind.

    Takes 2 s for 152,000 ids and holds the GIL meanwhile.
    """
    if not is_file(path) or not eos_ids:
        return None
    try:
        return LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=list(eos_ids))
    except ValueError as error:
        logger.info("no constrained output with %s: %s", path, error)
        return None


def grammars_of(directory: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> Grammars:
    """Returns the grammar compiler of a checkpoint; it rejects every grammar if it cannot follow the tokenizer."""
    return Grammars(load_tokenizer(directory / "tokenizer.json", vocab_size, eos_ids))
