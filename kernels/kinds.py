"""Which linear serves which weights: a table from the format of a weight to the kinds that can multiply it, best first.

Formats: float32 and bfloat16 as the weight comes, int8 and int4 rounded from what comes.
"""

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kernels import native, private
from kernels.gpu_linear import Int4OnGpu, Int8OnGpu
from kernels.linear import OneDNN, OnGpu, PackedLinear, Panels, Transposed
from kernels.quantised import Integers, NativeIntegers, round_weight

Make = Callable[[Tensor, Tensor | None, bool], PackedLinear]


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Attributes:
    fits: whether it may serve a weight on that device, asked when one is packed.
    make: from weight [N, K], bias [N] and whether the layer is gated.
    """

    fits: Callable[[torch.device], bool]
    make: Make


def computes_bfloat16() -> bool:
    """Whether this CPU has arithmetic in bfloat16: emulated, it is slower than float32."""
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def _on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def _own(device: torch.device) -> bool:
    return device.type == "cpu" and native.is_available()


def _onednn(device: torch.device) -> bool:
    return device.type == "cpu" and not private.fault(private.PACKED_LINEAR)


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _integers(bits: int, on_gpu: Callable[[Tensor, Tensor | None], PackedLinear]) -> tuple[Kind, ...]:
    return (
        Kind(_own, lambda weight, bias, gated: NativeIntegers(round_weight(weight.float(), bits), bias, gated)),
        Kind(_on_cpu, lambda weight, bias, gated: Integers(round_weight(weight.float(), bits), bias)),
        Kind(_on_gpu, lambda weight, bias, gated: on_gpu(weight, bias)),
    )


ANY = Kind(lambda device: True, lambda weight, bias, gated: PackedLinear(weight, bias))
GPU = Kind(_on_gpu, lambda weight, bias, gated: OnGpu(weight, bias))
OWN = Kind(_own, Panels)
ONEDNN = Kind(_onednn, lambda weight, bias, gated: OneDNN(weight, bias))
KINDS: Mapping[str, tuple[Kind, ...]] = {
    "float32": (OWN, Kind(_on_cpu, lambda weight, bias, gated: Transposed(weight, bias)), GPU, ANY),
    # oneDNN's is at the bandwidth where the CPU computes in bfloat16; where it does not, at a tenth of it.
    "bfloat16": (dataclasses.replace(ONEDNN, fits=lambda d: computes_bfloat16() and _onednn(d)), OWN, ONEDNN, GPU, ANY),
    "int8": _integers(8, Int8OnGpu),
    # For any number of rows: a switch to another format at many would round otherwise, and a request's tokens would
    # depend on its company. Nor would it pay: measured on Skylake (no VNNI), N, K = 3072, 1024, int4's time over that of
    # int8 is 0.61 at 1 row, 0.67 at 4, 0.63 at 8 and 0.61 at 32 and 128.
    "int4": _integers(4, Int4OnGpu),
}
PRECISE = {"int4": "int8"}  # the format instead of another, where errors reach the logits undiluted


def pack(
    weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, precise: bool = False, weights: str = ""
) -> PackedLinear:
    """Pack a weight [N, K] and bias [N] in the format `weights` (empty: as it comes) for the device that it is on;
    `gated` if only `apply_gated` will be used. Raises ValueError where nothing multiplies that format."""
    name = weights or str(weight.dtype).removeprefix("torch.")
    name = PRECISE.get(name, name) if precise else name
    if weight.device.type == "meta":  # a plan of shapes
        return PackedLinear(weight, bias)
    kind = next((kind for kind in KINDS[name] if kind.fits(weight.device)), None)
    if kind is None:
        raise ValueError(f"nothing multiplies weights of {name} on {weight.device}")
    return kind.make(weight, bias, gated)
