"""Reads the MLP of a layer from a checkpoint: dense, or experts behind a router, in either layout of their tensors.

Published checkpoints have a tensor for each projection of each expert. `transformers` may write one tensor for all
experts of a layer. Quantised checkpoints use the former layout.
"""

from collections.abc import Iterator
from typing import TypeAlias

from torch import Tensor

from sluice_server.engine.errors import unsupported
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.expert_fields import ExpertsConfig
from sluice_server.engine.models.layers.decoder import LayerLoader
from sluice_server.engine.models.layers.experts import Router, SharedExpert, pack_experts
from sluice_server.engine.models.layers.mlp import DenseMlp, Mlp, UnnormedMlp
from sluice_server.engine.models.traits import ArchitectureTraits, ExpertTraits
from sluice_server.kernels.formats.linear import PackedLinear

Pair: TypeAlias = tuple[PackedLinear, PackedLinear]  # gate and up of an expert, and its down
FUSED = ExpertTraits()  # names in the layout with one tensor for all experts


def make_mlp(config: ModelConfig, traits: ArchitectureTraits, index: int, loader: LayerLoader) -> Mlp:
    """Returns the MLP of layer `index`.

    Raises ServiceError UNIMPLEMENTED for experts in a number format without a kernel.
    """
    at, hidden = f"model.layers.{index}", config.hidden_size
    if not traits.pre_norms:
        return _unnormed(config, traits, at, loader)
    # Without post-norms, post_attention_layernorm is the norm before the MLP.
    norm = loader.norm(f"{at}.{'pre_feedforward' if traits.post_norms else 'post_attention'}_layernorm", hidden)
    own, names = config.experts, traits.experts
    if own is not None and names is not None and own.layers[index]:
        return _experts(at, own, names, loader, norm)
    gate_up = _gate_up(config.intermediate_size, traits, f"{at}.mlp")
    return DenseMlp(
        gate_up=loader.linear(gate_up, hidden, bias=traits.mlp_bias, norm=norm, gated=True),
        down=loader.linear([(f"{at}.mlp.down_proj", hidden)], config.intermediate_size, bias=traits.mlp_bias),
        norm=loader.kept(norm),
        activation=config.activation,
        down_norm=loader.norm(f"{at}.post_feedforward_layernorm", hidden) if traits.post_norms else None,
    )


def _gate_up(size: int, traits: ArchitectureTraits, at: str) -> list[tuple[str, int]]:
    """Returns names and rows of gate and up of an MLP, one tensor or two."""
    if traits.is_fused:
        return [(f"{at}.gate_up_proj", 2 * size)]
    return [(f"{at}.{name}_proj", size) for name in ("gate", "up")]


def _unnormed(config: ModelConfig, traits: ArchitectureTraits, at: str, loader: LayerLoader) -> Mlp:
    """Returns the MLP of a layer without a norm before it."""
    hidden, size = config.hidden_size, config.intermediate_size
    return UnnormedMlp(
        gate_up=loader.linear(_gate_up(size, traits, f"{at}.mlp"), hidden, bias=traits.mlp_bias),
        down=loader.linear([(f"{at}.mlp.down_proj", hidden)], size, bias=traits.mlp_bias),
        down_norm=loader.norm(f"{at}.post_feedforward_layernorm", hidden),
        activation=config.activation,
    )


def _shared(
    at: str, config: ExpertsConfig, traits: ExpertTraits, loader: LayerLoader, norm: Tensor, routed: Mlp
) -> Mlp:
    """Returns routed experts with the shared one beside them."""
    hidden, size, name = len(norm), config.shared_size, f"{at}.{traits.shared}"
    gate_up = [(f"{name}.{part}", size) for part in (traits.gate, traits.up)]
    shared = DenseMlp(
        gate_up=loader.linear(gate_up, hidden, norm=norm, gated=True),
        down=loader.linear([(f"{name}.{traits.down}", hidden)], size),
        norm=loader.kept(norm),
        activation=traits.activation,
    )
    return SharedExpert(routed, shared, loader.router(f"{at}.{traits.shared_gate}", 1, norm))


def _experts(at: str, config: ExpertsConfig, traits: ExpertTraits, loader: LayerLoader, norm: Tensor) -> Mlp:
    """Returns the experts of the layer with name prefix `at`; `norm` [hidden] is the norm before them."""
    is_fused = loader.has(f"{at}.{FUSED.experts}.gate_up_proj") and not loader.has(
        f"{at}.{traits.experts}.0.{traits.up}"
    )
    read, names = (_fused, FUSED) if is_fused else (_separate, traits)
    if traits.is_turned:
        read, names = _turned, traits
    linear = loader.router(f"{at}.{names.router}", config.num, norm, bias=traits.is_turned)
    router = Router(linear, config.per_token, traits.renormalises)
    pairs = read(f"{at}.{names.experts}", config, names, loader, norm)
    each = [DenseMlp(gate_up, down, loader.kept(norm), traits.activation) for gate_up, down in pairs]
    try:
        routed = pack_experts(router, each)
    except ValueError as error:
        text = f"this number format of experts is not supported on {norm.device}: {error}"
        raise unsupported("quantization", f"{text}; take --quantization none or int8, or --device cpu") from error
    return _shared(at, config, traits, loader, norm, routed) if traits.shared else routed


def _separate(
    at: str, config: ExpertsConfig, traits: ExpertTraits, loader: LayerLoader, norm: Tensor
) -> Iterator[Pair]:
    """Yields experts from a tensor for each projection."""
    hidden, size = len(norm), config.intermediate_size
    for i in range(config.num):
        parts = [(f"{at}.{i}.{name}", size) for name in (traits.gate, traits.up)]
        gate_up = loader.linear(parts, hidden, norm=norm, gated=True)
        yield gate_up, loader.linear([(f"{at}.{i}.{traits.down}", hidden)], size)


def _fused(at: str, config: ExpertsConfig, traits: ExpertTraits, loader: LayerLoader, norm: Tensor) -> Iterator[Pair]:
    """Returns experts from two tensors for all of them."""
    hidden, size = len(norm), config.intermediate_size
    gate_up = loader.each(f"{at}.gate_up_proj", (config.num, 2 * size, hidden), norm=norm, gated=True)
    return zip(gate_up, loader.each(f"{at}.down_proj", (config.num, hidden, size)), strict=True)


def _turned(at: str, config: ExpertsConfig, traits: ExpertTraits, loader: LayerLoader, norm: Tensor) -> Iterator[Pair]:
    """Returns experts from two weight tensors with inputs before outputs, and two bias tensors."""
    hidden, size = len(norm), config.intermediate_size
    gate_up = loader.each_turned(f"{at}.gate_up_proj", (config.num, hidden, 2 * size), norm=norm, gated=True)
    return zip(gate_up, loader.each_turned(f"{at}.down_proj", (config.num, size, hidden)), strict=True)
