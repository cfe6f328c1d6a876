"""Chooses the linear layer for a weight: a table from weight formats to implementations, best first.

Formats: float32 and bfloat16 keep the weight's values; int8 and int4 quantise them; on a GPU, w8a8 and fp8 quantise the
activations too. A second table, STORED, chooses the implementation for weights that came quantised.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats import private_operators as private
from sluice_server.kernels.formats.gpu_linear import EightBitsOnGpu, Int4OnGpu, Int8OnGpu
from sluice_server.kernels.formats.gpu_plain import PlainOnGpu
from sluice_server.kernels.formats.integer_linear import integer_linear
from sluice_server.kernels.formats.linear import (
    BlockedLinear,
    NativePanels,
    OneDnnLinear,
    PackedLinear,
    TransposedLinear,
)
from sluice_server.kernels.formats.packed_weights import Int4Weight, Int8Weight, Packed, dequantise, quantise_rows
from sluice_server.kernels.formats.quantised import from_packed, round_weight
from sluice_server.kernels.triton.support import FP8_SINCE

Make = Callable[[Tensor, Tensor | None, bool, Tensor | None], PackedLinear]


@dataclasses.dataclass(frozen=True, slots=True)
class WeightFormat:
    """An implementation of a weight format.

    Attributes:
        fits: whether it can serve a weight on that device; called when a weight is packed.
        make: builds the layer from weight [N, K], bias [N], whether the layer is gated, and how large inputs are [K].
    """

    fits: Callable[[torch.device], bool]
    make: Make


def computes_bfloat16() -> bool:
    """Returns whether this CPU has bfloat16 arithmetic; emulated, it is slower than float32."""
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def _on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def _own(device: torch.device) -> bool:
    return device.type == "cpu" and builds.is_available()


def _own_bfloat16(device: torch.device) -> bool:
    return _own(device) and builds.multiplies("avx512_bf16")


def _onednn(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and not private.fault(private.PACKED_LINEAR[dtype])


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def serves_onednn() -> bool:
    """Returns whether bfloat16 weights on a CPU are multiplied by oneDNN rather than by the C++ kernels."""
    return computes_bfloat16() and not _own_bfloat16(torch.device("cpu"))


def _integers(bits: int, on_gpu: Make) -> tuple[WeightFormat, ...]:
    return (
        WeightFormat(
            _on_cpu,
            lambda weight, bias, gated, importance: integer_linear(
                round_weight(weight.float(), bits, importance), bias, gated
            ),
        ),
        WeightFormat(_on_gpu, on_gpu),
    )


def _both(kept: torch.dtype) -> tuple[WeightFormat, ...]:
    """Returns the implementations with weights and activations in `kept`."""

    def make(weight: Tensor, bias: Tensor | None, gated: bool, importance: Tensor | None) -> PackedLinear:
        return EightBitsOnGpu(quantise_rows(weight, kept), bias, weight.dtype)

    return (WeightFormat(_on_gpu, make),)


ANY = WeightFormat(lambda device: True, lambda weight, bias, gated, importance: PackedLinear(weight, bias))
GPU = WeightFormat(_on_gpu, lambda weight, bias, gated, importance: PlainOnGpu(weight, bias))
OWN = WeightFormat(_own, lambda weight, bias, gated, importance: NativePanels(weight, bias, gated))
ONEDNN, ONEDNN32 = (
    WeightFormat(functools.partial(_onednn, dtype), lambda weight, bias, gated, importance: OneDnnLinear(weight, bias))
    for dtype in (torch.bfloat16, torch.float32)
)
KINDS: Mapping[str, tuple[WeightFormat, ...]] = {
    "float32": (
        OWN,
        ONEDNN32,
        WeightFormat(_on_cpu, lambda weight, bias, gated, importance: TransposedLinear(weight, bias)),
        GPU,
        ANY,
    ),
    # Where the CPU has no bfloat16 arithmetic, oneDNN reaches a tenth of the bandwidth.
    "bfloat16": (
        dataclasses.replace(OWN, fits=_own_bfloat16),
        dataclasses.replace(ONEDNN, fits=lambda device: serves_onednn() and ONEDNN.fits(device)),
        OWN,
        ONEDNN,
        # A copy: a weight as it was read is mapped from the file, and would change if the file were overwritten.
        WeightFormat(_on_cpu, lambda weight, bias, gated, importance: BlockedLinear(weight.clone(), bias)),
        GPU,
        ANY,
    ),
    "int8": _integers(8, lambda weight, bias, gated, importance: Int8OnGpu(weight, bias)),
    # The same format for any number of rows: another format for many rows would round differently, and a request's
    # tokens would depend on the other requests. Nor would it be faster. Measured on Skylake, without VNNI, N, K = 3072,
    # 1024: int4's time over that of int8 is 0.61 at 1 row, 0.67 at 4, 0.63 at 8, 0.61 at 32 and at 128.
    "int4": _integers(4, lambda weight, bias, gated, importance: Int4OnGpu(weight, bias, weight.dtype, importance)),
    "w8a8": _both(torch.int8),
    "fp8": _both(torch.float8_e4m3fn),
}
# Formats whose rounding takes the `importance` of inputs.
WEIGHED = frozenset({"int4"})
# More precise formats for layers whose errors directly affect the logits. On a GPU, int8 does not round activations.
PRECISE = {"int4": "int8", "w8a8": "int8", "fp8": "int8"}


def pack(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    precise: bool = False,
    weights: str = "",
    importance: Tensor | None = None,
) -> PackedLinear:
    """Packs a weight [N, K] and bias [N] in the format `weights` (empty: its own dtype) for the device that it is on.

    `gated` if only `apply_gated` will be used; `precise` selects the format in PRECISE; `importance` float32 [K] is how
    large each input is, squared, which formats in WEIGHED use. Raises ValueError if no
    implementation multiplies that format on the device.
    """
    name = weights or str(weight.dtype).removeprefix("torch.")
    name = PRECISE.get(name, name) if precise else name
    if weight.device.type == "meta":  # only shapes are needed
        return PackedLinear(weight, bias)
    kind = next((kind for kind in KINDS[name] if kind.fits(weight.device)), None)
    if kind is None:
        raise ValueError(f"nothing multiplies weights of {name} on {weight.device}")
    return kind.make(weight, bias, gated, importance)


class WeightPlacement(NamedTuple):
    """Where a quantised weight of a checkpoint is to serve.

    Attributes:
        device: where it is computed.
        bias: [N] or None.
        dtype: of unquantised tensors.
        gated: whether only `apply_gated` will be used.
    """

    device: torch.device
    bias: Tensor | None
    dtype: torch.dtype
    gated: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StoredWeightFormat:
    """An implementation for weights that are quantised in the checkpoint.

    Attributes:
        make: builds the layer of a weight; returns None if it cannot serve this weight on that device.
        note: a notice for the operator; empty if there is none.
    """

    make: Callable[[Packed, WeightPlacement], PackedLinear | None]
    note: str = ""


def pack_stored(packed: Packed, place: WeightPlacement) -> tuple[PackedLinear, str]:
    """Returns the layer of a quantised weight in the best implementation on its device, and the notice of that."""
    made = ((kind.make(packed, place), kind.note) for kind in STORED)
    return next((layer, note) for layer, note in made if layer is not None)


def _as_ours(packed: Packed, place: WeightPlacement) -> PackedLinear | None:
    weight = from_packed(packed) if _on_cpu(place.device) else None
    return None if weight is None else integer_linear(weight, place.bias, place.gated)


def _int4_on_gpu(packed: Packed, place: WeightPlacement) -> PackedLinear | None:
    if not isinstance(packed, Int4Weight) or not _on_gpu(place.device):
        return None
    return Int4OnGpu(packed, place.bias, place.dtype)


def _int8_on_gpu(packed: Packed, place: WeightPlacement) -> PackedLinear | None:
    if not _is(packed, torch.int8) or not _on_gpu(place.device):
        return None
    return EightBitsOnGpu(packed, place.bias, place.dtype)


def _fp8_on_gpu(packed: Packed, place: WeightPlacement) -> PackedLinear | None:
    if not _is(packed, torch.float8_e4m3fn) or not _on_gpu(place.device):
        return None
    if torch.cuda.get_device_capability(place.device) < divmod(FP8_SINCE, 10):
        return None
    return EightBitsOnGpu(packed, place.bias, place.dtype)


def _is(packed: Packed, dtype: torch.dtype) -> TypeGuard[Int8Weight]:
    """Returns whether a weight has 8 bits of that dtype and a scale for each row."""
    return isinstance(packed, Int8Weight) and packed.weight.dtype is dtype


def _widened_fp8(packed: Packed, place: WeightPlacement) -> PackedLinear | None:
    return _widened(packed, place) if _is(packed, torch.float8_e4m3fn) else None


def _widened(packed: Packed, place: WeightPlacement) -> PackedLinear:
    return pack(dequantise(packed).to(place.dtype), place.bias, gated=place.gated)


STORED = (
    StoredWeightFormat(_int4_on_gpu),
    StoredWeightFormat(
        _int8_on_gpu,
        "activations are rounded to int8 row by row: scales of activations in the checkpoint are not used",
    ),
    StoredWeightFormat(
        _fp8_on_gpu,
        "activations are rounded to fp8 row by row: scales of activations in the checkpoint are not used",
    ),
    StoredWeightFormat(
        _as_ours, "weights of 4 and 8 bits are multiplied as they are, by activations rounded to 8 bits"
    ),
    StoredWeightFormat(
        _widened_fp8,
        "this device multiplies no fp8: weights are widened when they are loaded, and take the memory of the dtype",
    ),
    StoredWeightFormat(
        _widened,
        "no kernel here takes the form in which weights are stored: they are widened when they are loaded, and take "
        "the memory of the dtype",
    ),
)
