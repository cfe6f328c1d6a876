"""The tokenizer of both demo models: byte-level BPE, trained on the training split.

In: documents. Out: a `tokenizers.Tokenizer`, and documents as one stream of ids. Every byte has an id, so any text
    round-trips. Independent of the models.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from sluice_server.demo.corpus import Document

# On the held-out tenth: 3.5 bytes per token (2048 pieces: 3.1). The embeddings are a quarter of the target's weights.
VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"  # before every document: begins one and ends the one before
END_OF_TEXT_ID = 0

Ids = npt.NDArray[np.int64]


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def encode_documents(tokenizer: Tokenizer, documents: Iterable[Document]) -> list[Ids]:
    """Returns each document's ids (int64), starting with the end-of-text id."""
    encodings = tokenizer.encode_batch([document.text for document in documents], add_special_tokens=False)
    return [np.array([END_OF_TEXT_ID, *encoding.ids], dtype=np.int64) for encoding in encodings]


def stream(encoded: list[Ids]) -> Ids:
    """Returns all documents one after another, with a final end-of-text id."""
    return np.concatenate([*encoded, np.array([END_OF_TEXT_ID], dtype=np.int64)])
