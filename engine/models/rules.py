"""The ranges of numbers in a checkpoint's files: a table from a field's name to its rule.

Depends on the standard library only. Upper limits exceed everything published. They bound what is computed from a
number before any tensor has been compared with it. Fields that depend on each other are compared where they are read.
"""

import dataclasses
import sys
from collections.abc import Mapping

from sluice_server.engine.parameters import FROM_MODEL


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """The range of a number.

    Attributes:
        low, high: the range, both included.
        step: only whole numbers that are multiples of it; 0 for any number.
    """

    low: float
    high: float
    step: int = 0

    def holds(self, value: object) -> bool:
        """Returns whether a value from a JSON file is a number within the rule; true and false are not numbers."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.step and (not isinstance(value, int) or value % self.step):
            return False
        return self.low <= value <= self.high  # written so that NaN fails

    def __str__(self) -> str:
        """Returns the rule as error messages state it."""
        if self == _FINITE:
            return "a finite number"
        what = {0: "a number", 1: "a whole number"}.get(self.step, f"a multiple of {self.step}")
        return f"{what} from {self.low:.15g} to {self.high:.15g}"


def _whole(low: int, high: int, step: int = 1) -> Rule:
    return Rule(low, high, step)


_TOKENS = _whole(1, 1 << 24)
_LAYERS = _whole(1, 1 << 12)
_HEADS = _whole(1, 1 << 14)
_WIDTH = _whole(1, 1 << 22)
_EXPERTS = _whole(1, 1 << 14)
_PIXELS = _whole(1, 1 << 14)
_BASE = Rule(2.0, 1e12)
_BEND = Rule(1e-6, 1e6)
_SOFT = Rule(1e-6, 1e9)
_SCALE = Rule(1e-4, 1e4)
_OR_OFF = _whole(-1, (1 << 31) - 1)  # -1 keeps all, as 0 does
_FINITE = Rule(-sys.float_info.max, sys.float_info.max)

RULES: Mapping[str, Rule] = {
    "vocab_size": _TOKENS,
    "draft_vocab_size": _TOKENS,
    "max_position_embeddings": _TOKENS,
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "moe_intermediate_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "head_dim": _whole(2, 1 << 12, step=2),  # rotary embedding rotates pairs
    "rms_norm_eps": Rule(1e-30, 1.0),
    "layer_norm_eps": Rule(1e-30, 1.0),
    "type_vocab_size": _whole(0, 1 << 10),
    "pad_token_id": _whole(0, 1 << 24),
    "image_size": _PIXELS,
    "patch_size": _PIXELS,
    "num_channels": _whole(1, 1 << 10),
    "in_channels": _whole(1, 1 << 10),
    "in_chans": _whole(1, 1 << 10),
    "depth": _LAYERS,
    "num_heads": _HEADS,
    "out_hidden_size": _WIDTH,
    "spatial_merge_size": _whole(1, 1 << 6),
    "temporal_patch_size": _whole(1, 1 << 6),
    "window_size": _PIXELS,
    "fullatt_block_indexes": _whole(0, 1 << 12),
    "deepstack_visual_indexes": _whole(0, 1 << 12),
    "num_position_embeddings": _whole(1, 1 << 24),
    "image_token_index": _whole(0, 1 << 24),
    "image_token_id": _whole(0, 1 << 24),
    "boi_token_index": _whole(0, 1 << 24),
    "eoi_token_index": _whole(0, 1 << 24),
    "mm_tokens_per_image": _whole(1, 1 << 14),
    "relative_attention_num_buckets": _whole(1, 1 << 10),
    "local_attention": _whole(2, 1 << 24, step=2),
    "global_attn_every_n_layers": _LAYERS,
    "global_rope_theta": _BASE,
    "local_rope_theta": _BASE,
    "max_seq_length": _TOKENS,
    "sliding_window": _whole(1, (1 << 31) - 1),
    "sliding_window_pattern": _LAYERS,
    "max_window_layers": _whole(0, (1 << 31) - 1),
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "num_experts_per_tok": _EXPERTS,
    "decoder_sparse_step": _LAYERS,
    "shared_expert_intermediate_size": _whole(0, 1 << 22),
    "no_rope_layer_interval": _LAYERS,
    "embedding_multiplier": _SCALE,
    "residual_multiplier": _SCALE,
    "attention_multiplier": _SCALE,
    "logits_scaling": _SCALE,
    "swiglu_alpha": _SOFT,
    "swiglu_limit": _SOFT,
    "query_pre_attn_scalar": _SOFT,
    "attn_logit_softcapping": _SOFT,
    "final_logit_softcapping": _SOFT,
    "rope_theta": _BASE,
    "rope_local_base_freq": _BASE,
    "partial_rotary_factor": Rule(1e-3, 1.0),
    "factor": Rule(1.0, 1e6),
    "low_freq_factor": _BEND,
    "high_freq_factor": _BEND,
    "beta_fast": _BEND,
    "beta_slow": _BEND,
    "attention_factor": _BEND,
    "short_factor": _BEND,
    "long_factor": _BEND,
    "mrope_section": _whole(1, 1 << 12),
    "mscale": Rule(0.0, 1e6),
    "mscale_all_dim": Rule(0.0, 1e6),
    "original_max_position_embeddings": Rule(1.0, 1 << 24),
    # Of generation_config.json; `engine.checks` also applies the limits of client requests to these.
    **{row.name: _FINITE if row.type is float else _OR_OFF for row in FROM_MODEL},
}
