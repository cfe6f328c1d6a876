"""Calls of the C++ kernels that compute whole decoder layers: one, several in their order, and those of a rank.

Depends on tensors and metadata; not on models.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sluice_server.kernels.cpu import builds, native
from sluice_server.kernels.layout.metadata import AttentionMetadata

ALL_TOKENS = -1  # as in kernels/cpu/layer.h


def layer(
    arguments: Sequence[float],
    h: Tensor,
    cis: Tensor,
    cache: Tensor,
    meta: AttentionMetadata,
    kept: Tensor | None = None,
    beside: tuple[Tensor, int] | None = None,
) -> None:
    """Computes a decoder layer over the first T rows of h, in place.

    `arguments` are those of `engine.models.layers.layer.Layer.arguments`. `kept`, int64 and ascending, are the tokens
    whose rows are needed after the layer; these rows then come first. `beside`: adapters of the step, see
    `kernels.cpu.low_rank.step_of`, and the layer's index in them. The other arguments are as in `rotate_and_write` and
    `paged_attention`.
    """
    assert builds.MODULE is not None
    calls: dict[torch.dtype, Callable[..., None]] = {
        torch.float32: builds.MODULE.layer_float32,
        torch.bfloat16: builds.MODULE.layer_bfloat16,
        torch.int8: builds.MODULE.layer_int8,
    }
    calls[cache.dtype](
        *arguments,
        h.data_ptr(),
        cis.data_ptr(),
        meta.num_tokens,
        meta.write_slots.data_ptr(),
        *native.places(cache),
        *meta.addresses,
        0 if kept is None else kept.data_ptr(),
        ALL_TOKENS if kept is None else len(kept),
        0 if beside is None else beside[0].data_ptr(),
        0 if beside is None else beside[1],
        *meta.last_address,
    )


def has_layers() -> bool:
    """Returns whether `layers` can be called: kernels that were built before an update of the sources may lack it."""
    return hasattr(builds.MODULE, "layers_float32")


def has_shared_layers() -> bool:
    """Returns whether `shared_layers` can be called; see `has_layers`."""
    return hasattr(builds.MODULE, "shared_layers_float32")


def layers(
    table: Tensor,
    h: Tensor,
    cis: Sequence[Tensor],
    cache: torch.dtype,
    meta: AttentionMetadata,
    kept: Tensor | None = None,
    beside: tuple[Tensor, int] | None = None,
) -> None:
    """Computes consecutive decoder layers in one call, each as `layer` does.

    `table`: float64 [layers, ..], of each layer its index in `cis`, its group in `meta.groups`, the `places` of its
    cache, which is of dtype `cache`, and `layer`'s arguments. `kept` is of the last layer, the index in `beside` of
    the first.
    """
    assert builds.MODULE is not None
    calls: dict[torch.dtype, Callable[..., None]] = {
        torch.float32: builds.MODULE.layers_float32,
        torch.bfloat16: builds.MODULE.layers_bfloat16,
        torch.int8: builds.MODULE.layers_int8,
    }
    calls[cache](*_layers_arguments(table, h, cis, meta, kept, beside))


def shared_layers(
    sums: Sequence[float], table: Tensor, h: Tensor, cis: Sequence[Tensor], cache: torch.dtype, meta: AttentionMetadata
) -> tuple[int, int, int, float]:
    """Computes `layers` of a rank that shares them out with others, each with its two sums.

    `sums`: the numbers of a `kernels.cpu.sums.Segment`, or of none for a single rank. Each row of `table` ends with the
    address of the layer's shards. Returns what went wrong in a sum, if anything, and the rank at fault, see
    `kernels.cpu.sums`; then the number of the next sum, and the seconds that sums took.
    """
    assert builds.MODULE is not None
    calls: dict[torch.dtype, Callable[..., tuple[int, int, int, float]]] = {
        torch.float32: builds.MODULE.shared_layers_float32,
        torch.bfloat16: builds.MODULE.shared_layers_bfloat16,
        torch.int8: builds.MODULE.shared_layers_int8,
    }
    return calls[cache](*sums, *_layers_arguments(table, h, cis, meta))


def _layers_arguments(
    table: Tensor,
    h: Tensor,
    cis: Sequence[Tensor],
    meta: AttentionMetadata,
    kept: Tensor | None = None,
    beside: tuple[Tensor, int] | None = None,
) -> tuple[int, ...]:
    """Returns the arguments that all calls for consecutive layers take."""
    assert h.is_contiguous()
    groups = [
        (one.write_slots.data_ptr(), *one.addresses, *(one.last_address or (0,))) for one in meta.groups or (meta,)
    ]
    return (
        table.data_ptr(),
        table.stride(0),
        len(table),
        h.data_ptr(),
        meta.num_tokens,
        0 if kept is None else kept.data_ptr(),
        ALL_TOKENS if kept is None else len(kept),
        0 if beside is None else beside[0].data_ptr(),
        0 if beside is None else beside[1],
        len(cis),
        *(one.data_ptr() for one in cis),
        len(groups),
        *itertools.chain.from_iterable(groups),
    )
