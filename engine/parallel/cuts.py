"""Which part of each tensor of a checkpoint a rank owns, by the tensor's name. Pure arithmetic.

Rows of query, key, value, gate and up, columns of what multiplies their results, experts, and rows of the vocabulary.
A tensor without a cut is every rank's: norms, routers, and biases of what is row-parallel.
"""

import dataclasses
from collections.abc import Iterator
from typing import TypeAlias

from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.expert_fields import ExpertsConfig
from sluice_server.engine.models.spans import Span, span_of
from sluice_server.engine.models.traits import ArchitectureTraits, ExpertTraits
from sluice_server.engine.parallel.shape import ParallelShape

Cut: TypeAlias = tuple[tuple[Span, ...], ...]  # of each dimension: the parts that stand side by side in the rank's
STACKED = "_blocks"  # behind the name of experts that are stored as [experts, rows, width], whatever the tensor's order


def cuts_of(config: ModelConfig, traits: ArchitectureTraits, shape: ParallelShape) -> dict[str, Cut]:
    """Returns the cuts of a rank; `config` is of the whole model."""
    hidden, vocabulary = span_of(config.hidden_size), _span(shape.vocabulary(config.vocab_size), config.vocab_size)
    found: dict[str, Cut] = {f"{name}.weight": ((vocabulary,), (hidden,)) for name in ("model.embed_tokens", "lm_head")}
    for index in shape.layers(config.num_layers):
        at = f"model.layers.{index}"
        found.update(_attention(config, traits, shape, f"{at}.self_attn"))
        found.update(_mlp(config, traits, shape, index, at))
    return found


def config_of_rank(config: ModelConfig, shape: ParallelShape) -> ModelConfig:
    """Returns the config of the model that a rank computes: its heads, its columns, its stage's layers."""
    layers, own = shape.layers(config.num_layers), config.experts
    by_layer = slice(layers.start, layers.stop)
    if own is not None:
        own = dataclasses.replace(
            own,
            intermediate_size=_of_expert(own, shape).size,
            shared_size=len(shape.part(own.shared_size)),
            layers=own.layers[by_layer],
        )
    return dataclasses.replace(
        config,
        num_layers=len(layers),
        windows=config.windows[by_layer],
        rotated=config.rotated[by_layer],
        num_heads=len(shape.heads(config)),
        num_kv_heads=len(shape.kv_heads(config)),
        intermediate_size=len(shape.part(config.intermediate_size)),
        experts=own,
    )


def traits_of_rank(traits: ArchitectureTraits, layers: range) -> ArchitectureTraits:
    """Returns the traits of a model that has these layers alone."""
    own = slice(layers.start, layers.stop)
    return dataclasses.replace(traits, windows=traits.windows[own], rotated=traits.rotated[own])


def _attention(
    config: ModelConfig, traits: ArchitectureTraits, shape: ParallelShape, at: str
) -> Iterator[tuple[str, Cut]]:
    dim = config.head_dim
    q = _span(shape.heads(config), config.num_heads).times(dim)
    k = _span(shape.kv_heads(config), config.num_kv_heads).times(dim)
    hidden = (span_of(config.hidden_size),)
    parts = (
        {"qkv_proj": _side_by_side(q, k, k)} if traits.is_fused else {"q_proj": (q,), "k_proj": (k,), "v_proj": (k,)}
    )
    for name, rows in parts.items():
        yield f"{at}.{name}.weight", (rows, hidden)
        yield f"{at}.{name}.bias", (rows,)
    yield f"{at}.o_proj.weight", (hidden, (q,))
    yield f"{at}.sinks", ((_span(shape.heads(config), config.num_heads),),)
    if traits.norms_all_heads:
        yield f"{at}.q_norm.weight", ((q,),)
        yield f"{at}.k_norm.weight", ((k,),)


def _mlp(
    config: ModelConfig, traits: ArchitectureTraits, shape: ParallelShape, index: int, at: str
) -> Iterator[tuple[str, Cut]]:
    own, names = config.experts, traits.experts
    if own is not None and names is not None and own.layers[index]:
        yield from _experts(own, names, shape, config.hidden_size, at)
        return
    inner = _part(config.intermediate_size, shape)
    if not traits.is_fused:
        yield from _gated(ExpertTraits(), inner, config.hidden_size, f"{at}.mlp")
        return
    rows, hidden = _side_by_side(inner, inner), (span_of(config.hidden_size),)
    yield f"{at}.mlp.gate_up_proj.weight", (rows, hidden)
    yield f"{at}.mlp.gate_up_proj.bias", (rows,)
    yield f"{at}.mlp.down_proj.weight", (hidden, (inner,))


def _gated(names: ExpertTraits, inner: Span, size: int, at: str) -> Iterator[tuple[str, Cut]]:
    """Yields the cuts of gate, up and down that are a tensor each."""
    hidden = (span_of(size),)
    for name in (names.gate, names.up):
        yield f"{at}.{name}.weight", ((inner,), hidden)
        yield f"{at}.{name}.bias", ((inner,),)
    yield f"{at}.{names.down}.weight", (hidden, (inner,))


def _experts(
    own: ExpertsConfig, names: ExpertTraits, shape: ParallelShape, size: int, at: str
) -> Iterator[tuple[str, Cut]]:
    """Yields the cuts of routed experts, in each layout of their tensors, and of the one beside them."""
    inner, hidden, held = _of_expert(own, shape), (span_of(size),), shape.experts(own.num)
    for i in held:
        yield from _gated(names, inner, size, f"{at}.{names.experts}.{i}")
    if names.shared:
        yield from _gated(names, _part(own.shared_size, shape), size, f"{at}.{names.shared}")
    each, fused = (_span(held, own.num),), f"{at}.{ExpertTraits().experts}"
    gate_up, down = f"{fused}.gate_up_proj", f"{fused}.down_proj"
    if not names.is_turned:
        yield gate_up, (each, _side_by_side(inner, inner), hidden)
        yield down, (each, hidden, (inner,))
        return
    both = (inner.times(2),)  # a row of gate, then one of up
    yield gate_up, (each, hidden, both)
    yield f"{gate_up}{STACKED}", (each, both, hidden)
    yield f"{gate_up}_bias", (each, both)
    yield down, (each, (inner,), hidden)
    yield f"{down}{STACKED}", (each, hidden, (inner,))
    yield f"{down}_bias", (each, hidden)


def _side_by_side(*parts: Span) -> tuple[Span, ...]:
    """Returns parts of dimensions as parts of one in which these stand side by side."""
    whole, found, start = sum(part.whole for part in parts), [], 0
    for part in parts:
        found.append(Span(start + part.start, start + part.stop, whole))
        start += part.whole
    return tuple(found)


def _of_expert(own: ExpertsConfig, shape: ParallelShape) -> Span:
    """Returns the intermediate columns that a rank owns of an expert; all of them if experts are shared out whole."""
    return span_of(own.intermediate_size) if shape.expert_parallel else _part(own.intermediate_size, shape)


def _part(size: int, shape: ParallelShape) -> Span:
    return _span(shape.part(size), size)


def _span(part: range, whole: int) -> Span:
    return Span(part.start, part.stop, whole)
