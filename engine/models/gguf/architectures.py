"""The architectures of GGUF files: their Hugging Face class, and where its tensors lie in the file.

Depends on the standard library only.
"""

import dataclasses
import re
from collections.abc import Mapping

from sluice_server.engine.errors import ServiceError, unsupported
from sluice_server.engine.models.fields import shown
from sluice_server.engine.models.gguf.reader import GgufHeader

TOP: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
ATTENTION: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
MLP: Mapping[str, str] = {
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORM: Mapping[str, str] = {"post_attention_layernorm": "ffn_norm"}
NORMS_AROUND: Mapping[str, str] = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
MIXTRAL: Mapping[str, str] = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.*.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.*.w3": "ffn_up_exps",
    "block_sparse_moe.experts.*.w2": "ffn_down_exps",
}
EXPERTS: Mapping[str, str] = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.*.gate_proj": "ffn_gate_exps",
    "mlp.experts.*.up_proj": "ffn_up_exps",
    "mlp.experts.*.down_proj": "ffn_down_exps",
}
NAME = re.compile(r"model\.layers\.(\d{1,9})\.(.+)\.(weight|bias)")
EXPERT = re.compile(r"(?<=\.experts\.)\d{1,9}(?=\.)")
ROTATED = ("attn_q", "attn_k")


@dataclasses.dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in a file.

    Attributes:
        name: the file's name of the tensor.
        expert: index of the part of a tensor of all experts; None for a whole tensor.
        turned: the metadata that holds the number of heads whose rows are permuted; empty for none.
        offset: what the file added to the weights.
    """

    name: str
    expert: int | None = None
    turned: str = ""
    offset: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """What the files of one architecture have in common.

    Attributes:
        name: its Hugging Face class.
        model_type: the name of its configuration there.
        layer: names of a layer's projections and norms, Hugging Face's to the file's; `*` stands for an expert's
            number.
        permutes: whether the two halves of each query and key head are interleaved.
        norm_offset: what the file added to the weights of norms.
    """

    name: str
    model_type: str
    layer: Mapping[str, str]
    permutes: bool = False
    norm_offset: float = 0.0

    def place(self, name: str) -> TensorPlace | None:
        """Returns where the tensor with this Hugging Face name lies, or None if the architecture has no such one."""
        match = NAME.fullmatch(name)
        if match is None:
            stem, _, suffix = name.rpartition(".")
            found = TOP.get(stem)
            return None if found is None else TensorPlace(f"{found}.{suffix}", offset=self._offset(found))
        number, stem, suffix = match.groups()
        expert = EXPERT.search(stem)
        found = self.layer.get(EXPERT.sub("*", stem))
        if found is None:
            return None
        heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(found, "") if self.permutes else ""
        index = None if expert is None else int(expert[0])
        return TensorPlace(f"blk.{number}.{found}.{suffix}", index, heads, self._offset(found))

    def _offset(self, found: str) -> float:
        return self.norm_offset if found.endswith("_norm") else 0.0


LLAMA = {**ATTENTION, **NORM, **MLP}
GEMMA = {**ATTENTION, **NORMS_AROUND, **MLP}
ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", LLAMA, permutes=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2", LLAMA),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3", LLAMA),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", "qwen3_moe", {**LLAMA, **EXPERTS}),
    "gemma": GgufArchitecture("GemmaForCausalLM", "gemma", LLAMA, norm_offset=1.0),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", "gemma2", GEMMA, norm_offset=1.0),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", "gemma3_text", GEMMA, norm_offset=1.0),
}
MIXTRAL_IN_LLAMA = GgufArchitecture("MixtralForCausalLM", "mixtral", {**LLAMA, **MIXTRAL}, permutes=True)


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    """Returns the architecture of a file. Raises ServiceError UNIMPLEMENTED listing what is supported."""
    name = header.metadata.get("general.architecture")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise refused(header, f"general.architecture {shown(name)}", ", ".join(ARCHITECTURES))
    is_mixtral = name == "llama" and header.metadata.get("llama.expert_count", 0) not in (0, False)
    return MIXTRAL_IN_LLAMA if is_mixtral else found


def refused(header: GgufHeader, what: str, known: str) -> ServiceError:
    """Returns the error for something in a file that is valid and not supported."""
    return unsupported("model", f"{header.path}: {what} is not supported; supported are {known}")
