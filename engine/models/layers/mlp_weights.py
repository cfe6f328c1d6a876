"""Reads the MLP of a layer from a checkpoint: dense, or experts behind a router, in either layout of their tensors.

Published checkpoints have a tensor for each projection of each expert. `transformers` may write one tensor for all
experts of a layer. Quantised checkpoints use the former layout.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from sluice_server.engine.errors import unsupported
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.expert_fields import ExpertsConfig
from sluice_server.engine.models.layers.experts import ExpertRouter, Experts, SharedExpert, SummedExperts, pack_experts
from sluice_server.engine.models.layers.loader import LayerLoader
from sluice_server.engine.models.layers.mlp import DenseMlp, Mlp, UnnormedMlp
from sluice_server.engine.models.layers.shards import Shard
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
        down=loader.row_parallel(f"{at}.mlp.down_proj", hidden, config.intermediate_size, bias=traits.mlp_bias),
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
        down=loader.row_parallel(f"{at}.mlp.down_proj", hidden, size, bias=traits.mlp_bias),
        down_norm=loader.norm(f"{at}.post_feedforward_layernorm", hidden),
        activation=config.activation,
    )


def _experts(at: str, config: ExpertsConfig, traits: ExpertTraits, loader: LayerLoader, norm: Tensor) -> Mlp:
    """Returns the experts of the layer with name prefix `at`; `norm` [hidden] is the norm before them."""
    names = traits
    read: ExpertReader = _turned if traits.is_turned else _separate
    if not traits.is_turned and _is_fused(at, traits, loader):
        read, names = _fused, FUSED
    linear = loader.router(f"{at}.{names.router}", config.num, norm, bias=traits.is_turned)
    router = ExpertRouter(linear, config.per_token, traits.renormalises)

    def each(held: range, shard: Shard | None) -> list[DenseMlp]:
        pairs = read(f"{at}.{names.experts}", config, names, loader, norm, held, shard)
        return [DenseMlp(gate_up, down, loader.kept(norm), traits.activation) for gate_up, down in pairs]

    def packed(first: int, own: Sequence[DenseMlp], shard: Shard | None) -> Experts:
        routed = _packed(dataclasses.replace(router, first=first), own, norm.device)
        return _shared(at, config, traits, loader, norm, routed, shard) if traits.shared else routed

    ranks, all_experts = loader.ranks, range(config.num)
    if ranks is None:
        return packed(0, each(all_experts, None), None)
    num = ranks.shape.rank_shards
    shards = [Shard(i, num, has_bias=ranks.shape.rank + i == 0) for i in range(num)]
    if not ranks.shape.expert_parallel:
        return SummedExperts([packed(0, each(all_experts, one), one) for one in shards], ranks.sums)
    held = ranks.shape.experts(config.num)
    own, parts = each(held, None), [one.part(len(held)) for one in shards]
    found = [
        packed(held[part.start], own[part.start : part.stop], one) for part, one in zip(parts, shards, strict=True)
    ]
    return SummedExperts(found, ranks.sums)


def _is_fused(at: str, traits: ExpertTraits, loader: LayerLoader) -> bool:
    """Returns whether a layer has one tensor for all experts."""
    return loader.has(f"{at}.{FUSED.experts}.gate_up_proj") and not loader.has(f"{at}.{traits.experts}.0.{traits.up}")


def _packed(router: ExpertRouter, each: Sequence[DenseMlp], device: torch.device) -> Experts:
    """Returns packed experts. Raises ServiceError UNIMPLEMENTED if nothing multiplies their number format."""
    try:
        return pack_experts(router, each)
    except ValueError as error:
        text = f"this number format of experts is not supported on {device}: {error}"
        raise unsupported("quantization", f"{text}; take --quantization none or int8, or --device cpu") from error


def _shared(  # noqa: PLR0913 # all that it is made of
    at: str,
    config: ExpertsConfig,
    traits: ExpertTraits,
    loader: LayerLoader,
    norm: Tensor,
    routed: Experts,
    shard: Shard | None,
) -> Experts:
    """Returns routed experts with the shared one, or a shard of it, beside them."""
    hidden, size, name = len(norm), config.shared_size, f"{at}.{traits.shared}"
    gate_up = [(f"{name}.{part}", size) for part in (traits.gate, traits.up)]
    shared = DenseMlp(
        gate_up=loader.linear(gate_up, hidden, norm=norm, gated=True, shard=shard),
        down=loader.linear([(f"{name}.{traits.down}", hidden)], size, shard=_behind(shard)),
        norm=loader.kept(norm),
        activation=traits.activation,
    )
    return SharedExpert(routed, shared, loader.router(f"{at}.{traits.shared_gate}", 1, norm))


def _behind(shard: Shard | None) -> Shard | None:
    """Returns the shard of `down` that takes what a shard of gate and up gives."""
    return None if shard is None else dataclasses.replace(shard, of_inputs=True)


class ExpertReader(Protocol):
    """Reads gate and up, and down, of experts of a layer."""

    def __call__(  # noqa: PLR0913 # all that they are found by
        self,
        at: str,
        config: ExpertsConfig,
        traits: ExpertTraits,
        loader: LayerLoader,
        norm: Tensor,
        held: range,
        shard: Shard | None,
        /,
    ) -> Iterator[Pair]:
        """Returns the experts `held`, or a shard of each; the source has these and no others."""


def _separate(  # noqa: PLR0913 # as `ExpertReader`
    at: str,
    config: ExpertsConfig,
    traits: ExpertTraits,
    loader: LayerLoader,
    norm: Tensor,
    held: range,
    shard: Shard | None,
) -> Iterator[Pair]:
    """Yields experts from a tensor for each projection."""
    hidden, size = len(norm), config.intermediate_size
    for i in held:
        parts = [(f"{at}.{i}.{name}", size) for name in (traits.gate, traits.up)]
        gate_up = loader.linear(parts, hidden, norm=norm, gated=True, shard=shard)
        yield gate_up, loader.linear([(f"{at}.{i}.{traits.down}", hidden)], size, shard=_behind(shard))


def _fused(  # noqa: PLR0913 # as `ExpertReader`
    at: str,
    config: ExpertsConfig,
    traits: ExpertTraits,
    loader: LayerLoader,
    norm: Tensor,
    held: range,
    shard: Shard | None,
) -> Iterator[Pair]:
    """Returns experts from two tensors for all of them."""
    hidden, size, num = len(norm), config.intermediate_size, len(held)
    gate_up = loader.each(f"{at}.gate_up_proj", (num, 2 * size, hidden), norm=norm, gated=True, shard=shard)
    return zip(gate_up, loader.each(f"{at}.down_proj", (num, hidden, size), shard=_behind(shard)), strict=True)


def _turned(  # noqa: PLR0913 # as `ExpertReader`
    at: str,
    config: ExpertsConfig,
    traits: ExpertTraits,
    loader: LayerLoader,
    norm: Tensor,
    held: range,
    shard: Shard | None,
) -> Iterator[Pair]:
    """Returns experts from two weight tensors with inputs before outputs, and two bias tensors."""
    hidden, size, num = len(norm), config.intermediate_size, len(held)
    gate_up = loader.each_turned(f"{at}.gate_up_proj", (num, hidden, 2 * size), norm=norm, gated=True, shard=shard)
    return zip(gate_up, loader.each_turned(f"{at}.down_proj", (num, size, hidden), shard=_behind(shard)), strict=True)
