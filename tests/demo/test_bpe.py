"""The tokenizer's training: any text round-trips, and the stream keeps documents apart."""

import numpy as np

from sluice_server.demo import bpe
from sluice_server.demo.corpus import Document

TEXTS = ["def add(a, b):\n    return a + b\n", "for i in range(10):\n    print(i)\n"] * 5


def test_text_of_bytes_never_seen_round_trips() -> None:
    tokenizer = bpe.train_tokenizer(TEXTS, vocab_size=300)
    text = "ünseen ✂️\t\x00 <|endoftext>\r\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_to_id(bpe.END_OF_TEXT) == bpe.END_OF_TEXT_ID and bpe.END_OF_TEXT_ID not in ids


def test_training_twice_gives_one_tokenizer() -> None:
    assert bpe.train_tokenizer(TEXTS, 300).to_str() == bpe.train_tokenizer(TEXTS, 300).to_str()


def test_the_stream_opens_each_document_and_closes_the_last() -> None:
    tokenizer = bpe.train_tokenizer(TEXTS, vocab_size=300)
    ids = bpe.stream(bpe.encode_documents(tokenizer, [Document("a.py", TEXTS[0]), Document("b.py", TEXTS[1])]))
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == f"{bpe.END_OF_TEXT}{TEXTS[0]}" + (
        f"{bpe.END_OF_TEXT}{TEXTS[1]}{bpe.END_OF_TEXT}"
    )
