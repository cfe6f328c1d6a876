"""The MLP of a layer, read from a checkpoint: dense, or experts behind a router, in either layout of their tensors.

Published checkpoints have a tensor for each projection of each expert; `transformers` may write one for all experts of
a layer. Weights that somebody has quantised before are found in the former.
"""

from collections.abc import Iterator
from typing import TypeAlias

from torch import Tensor

from engine.errors import unsupported
from engine.models.config import ModelConfig
from engine.models.expert_fields import ExpertsConfig
from engine.models.layers import Packer
from engine.models.style import ExpertStyle, Style
from kernels.experts import Router, pack_experts
from kernels.linear import PackedLinear
from kernels.mlp import Dense, Mlp

Pair: TypeAlias = tuple[PackedLinear, PackedLinear]  # of an expert: gate and up, and down
FUSED = ExpertStyle()  # the names beside tensors of all experts, whatever those of each are


def make_mlp(config: ModelConfig, style: Style, index: int, packer: Packer) -> Mlp:
    """Of the layer `index`. Raises ServiceError UNIMPLEMENTED for experts in a number format without a kernel."""
    at, hidden = f"model.layers.{index}", config.hidden_size
    # A name that says behind attention means before the MLP where that has no norm of its own.
    norm = packer.norm(f"{at}.{'pre_feedforward' if style.post_norms else 'post_attention'}_layernorm", hidden)
    own, names = config.experts, style.experts
    if own is not None and names is not None and own.layers[index]:
        return _experts(at, own, names, packer, norm)
    gate_up = [(f"{at}.mlp.{name}_proj", config.intermediate_size) for name in ("gate", "up")]
    return Dense(
        gate_up=packer.linear(gate_up, hidden, bias=style.mlp_bias, norm=norm, gated=True),
        down=packer.linear([(f"{at}.mlp.down_proj", hidden)], config.intermediate_size, bias=style.mlp_bias),
        norm=packer.kept(norm),
        activation=config.activation,
        down_norm=packer.norm(f"{at}.post_feedforward_layernorm", hidden) if style.post_norms else None,
    )


def _experts(at: str, config: ExpertsConfig, style: ExpertStyle, packer: Packer, norm: Tensor) -> Mlp:
    """Of the layer `at`, whose norm before it is `norm` [hidden]."""
    is_fused = packer.has(f"{at}.{FUSED.experts}.gate_up_proj") and not packer.has(f"{at}.{style.experts}.0.{style.up}")
    read, names = (_fused, FUSED) if is_fused else (_separate, style)
    if style.is_turned:
        read, names = _turned, style
    linear = packer.router(f"{at}.{names.router}", config.num, norm, bias=style.is_turned)
    router = Router(linear, config.per_token, style.renormalises)
    pairs = read(f"{at}.{names.experts}", config, names, packer, norm)
    each = [Dense(gate_up, down, packer.kept(norm), style.activation) for gate_up, down in pairs]
    try:
        return pack_experts(router, each)
    except ValueError as error:
        text = f"this number format of experts is not supported on {norm.device}: {error}"
        raise unsupported("quantization", f"{text}; take --quantization none or int8, or --device cpu") from error


def _separate(at: str, config: ExpertsConfig, style: ExpertStyle, packer: Packer, norm: Tensor) -> Iterator[Pair]:
    """From a tensor for each projection."""
    hidden, size = len(norm), config.intermediate_size
    for i in range(config.num):
        parts = [(f"{at}.{i}.{name}", size) for name in (style.gate, style.up)]
        gate_up = packer.linear(parts, hidden, norm=norm, gated=True)
        yield gate_up, packer.linear([(f"{at}.{i}.{style.down}", hidden)], size)


def _fused(at: str, config: ExpertsConfig, style: ExpertStyle, packer: Packer, norm: Tensor) -> Iterator[Pair]:
    """From two tensors for all experts."""
    hidden, size = len(norm), config.intermediate_size
    gate_up = packer.each(f"{at}.gate_up_proj", (config.num, 2 * size, hidden), norm=norm, gated=True)
    return zip(gate_up, packer.each(f"{at}.down_proj", (config.num, hidden, size)), strict=True)


def _turned(at: str, config: ExpertsConfig, style: ExpertStyle, packer: Packer, norm: Tensor) -> Iterator[Pair]:
    """From two tensors for all experts with inputs before outputs, and two of biases."""
    hidden, size = len(norm), config.intermediate_size
    gate_up = packer.each_turned(f"{at}.gate_up_proj", (config.num, hidden, 2 * size), norm=norm, gated=True)
    return zip(gate_up, packer.each_turned(f"{at}.down_proj", (config.num, size, hidden)), strict=True)
