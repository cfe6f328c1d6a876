"""Makes tokenizer.json and tokenizer_config.json from the metadata of a GGUF file.

Byte-level BPE is there as it is; a SentencePiece vocabulary becomes BPE with merges that its scores order.
"""

from collections.abc import Callable, Mapping

from sluice_server.engine.models.fields import MENDING, Json, shown
from sluice_server.engine.models.gguf.architectures import refused
from sluice_server.engine.models.gguf.reader import GgufHeader
from sluice_server.services.checkpoint.gguf.metadata import Metadata
from sluice_server.services.checkpoint.gguf.pre_tokenizers import KINDS
from sluice_server.services.checkpoint.gguf.sentencepiece import LONGEST, NORMAL, merges_of, sentencepiece_steps

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of tokens that are found in text before it is split
MAX_TOKEN_BYTES = 1024
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def make_tokenizer(header: GgufHeader) -> dict[str, Json]:
    """Returns tokenizer.json. Raises ServiceError for what is missing, wrong, or not supported."""
    metadata = Metadata(header)
    model = metadata.string("tokenizer.ggml.model")
    if model not in MODELS:
        raise refused(header, f"tokenizer.ggml.model {shown(model)}", ", ".join(MODELS))
    vocab = _vocab(metadata)
    parts, adds_bos = MODELS[model](metadata, vocab)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(metadata, list(vocab)),
        **parts,
        "post_processor": _post_processor(metadata, list(vocab), adds_bos),
    }


def make_tokenizer_config(header: GgufHeader) -> dict[str, Json]:
    """Returns tokenizer_config.json: the chat template and the special tokens' texts."""
    metadata = Metadata(header)
    tokens = metadata.strings("tokenizer.ggml.tokens")
    found: dict[str, Json] = {name: text for name in SPECIAL if (text := _text(metadata, tokens, name)) is not None}
    if metadata.has("tokenizer.chat_template"):
        found["chat_template"] = metadata.string("tokenizer.chat_template")
    return {**found, "model_max_length": metadata.integer(".context_length"), "clean_up_tokenization_spaces": False}


def _vocab(metadata: Metadata) -> dict[str, int]:
    """Returns the tokens with their ids. Raises ServiceError MODEL_INVALID for one that is twice there, or too long."""
    found: dict[str, int] = {}
    for number, token in enumerate(metadata.strings("tokenizer.ggml.tokens")):
        if found.setdefault(token, number) != number:
            text = f"tokenizer.ggml.tokens has {shown(token)} twice, as {found[token]} and as {number}: {MENDING}"
            raise metadata.wrong(text)
        if len(token) > MAX_TOKEN_BYTES:
            text = f"tokenizer.ggml.tokens, element {number}, has {len(token)} characters; at most {MAX_TOKEN_BYTES}"
            raise metadata.wrong(f"{text} are read: {MENDING}")
    if not found:
        raise metadata.must_be("tokenizer.ggml.tokens", "an array of one string or more")
    return found


def _byte_level(metadata: Metadata, vocab: dict[str, int]) -> tuple[dict[str, Json], bool]:
    """Returns the parts of a byte-level BPE tokenizer, and whether it adds bos by default."""
    pre = metadata.string("tokenizer.ggml.pre", "default")
    kind = KINDS.get(pre)
    if kind is None:
        raise refused(metadata.header, f"tokenizer.ggml.pre {shown(pre)}", ", ".join(KINDS))
    merges: list[Json] = []
    for number, merge in enumerate(metadata.strings("tokenizer.ggml.merges")):
        first, space, second = merge.partition(" ")
        if not (space and first in vocab and second in vocab and first + second in vocab):
            text = f"tokenizer.ggml.merges, element {number}, is {shown(merge)}: it is not of two tokens that make one"
            raise metadata.wrong(f"{text}: {MENDING}")
        merges.append([first, second])
    byte_level: dict[str, Json] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "normalizer": {"type": "NFC"} if kind.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": kind.steps()},
        "decoder": {**byte_level, "use_regex": True},
        "model": _bpe(vocab, merges, ignore_merges=kind.ignore_merges),
    }, kind.adds_bos


def _sentencepiece(metadata: Metadata, vocab: dict[str, int]) -> tuple[dict[str, Json], bool]:
    """Returns the parts of a SentencePiece tokenizer, and whether it adds bos by default."""
    scores, types = metadata.numbers("tokenizer.ggml.scores"), metadata.integers("tokenizer.ggml.token_type")
    if len(scores) != len(vocab) or len(types) != len(vocab):
        text = f"{len(scores)} scores and {len(types)} types for {len(vocab)} tokens"
        raise metadata.wrong(f"tokenizer.ggml.scores and tokenizer.ggml.token_type hold {text}: {MENDING}")
    long = next((one for one, kind in zip(vocab, types, strict=True) if kind == NORMAL and len(one) > LONGEST), None)
    if long is not None:
        text = f"{shown(long)}, which has {len(long)} characters; at most {LONGEST} are merged"
        raise metadata.wrong(f"tokenizer.ggml.tokens holds {text}: {MENDING}")
    tokens = list(vocab)
    unknown = _text(metadata, tokens, "unk_token")
    model = _bpe(vocab, merges_of(vocab, scores, types), unknown=tokens[0] if unknown is None else unknown)
    prefix = metadata.boolean("tokenizer.ggml.add_space_prefix", True)
    return {**sentencepiece_steps(prefix), "model": model}, True


MODELS: Mapping[str, Callable[[Metadata, dict[str, int]], tuple[dict[str, Json], bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _bpe(
    vocab: dict[str, int], merges: list[Json], *, ignore_merges: bool = False, unknown: str | None = None
) -> dict[str, Json]:
    is_text = unknown is not None
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": is_text,
        "byte_fallback": is_text,
        "ignore_merges": ignore_merges,
        "vocab": dict(vocab.items()),
        "merges": merges,
    }


def _added(metadata: Metadata, tokens: list[str]) -> list[Json]:
    """Returns the tokens that are found in text before it is split."""
    types = metadata.integers("tokenizer.ggml.token_type") if metadata.has("tokenizer.ggml.token_type") else []
    return [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for number, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]


def _post_processor(metadata: Metadata, tokens: list[str], adds_bos: bool) -> Json:
    """Returns what puts bos before a prompt and eos behind it; None if it does neither."""
    wanted = {
        "bos_token": metadata.boolean("tokenizer.ggml.add_bos_token", adds_bos),
        "eos_token": metadata.boolean("tokenizer.ggml.add_eos_token", False),
    }
    texts = {name: text for name in wanted if wanted[name] and (text := _text(metadata, tokens, name)) is not None}
    if not texts:
        return None

    def around(sequence: str, kind: int) -> list[Json]:
        special: dict[str, Json] = {
            name: {"SpecialToken": {"id": text, "type_id": kind}} for name, text in texts.items()
        }
        middle: Json = {"Sequence": {"id": sequence, "type_id": kind}}
        return [one for one in (special.get("bos_token"), middle, special.get("eos_token")) if one is not None]

    numbers = {text: metadata.integer(f"tokenizer.ggml.{SPECIAL[name]}") for name, text in texts.items()}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {text: {"id": text, "ids": [number], "tokens": [text]} for text, number in numbers.items()},
    }


def _text(metadata: Metadata, tokens: list[str], name: str) -> str | None:
    """Returns the text of a special token; None without one. Raises ServiceError for an id that is no token's."""
    key = f"tokenizer.ggml.{SPECIAL[name]}"
    if not metadata.has(key):
        return None
    number = metadata.integer(key)
    if not 0 <= number < len(tokens):
        raise metadata.must_be(key, f"from 0 to {len(tokens) - 1}")
    return tokens[number]
