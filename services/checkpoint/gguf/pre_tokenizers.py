"""The ways in which byte-level BPE tokenizers split text before merging: a table from GGUF's `tokenizer.ggml.pre`.

Patterns are those of the models' published tokenizers.
"""

import dataclasses
from collections.abc import Mapping

from sluice_server.engine.models.fields import Json


@dataclasses.dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of splitting.

    Attributes:
        patterns: regular expressions; each splits every piece that the ones before left.
        splits_words: whether GPT-2's own pattern follows.
        digits: whether each digit is a piece, before everything else.
        ignore_merges: whether a piece that is a token is never merged from its parts.
        adds_bos: whether a prompt begins with the bos token where the file does not say.
        composes: whether text is normalised to NFC first.
    """

    patterns: tuple[str, ...] = ()
    splits_words: bool = False
    digits: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False
    composes: bool = False

    def steps(self) -> list[Json]:
        """Returns the steps of tokenizer.json's `pre_tokenizer`."""
        digits: list[Json] = [{"type": "Digits", "individual_digits": True}] if self.digits else []
        splits: list[Json] = [
            {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
            for one in self.patterns
        ]
        end: Json = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": self.splits_words,
        }
        return [*digits, *splits, end]


CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REST_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CAMEL = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*")
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST
TEKKEN = f"{CAMEL[0]}|{CAMEL[1]}" + r"|\p{N}" + REST_SLASH
GPT4O = f"{CAMEL[0]}{CONTRACTIONS}?|{CAMEL[1]}{CONTRACTIONS}?" + r"|\p{N}{1,3}" + REST_SLASH
HAN = "[一-龥ࠀ-一가-퟿]+"
DEEPSEEK_LETTERS = (  # of scripts with capitals, in escapes, as editors normalise some of these letters
    r"\s?["
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
DEEPSEEK_LLM = (r"[\r\n]", DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", HAN, r"\p{N}+")
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

GPT2_KIND = PreTokenizer(splits_words=True)
SMOLLM_KIND = PreTokenizer(splits_words=True, digits=True)
LLAMA3_KIND = PreTokenizer((LLAMA3,), ignore_merges=True, adds_bos=True)
QWEN2_KIND = PreTokenizer((QWEN2,), composes=True)
KINDS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": GPT2_KIND,
    "olmo": GPT2_KIND,
    "phi-2": GPT2_KIND,
    "smollm": SMOLLM_KIND,
    "starcoder": SMOLLM_KIND,
    "refact": SMOLLM_KIND,
    "command-r": SMOLLM_KIND,
    "minerva-7b": SMOLLM_KIND,
    "llama-bpe": LLAMA3_KIND,
    "llama3": LLAMA3_KIND,
    "llama-v3": LLAMA3_KIND,
    "falcon3": LLAMA3_KIND,
    "dbrx": PreTokenizer((LLAMA3,)),
    "smaug-bpe": PreTokenizer((LLAMA3,)),
    "qwen2": QWEN2_KIND,
    "deepseek-r1-qwen": PreTokenizer((QWEN2,)),
    "stablelm2": PreTokenizer((QWEN2,)),
    "megrez": PreTokenizer((QWEN2,)),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer((GPT4O,)),
    "deepseek-llm": PreTokenizer(DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(DEEPSEEK_V3),
}
