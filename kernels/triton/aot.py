"""Compiles kernels ahead of time: one configuration for one GPU architecture, and the resources that it uses.

Takes an `AotCase`; returns `KernelResources` read from the machine code, and their faults. Needs no GPU: the assembler
and the object dumper come with Triton. Independent of the kernels; must not run under the interpreter.
"""

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_BYTES = {80: 166_912, 90: 232_448}  # shared memory of one block, by compute capability: A100 and H100/H200
WARP = 32
SPILLED_BYTES = 32  # allowed for each thread: some assembler versions spill a few bytes, too large tiles hundreds
DUMPER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
PATTERNS = {
    "vector_loads": r"ld\.global[^;\n]*\.v[248]",
    "vector_stores": r"st\.global[^;\n]*\.v[248]",
    "async_copies": r"cp\.async\.(?:c[ag]|bulk)",
    "mma": r"(?<!w)(?<!wg)mma\.sync",
    "wgmma": r"wgmma\.mma_async",
}


@dataclasses.dataclass(frozen=True)
class AotCase:
    """One configuration of a kernel.

    Attributes:
        name: unique name, family/special features.
        kernel: the function under `triton.jit`.
        types: for each argument that is not a constant, Triton's name of its type: "*bf16", "i32", "fp32".
        constants: value of each constant argument.
        unaligned: arguments that need not be divisible by 16; every other pointer and integer is.
        tensor_cores: required instructions: "mma", "wgmma" (mma where there is no wgmma) or empty for none.
        vectors: "loads" and "stores" that must be vectorised.
        since, until: least and greatest compute capability.
        is_quick: compiled in each test run, not only in the long one.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    unaligned: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 2
    tensor_cores: str = ""
    vectors: frozenset[str] = frozenset({"loads"})
    since: int = 80
    is_quick: bool = False
    until: int = 90


@dataclasses.dataclass(frozen=True, slots=True)
class KernelResources:
    """Resources of a compiled kernel, and how often some instructions occur in its code.

    Attributes:
        registers: of a thread.
        stack: bytes of a thread, used for spills.
        shared: bytes of shared memory.
        vector_loads, vector_stores, async_copies, mma, wgmma: number of these instructions in the PTX.
        cubin_bytes: size of the machine code.
    """

    registers: int
    stack: int
    shared: int
    vector_loads: int
    vector_stores: int
    async_copies: int
    mma: int
    wgmma: int
    cubin_bytes: int


def compile_case(case: AotCase, capability: int) -> KernelResources:
    """Compiles for a compute capability (80, 90). Raises triton.CompilationError when it does not compile."""
    arguments = list(case.kernel.arg_names)
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in arguments}
    aligned = [
        name
        for name, kind in case.types.items()
        if name not in case.unaligned and (kind.startswith("*") or kind in ("i32", "i64"))
    ]
    attributes = {(arguments.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=dict(case.constants), attrs=attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    built = triton.compile(source, target=GPUTarget("cuda", capability, WARP), options=options)
    registers, stack = _usage(built.asm["cubin"])
    counts = {name: len(re.findall(pattern, built.asm["ptx"])) for name, pattern in PATTERNS.items()}
    return KernelResources(
        registers=registers,
        stack=stack,
        shared=built.metadata.shared,
        cubin_bytes=len(built.asm["cubin"]),
        **counts,
    )


def faults(case: AotCase, capability: int, found: KernelResources) -> list[str]:
    """Returns what is wrong with a compiled kernel; these conditions must hold with any version of the compiler."""
    wrong = []
    if found.stack > SPILLED_BYTES:
        wrong.append(f"spills: {found.stack} bytes of stack; at most {SPILLED_BYTES} are let pass")
    if found.shared > SHARED_BYTES[capability]:
        wrong.append(f"{found.shared} bytes of shared memory; a block has {SHARED_BYTES[capability]}")
    if "loads" in case.vectors and not found.vector_loads:
        wrong.append("no vector loads")
    if "stores" in case.vectors and not found.vector_stores:
        wrong.append("no vector stores")
    if case.tensor_cores == "wgmma" and capability >= 90 and not found.wgmma:
        wrong.append("no wgmma")
    if case.tensor_cores and not found.mma and not found.wgmma:
        wrong.append("no tensor cores")
    return wrong


def _usage(cubin: bytes) -> tuple[int, int]:
    """Returns the registers and the bytes of stack of the one function in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([DUMPER, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", report.stdout + report.stderr)
    assert found is not None, report.stdout + report.stderr
    return int(found[1]), int(found[2])
