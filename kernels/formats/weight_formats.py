"""Chooses the linear layer for a weight: a table from weight formats to implementations, best first.

Formats: float32 and bfloat16 keep the weight's values; int8 and int4 quantise them; on a GPU, w8a8 and fp8 quantise the
activations too. A second table, STORED, chooses the implementation for weights that came in 4 bits or float8.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats import private_operators as private
from sluice_server.kernels.formats.gpu_linear import EightBitsOnGpu, Int4OnGpu, Int8OnGpu
from sluice_server.kernels.formats.integer_linear import integer_linear
from sluice_server.kernels.formats.linear import (
    BlockedLinear,
    GpuLinear,
    NativePanels,
    OneDnnLinear,
    PackedLinear,
    TransposedLinear,
)
from sluice_server.kernels.formats.packed_weights import (
    GroupWeight,
    Int4Weight,
    Int8Weight,
    Packed,
    dequantise,
    quantise_rows,
)
from sluice_server.kernels.formats.quantised import QuantisedWeight, from_int4, round_weight, takes_int4
from sluice_server.kernels.triton.support import FP8_SINCE

Make = Callable[[Tensor, Tensor | None, bool], PackedLinear]


@dataclasses.dataclass(frozen=True, slots=True)
class WeightFormat:
    """An implementation of a weight format.

    Attributes:
        fits: whether it can serve a weight on that device; called when a weight is packed.
        make: builds the layer from weight [N, K], bias [N] and whether the layer is gated.
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


def _integers(bits: int, on_gpu: Callable[[Tensor, Tensor | None], PackedLinear]) -> tuple[WeightFormat, ...]:
    return (
        WeightFormat(
            _on_cpu, lambda weight, bias, gated: integer_linear(round_weight(weight.float(), bits), bias, gated)
        ),
        WeightFormat(_on_gpu, lambda weight, bias, gated: on_gpu(weight, bias)),
    )


def _both(kept: torch.dtype) -> tuple[WeightFormat, ...]:
    """Returns the implementations with weights and activations in `kept`."""

    def make(weight: Tensor, bias: Tensor | None, gated: bool) -> PackedLinear:
        return EightBitsOnGpu(quantise_rows(weight, kept), bias, weight.dtype)

    return (WeightFormat(_on_gpu, make),)


ANY = WeightFormat(lambda device: True, lambda weight, bias, gated: PackedLinear(weight, bias))
GPU = WeightFormat(_on_gpu, lambda weight, bias, gated: GpuLinear(weight, bias))
OWN = WeightFormat(_own, NativePanels)
ONEDNN, ONEDNN32 = (
    WeightFormat(functools.partial(_onednn, dtype), lambda weight, bias, gated: OneDnnLinear(weight, bias))
    for dtype in (torch.bfloat16, torch.float32)
)
KINDS: Mapping[str, tuple[WeightFormat, ...]] = {
    "float32": (
        OWN,
        ONEDNN32,
        WeightFormat(_on_cpu, lambda weight, bias, gated: TransposedLinear(weight, bias)),
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
        WeightFormat(_on_cpu, lambda weight, bias, gated: BlockedLinear(weight.clone(), bias)),
        GPU,
        ANY,
    ),
    "int8": _integers(8, Int8OnGpu),
    # The same format for any number of rows: another format for many rows would round differently, and a request's
    # tokens would depend on the other requests. Nor would it be faster. Measured on Skylake, without VNNI, N, K = 3072,
    # 1024: int4's time over that of int8 is 0.61 at 1 row, 0.67 at 4, 0.63 at 8, 0.61 at 32 and at 128.
    "int4": _integers(4, Int4OnGpu),
    "w8a8": _both(torch.int8),
    "fp8": _both(torch.float8_e4m3fn),
}
# More precise formats for layers whose errors directly affect the logits. On a GPU, int8 does not round activations.
PRECISE = {"int4": "int8", "w8a8": "int8", "fp8": "int8"}


def pack(
    weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, precise: bool = False, weights: str = ""
) -> PackedLinear:
    """Packs a weight [N, K] and bias [N] in the format `weights` (empty: its own dtype) for the device that it is on.

    `gated` if only `apply_gated` will be used; `precise` selects the format in PRECISE. Raises ValueError if no
    implementation multiplies that format on the device.
    """
    name = weights or str(weight.dtype).removeprefix("torch.")
    name = PRECISE.get(name, name) if precise else name
    if weight.device.type == "meta":  # only shapes are needed
        return PackedLinear(weight, bias)
    kind = next((kind for kind in KINDS[name] if kind.fits(weight.device)), None)
    if kind is None:
        raise ValueError(f"nothing multiplies weights of {name} on {weight.device}")
    return kind.make(weight, bias, gated)


@dataclasses.dataclass(frozen=True, slots=True)
class StoredWeightFormat:
    """An implementation for weights that are quantised in the checkpoint.

    Attributes:
        fits: whether it can serve this weight on that device.
        make: builds the layer from the weight, a bias [N], the dtype of unquantised tensors, and whether the layer is
            gated.
        note: a notice for the operator; empty if there is none.
    """

    fits: Callable[[Packed, torch.device], bool]
    make: Callable[[Packed, Tensor | None, torch.dtype, bool], PackedLinear]
    note: str = ""


def stored_kind(packed: Packed, device: torch.device) -> StoredWeightFormat:
    """Returns the best implementation for a quantised weight on that device."""
    return next(kind for kind in STORED if kind.fits(packed, device))


def _multiplies_fp8(device: torch.device) -> bool:
    return _on_gpu(device) and torch.cuda.get_device_capability(device) >= divmod(FP8_SINCE, 10)


def _as_ours(packed: Packed, bias: Tensor | None, dtype: torch.dtype, gated: bool) -> PackedLinear:
    assert isinstance(packed, Int4Weight)
    return integer_linear(from_int4(packed), bias, gated)


def _in_groups(packed: Packed, bias: Tensor | None, dtype: torch.dtype, gated: bool) -> PackedLinear:
    assert isinstance(packed, GroupWeight)
    return integer_linear(QuantisedWeight(packed.bits, packed.levels, packed.scales, packed.minima), bias, gated)


def _int4_on_gpu(packed: Packed, bias: Tensor | None, dtype: torch.dtype, gated: bool) -> PackedLinear:
    assert isinstance(packed, Int4Weight)
    return Int4OnGpu(packed, bias, dtype)


def _fp8_on_gpu(packed: Packed, bias: Tensor | None, dtype: torch.dtype, gated: bool) -> PackedLinear:
    assert isinstance(packed, Int8Weight)
    return EightBitsOnGpu(packed, bias, dtype)


def _widened(packed: Packed, bias: Tensor | None, dtype: torch.dtype, gated: bool) -> PackedLinear:
    return pack(dequantise(packed).to(dtype), bias, gated=gated)


STORED = (
    StoredWeightFormat(
        lambda packed, device: isinstance(packed, GroupWeight) and _on_cpu(device),
        _in_groups,
        "weights in groups of 32 are multiplied as they are, by activations rounded to 8 bits",
    ),
    StoredWeightFormat(lambda packed, device: isinstance(packed, GroupWeight), _widened),
    StoredWeightFormat(lambda packed, device: isinstance(packed, Int4Weight) and _on_gpu(device), _int4_on_gpu),
    StoredWeightFormat(
        lambda packed, device: isinstance(packed, Int4Weight) and _on_cpu(device) and takes_int4(packed),
        _as_ours,
        "4-bit weights are multiplied as they are, by activations rounded to 8 bits",
    ),
    StoredWeightFormat(
        lambda packed, device: isinstance(packed, Int4Weight),
        _widened,
        "4-bit weights in groups that no kernel here takes are widened when they are loaded: they take the memory of "
        "the dtype",
    ),
    StoredWeightFormat(
        lambda packed, device: _multiplies_fp8(device),
        _fp8_on_gpu,
        "activations are rounded to fp8 row by row: scales of activations in the checkpoint are not used",
    ),
    StoredWeightFormat(
        lambda packed, device: True,
        _widened,
        "this device multiplies no fp8: weights are widened when they are loaded, and take the memory of the dtype",
    ),
)
