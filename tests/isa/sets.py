"""The instruction sets that can be forced: the environment variables of each, and our kernels that it may use.

A set is seen by torch, by oneDNN, by MKL, by NumPy's OpenBLAS, or by us; each reads its own variable when it is loaded,
so that a set holds for a process. Of a processor's own arithmetic only that processor tells.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from sluice_server.kernels.cpu import builds

ROOT = Path(__file__).parents[2]
NONE = "none"  # of our own kernels
KERNELS = "FORCED_KERNELS"  # the variable that `tests.isa.forced` reads


@dataclasses.dataclass(frozen=True)
class Forced:
    """Attributes:
    environment: what libraries are told.
    kernels: the only ones of our own; empty for those that serve by themselves.
    """

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kernels: str = NONE

    @property
    def name(self) -> str:
        """The set as one writes it before a command."""
        own = (f"kernels={self.kernels}",) if self.kernels else ()
        return " ".join((*(f"{key}={value}" for key, value in self.environment.items()), *own))

    def why_not(self) -> str:
        """The reason why this machine cannot be restricted to the set; "" if it can."""
        if self.kernels in ("", NONE):
            return ""
        if self.kernels not in builds.runnable():
            return "not an instruction set of this machine"
        return builds.why_not(self.kernels)

    def variables(self) -> dict[str, str]:
        """The environment of a process that is restricted to the set."""
        # As in the Makefile: threads that spin for one another take what the other one needs.
        return {"OMP_WAIT_POLICY": "passive", **os.environ, **self.environment, KERNELS: self.kernels}


def _each(variable: str, values: str) -> list[Forced]:
    return [Forced({variable: value}) for value in values.split()]


LOW = Forced({"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"})
SETS = (
    Forced(kernels=""),
    Forced(),
    *(Forced(kernels=name) for name in builds.KNOWN),
    # Torch's own answer decides which of our kernels serve.
    *(Forced({"ATEN_CPU_CAPABILITY": name}, kernels="") for name in ("default", "avx2", "avx512")),
    *_each("ATEN_CPU_CAPABILITY", "default avx2 avx512"),
    *_each("ONEDNN_MAX_CPU_ISA", "SSE41 AVX AVX2 AVX2_VNNI AVX512_CORE AVX512_CORE_VNNI AVX512_CORE_BF16"),
    *_each("MKL_ENABLE_INSTRUCTIONS", "SSE4_2 AVX2 AVX512"),
    *_each("MKL_CBWR", "COMPATIBLE AVX2 AVX512,STRICT"),
    *_each("OPENBLAS_CORETYPE", "Haswell SkylakeX Sandybridge"),
    LOW,
)
