"""The supported architectures, as traits: what each does differently from the shared decoder.

Each function takes a checkpoint's config and returns traits. A new architecture needs a function here and a row in the
registry's table.
"""

import dataclasses

from sluice_server.engine.errors import unsupported
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.traits import ArchitectureTraits, ExpertTraits


def llama(config: ModelConfig) -> ArchitectureTraits:
    """Llama 1 to 3 (Touvron et al. 2023; Grattafiori et al. 2024): the plain form that the shared layers implement.

    Full attention in every layer; biases only where the checkpoint has them.
    """
    return ArchitectureTraits(
        windows=(None,) * config.num_layers,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


def mistral(config: ModelConfig) -> ArchitectureTraits:
    """Mistral (Jiang et al. 2023): Llama with a sliding window.

    No biases; the window of the checkpoint, if it has one.
    """
    return ArchitectureTraits(windows=config.windows)


def mixtral(config: ModelConfig) -> ArchitectureTraits:
    """Mixtral (Jiang et al. 2024): Mistral with experts in every layer.

    No biases; the window of the checkpoint, if it has one; expert weights of a token add up to 1.
    """
    at = "block_sparse_moe"
    experts = ExpertTraits(f"{at}.gate", f"{at}.experts", gate="w1", up="w3", down="w2", renormalises=True)
    return ArchitectureTraits(windows=config.windows, experts=experts)


def qwen2(config: ModelConfig) -> ArchitectureTraits:
    """Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on query, key and value.

    Biases on the three input projections; a window in the upper layers where it is enabled.
    """
    return ArchitectureTraits(windows=config.windows, qkv_bias=True)


def qwen2_moe(config: ModelConfig) -> ArchitectureTraits:
    """Qwen2 with experts (Qwen Team 2024): all or some MLPs are routed experts and one that every token goes through.

    The sigmoid of a projection weights the shared expert; the others' weights add up to 1 if the checkpoint says so.
    """
    renormalises = config.experts is not None and config.experts.renormalises
    if config.experts is not None and not config.experts.shared_size:
        raise unsupported("shared_expert_intermediate_size", "shared_expert_intermediate_size is 0; supported is above")
    experts = ExpertTraits(renormalises=renormalises, shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")
    return ArchitectureTraits(windows=config.windows, qkv_bias=config.qkv_bias, experts=experts)


def qwen3(config: ModelConfig) -> ArchitectureTraits:
    """Qwen3 (Yang et al. 2025): Llama with a norm on each query and key head.

    Head norms; biases only where the checkpoint has them.
    """
    return ArchitectureTraits(
        windows=config.windows,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
    )


def qwen3_moe(config: ModelConfig) -> ArchitectureTraits:
    """Qwen3 with experts (Yang et al. 2025): Qwen3 in which all or some MLPs are routed experts.

    Expert weights of a token add up to 1 if the checkpoint says so.
    """
    renormalises = config.experts is not None and config.experts.renormalises
    return dataclasses.replace(qwen3(config), experts=ExpertTraits(renormalises=renormalises))


def gemma(config: ModelConfig) -> ArchitectureTraits:
    """Gemma (Gemma Team 2024, arXiv 2403.08295): Llama with norms around one, scaled embeddings and a GELU gate.

    The common part of all Gemmas; biases only where the checkpoint has them.
    """
    return ArchitectureTraits(
        windows=config.windows,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
    )


def gemma2(config: ModelConfig) -> ArchitectureTraits:
    """Gemma 2 (Gemma Team 2024, arXiv 2408.00118): windows in every other layer, norms before and behind, soft-caps.

    Gemma with its own scale of attention scores, and with caps where the checkpoint has them.
    """
    return dataclasses.replace(
        gemma(config),
        post_norms=True,
        score_scale=None if config.query_scalar is None else config.query_scalar**-0.5,
        score_cap=config.score_cap,
        logit_cap=config.logit_cap,
    )


def gemma3(config: ModelConfig) -> ArchitectureTraits:
    """Gemma 3's text model (Gemma Team 2025, arXiv 2503.19786): Gemma 2 with norms of query and key heads.

    Layers with a window have another rotary base. There are no soft-caps: for a cap of attention scores it raises
    ServiceError UNIMPLEMENTED, as the reference implementation ignores it.
    """
    if config.score_cap:
        text = f"attn_logit_softcapping is {config.score_cap}; Gemma 3 is supported without"
        raise unsupported("attn_logit_softcapping", text)
    return dataclasses.replace(gemma2(config), qk_norm=True)


def gpt_oss(config: ModelConfig) -> ArchitectureTraits:
    """gpt-oss (OpenAI 2025): experts with their own gate and biases, and attention with sinks.

    A sink per head; experts in every layer; a window in every other layer.
    """
    experts = ExpertTraits(router="mlp.router", renormalises=True, activation="clamped", is_turned=True)
    bias = config.attention_bias
    return ArchitectureTraits(windows=config.windows, qkv_bias=bias, output_bias=bias, experts=experts, sinks=True)


def olmo2(config: ModelConfig) -> ArchitectureTraits:
    """OLMo 2 (Team OLMo 2024, arXiv 2501.00656): Llama with norms behind attention and MLP and none before.

    One norm of all queries, and one of all keys.
    """
    return ArchitectureTraits(
        windows=(None,) * config.num_layers,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
        norms_all_heads=True,
        pre_norms=False,
        post_norms=True,
    )


def phi3(config: ModelConfig) -> ArchitectureTraits:
    """Phi-3 and Phi-4 (Microsoft 2024, arXiv 2404.14219 and 2412.08905): Llama with fused projections.

    A window in all layers if the checkpoint has one; longrope; a part of each head may stay unrotated. For another
    scaling it raises ServiceError UNIMPLEMENTED, as the reference implementation refuses it.
    """
    if config.rope.kind not in ("default", "longrope"):
        text = f"rope_type is {config.rope.kind!r}; Phi-3 is supported with default and longrope"
        raise unsupported("rope_type", text)
    return ArchitectureTraits(windows=config.windows, is_fused=True, is_partly_rotated=True)


def granite(config: ModelConfig) -> ArchitectureTraits:
    """Granite 3 (IBM 2024): Llama with factors of embeddings, scores, residuals and logits."""
    return dataclasses.replace(
        llama(config),
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        score_scale=config.attention_multiplier,
        logit_scale=1.0 / config.logits_scaling,
    )


def smollm3(config: ModelConfig) -> ArchitectureTraits:
    """SmolLM3 (Hugging Face 2025): Llama in which every fourth layer, or each that the file names, does not rotate.

    A window where it is enabled.
    """
    return dataclasses.replace(llama(config), windows=config.windows, rotated=config.rotated)
