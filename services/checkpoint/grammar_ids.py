"""A checkpoint's tokenizer as grammars follow it: read for the engine and for who tries grammars out."""

import logging
from pathlib import Path

from llguidance import LLTokenizer

from sluice_server.engine.models.fields import is_file
from sluice_server.engine.sampling.grammars import Grammars

logger = logging.getLogger(__name__)


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


def grammars_of(directory: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> Grammars:
    """What compiles grammars for a checkpoint; it refuses them all where they cannot follow its tokenizer."""
    return Grammars(load_tokenizer(directory / "tokenizer.json", vocab_size, eos_ids))
