"""How few tokens a text can be, by its bytes alone: so that one that fits no context is refused before it is encoded.

Read from tokenizer.json, for tokenizers of which it is certain that every byte of a text is in some token: BPE that
spells all bytes, behind steps that neither drop nor shorten anything. For others nothing is known. Encodes nothing.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sluice_server.engine.errors import context_exceeded
from sluice_server.engine.request import Limits, SamplingParams

_KEEPING = ("ByteLevel", "Digits", "Metaspace")  # pre-tokenizers that keep all of a text
_SPLITTING = ("Split", "Punctuation")  # these do unless told otherwise
_NUM_BYTES = 256


def longest_token(path: Path) -> int:
    """Bytes of text that one token stands for at most; 0 where that is not known."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return _longest(found) if _keeps_all(found) else 0
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return 0  # the tokenizer process refuses to start, and says why


def check_bytes(num_bytes: int, longest: int, params: SamplingParams, limits: Limits) -> None:
    """Raise `ServiceError` for a prompt of so many bytes whose tokens, however few, leave no room for what is to be
    generated; `longest` as above."""
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
    """Whether a normalizer makes no text shorter."""
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
    """Whether no byte is left without a token: what is unknown is dropped, or many of it become one."""
    vocab = found["model"]["vocab"]
    if _is_byte_level(found):
        return sum(len(token) == 1 for token in vocab) >= _NUM_BYTES and all(char in vocab for char in _alphabet())
    return bool(found["model"].get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocab for byte in range(_NUM_BYTES))


def _alphabet() -> Iterator[str]:
    """The characters by which bytes are spelled (GPT-2)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    yield from map(chr, printable)
    yield from (chr(_NUM_BYTES + at) for at in range(_NUM_BYTES - len(printable)))


def _longest(found: dict[str, Any]) -> int:
    added = [token["content"] for token in found.get("added_tokens", ())]
    of_vocab = max(map(len, found["model"]["vocab"])) if _is_byte_level(found) else 0  # a character for each byte
    others = found["model"]["vocab"] if not _is_byte_level(found) else ()
    return max([of_vocab, *(len(token.encode()) for token in (*others, *added))])
