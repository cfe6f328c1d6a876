"""A lower bound of a text's number of tokens, from its bytes alone: a prompt that is too long is refused unencoded.

Read from tokenizer.json, and known only for tokenizers that keep every byte of a text in some token: BPE with a token
for every byte, after steps that neither drop nor shorten text.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sluice_server.engine.errors import context_exceeded
from sluice_server.engine.request import Limits, SamplingParams

_KEEPING = ("ByteLevel", "Digits", "Metaspace")  # pre-tokenizers that keep the whole text
_SPLITTING = ("Split", "Punctuation")  # these do unless their behavior is "Removed"
_NUM_BYTES = 256


def longest_token(path: Path) -> int:
    """Returns the largest number of bytes of text that one token stands for; 0 if it is not known."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return _longest(found) if _keeps_all(found) else 0
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return 0  # the tokenizer process refuses to start, with a message


def check_bytes(num_bytes: int, longest: int, params: SamplingParams, limits: Limits) -> None:
    """Raise ServiceError if a prompt of `num_bytes` cannot fit the context together with what is to be generated.
    The least number of tokens follows from `longest`, the value of `longest_token`."""
    least = -(-num_bytes // longest) if longest else 0
    needed = max(params.max_tokens, params.min_tokens, 1)
    if least and least + needed > limits.context_length:
        raise context_exceeded(
            least + needed,
            limits.context_length,
            f"prompt has {num_bytes} bytes, which are {least} tokens or more; this model allows "
            f"{limits.context_length} minus the {needed} to generate",
        )


def _keeps_all(found: dict[str, Any]) -> bool:
    model = found["model"]
    affixes = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    return (
        model["type"] == "BPE"
        and not any(affixes)
        and all(_is_longer(step) for step in _steps(found.get("normalizer"), "normalizers"))
        and all(_is_kept(step) for step in _steps(found.get("pre_tokenizer"), "pretokenizers"))
        and not any(token["lstrip"] or token["rstrip"] for token in found.get("added_tokens", ()))
        and _spells_all(found)
    )


def _steps(part: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    if part is not None and part["type"] == "Sequence":
        for inner in part[key]:
            yield from _steps(inner, key)
    elif part is not None:
        yield part


def _is_longer(step: dict[str, Any]) -> bool:
    """Whether a normalizer never makes a text shorter."""
    match step:
        case {"type": "Prepend"}:
            return True
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(new.encode()) >= len(old.encode())
        case _:
            return False


def _is_kept(step: dict[str, Any]) -> bool:
    return step["type"] in _KEEPING or (step["type"] in _SPLITTING and step["behavior"] != "Removed")


def _is_byte_level(found: dict[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in _steps(found.get("pre_tokenizer"), "pretokenizers"))


def _spells_all(found: dict[str, Any]) -> bool:
    """Whether every byte has a token. Otherwise unknown text is dropped, or much of it becomes one token."""
    vocab = found["model"]["vocab"]
    if _is_byte_level(found):
        return sum(len(token) == 1 for token in vocab) >= _NUM_BYTES and all(char in vocab for char in _alphabet())
    return bool(found["model"].get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocab for byte in range(_NUM_BYTES))


def _alphabet() -> Iterator[str]:
    """Yields the characters that stand for bytes (GPT-2)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    yield from map(chr, printable)
    yield from (chr(_NUM_BYTES + at) for at in range(_NUM_BYTES - len(printable)))


def _longest(found: dict[str, Any]) -> int:
    added = [token["content"] for token in found.get("added_tokens", ())]
    of_vocab = max(map(len, found["model"]["vocab"])) if _is_byte_level(found) else 0  # one character per byte
    others = found["model"]["vocab"] if not _is_byte_level(found) else ()
    return max([of_vocab, *(len(token.encode()) for token in (*others, *added))])
