"""Tiny real tokenizers of the three families, saved as Hugging Face directories hold them."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = [
    "hello world, the quick brown fox jumps over the lazy dog",
    "def f(x):\n    return x + 1  # naïve café über straße",
    "你好 世界 こんにちは мир 😀 🎉 👩‍💻 emoji",
] * 20
SPECIALS = ["<s>", "</s>", "<|user|>"]


def byte_level_bpe(directory: Path) -> Tokenizer:
    """A byte-level BPE as in GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens(["addedword"])
    return _save(tokenizer, directory)


def metaspace_byte_fallback(directory: Path) -> Tokenizer:
    """A BPE with byte fallback as in Llama 1, Llama 2 and Mistral."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    strip = decoders.Strip(" ", 1, 0)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(steps)
    fallbacks = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=[*SPECIALS, *fallbacks], show_progress=False)
    tokenizer.train_from_iterator(TEXT[:40], trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in fallbacks]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.add_tokens(["addedword"])
    return _save(tokenizer, directory)


def unigram(directory: Path) -> Tokenizer:
    """A unigram model as in T5 and ALBERT."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=[*SPECIALS, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens(["addedword"])
    return _save(tokenizer, directory)


def put_before(tokenizer: Tokenizer, token: str, directory: Path) -> None:
    """Has the tokenizer put a special token before each text, and saves it."""
    special = [(token, tokenizer.token_to_id(token))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=special)
    tokenizer.save(str(directory / "tokenizer.json"))


FAMILIES = {"byte-level": byte_level_bpe, "byte-fallback": metaspace_byte_fallback, "unigram": unigram}


def _save(tokenizer: Tokenizer, directory: Path) -> Tokenizer:
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return tokenizer
