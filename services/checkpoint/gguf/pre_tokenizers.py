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
DEEPSEEK_LETTERS = (
    r"\s?["
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻ"
    "Ȿ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
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
    "deepseek-r1-qwen": QWEN2_KIND,
    "stablelm2": PreTokenizer((QWEN2,)),
    "megrez": PreTokenizer((QWEN2,)),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer((GPT4O,)),
    "deepseek-llm": PreTokenizer(DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(DEEPSEEK_V3),
}
