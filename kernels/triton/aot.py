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

from sluice_server.kernels.triton.support import DEPENDENT_SINCE

# Shared memory of one block, by compute capability: A100, L40S, H100 and H200, B200, RTX 50.
SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
WARP = 32
SPILLED_BYTES = 32  # allowed for each thread: some assembler versions spill a few bytes, too large tiles hundreds
DUMPER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
PATTERNS = {
    "vector_loads": r"ld\.global[^;\n]*\.v[248]",
    "vector_stores": r"st\.global[^;\n]*\.v[248]",
    "async_copies": r"cp\.async\.(?:c[ag]|bulk)",
    "mma": r"(?<!w)(?<!wg)mma\.sync",
    "wgmma": r"wgmma\.mma_async|tcgen05\.mma",
}
BUFFERS = re.compile(r"ttg\.local_alloc[^\n]*memdesc<(\d+)x\d+x\d+x")  # of tiles that copies in flight fill
WAITS = re.compile(r"cp\.async\.wait_group\s+(\d+)")
# Address, name, and where a branch goes: "/*4b60*/ @!P0 BRA 0x2b90 ;".
SASS = r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)(?:\s(?:U?P\w+,\s*)?(0x[0-9a-f]+)\s*;)?"
LEAST_BUFFERS = 2
WARP_GROUPS = (90, 100)  # compute capabilities whose tensor cores are fed by groups of warps; sm_120's are not


@dataclasses.dataclass(frozen=True)
class AotCase:
    """One configuration of a kernel.

    Attributes:
        name: unique name, family/special features.
        kernel: the function under `triton.jit`.
        types: for each argument that is not a constant, Triton's name of its type: "*bf16", "i32", "fp32".
        constants: value of each constant argument.
        unaligned: arguments that need not be divisible by 16; every other pointer and integer is.
        tensor_cores: required instructions: "mma", "wgmma" (mma elsewhere than on `warp_groups`) or empty for none.
        vectors: "loads" and "stores" that must be vectorised.
        since, until: least and greatest compute capability.
        is_quick: compiled in each test run, not only in the long one.
        is_pipelined: while tensor cores multiply one tile, copies of the next ones must be in flight.
        spilled: bytes of a thread's stack that are let pass.
        warp_groups: compute capabilities where `tensor_cores` must be fed by groups of warps.
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
    until: int = 120
    is_pipelined: bool = False
    spilled: int = SPILLED_BYTES
    warp_groups: tuple[int, ...] = WARP_GROUPS


@dataclasses.dataclass(frozen=True, slots=True)
class KernelResources:
    """Resources of a compiled kernel, and how often some instructions occur in its code.

    Attributes:
        registers: of a thread.
        stack: bytes of a thread, used for spills.
        shared: bytes of shared memory.
        vector_loads, vector_stores, async_copies, mma, wgmma: number of these instructions in the PTX; wgmma counts
            tcgen05 too.
        buffers: tiles that each pipelined load has space for, the least of all; 0 if no load is pipelined.
        waits: groups of copies that may still be in flight where a tile is waited for, the most of all.
        loop: machine instructions of the shortest loop that multiplies on tensor cores; 0 without one.
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
    buffers: int
    waits: int
    loop: int
    cubin_bytes: int


def compiled(case: AotCase, target: GPUTarget) -> Any:  # noqa: ANN401 # Triton's
    """Compiles for a GPU. Raises triton.CompilationError when it does not compile."""
    arguments, constants = list(case.kernel.arg_names), dict(case.constants)
    if "IS_DEPENDENT" in arguments:  # as `dependent` decides
        constants["IS_DEPENDENT"] = target.backend == "cuda" and target.arch >= DEPENDENT_SINCE
    signature = {name: "constexpr" if name in constants else case.types[name] for name in arguments}
    aligned = [
        name
        for name, kind in case.types.items()
        if name not in case.unaligned and (kind.startswith("*") or kind in ("i32", "i64"))
    ]
    attributes = {(arguments.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    return triton.compile(source, target=target, options=options)


def compile_case(case: AotCase, capability: int) -> KernelResources:
    """Compiles for a compute capability (80, 90), and reads the machine code."""
    built = compiled(case, GPUTarget("cuda", capability, WARP))
    registers, stack = map(int, dumped(built.asm["cubin"], "-res-usage", r"REG:(\d+) STACK:(\d+)")[0])
    counts = {name: len(re.findall(pattern, built.asm["ptx"])) for name, pattern in PATTERNS.items()}
    return KernelResources(
        registers=registers,
        stack=stack,
        shared=built.metadata.shared,
        buffers=min(map(int, BUFFERS.findall(built.asm["ttgir"])), default=0),
        waits=max(map(int, WAITS.findall(built.asm["ptx"])), default=0),
        loop=loop_of(dumped(built.asm["cubin"], "-sass", SASS)),
        cubin_bytes=len(built.asm["cubin"]),
        **counts,
    )


def faults(case: AotCase, capability: int, found: KernelResources) -> list[str]:
    """Returns what is wrong with a compiled kernel; these conditions must hold with any version of the compiler."""
    wrong = []
    if found.stack > case.spilled:
        wrong.append(f"spills: {found.stack} bytes of stack; at most {case.spilled} are let pass")
    if found.shared > SHARED_BYTES[capability]:
        wrong.append(f"{found.shared} bytes of shared memory; a block has {SHARED_BYTES[capability]}")
    if "loads" in case.vectors and not found.vector_loads:
        wrong.append("no vector loads")
    if "stores" in case.vectors and not found.vector_stores:
        wrong.append("no vector stores")
    if case.tensor_cores == "wgmma" and capability in case.warp_groups and not found.wgmma:
        wrong.append("no wgmma")
    if case.tensor_cores and not found.mma and not found.wgmma:
        wrong.append("no tensor cores")
    if case.is_pipelined and found.buffers < LEAST_BUFFERS:
        wrong.append(f"keys and values have {found.buffers} buffers: {LEAST_BUFFERS} are needed to load ahead")
    if case.is_pipelined and not found.waits:
        wrong.append("each tile waits for all copies in flight")
    return wrong


def loop_of(instructions: list[tuple[str, str, str]]) -> int:
    """Returns the length of the shortest loop that has a tensor core instruction; 0 if none has.

    `instructions`: address, name, and the address that a branch jumps to, both in hexadecimal.
    """
    places = [int(address, 16) for address, _, _ in instructions]
    products = [at for at, (_, name, _) in zip(places, instructions, strict=True) if "MMA" in name]
    loops = [(int(to, 16), at) for at, (_, _, to) in zip(places, instructions, strict=True) if to and int(to, 16) < at]
    own = [(first, last) for first, last in loops if any(first <= at <= last for at in products)]
    return min((sum(first <= at <= last for at in places) for first, last in own), default=0)


def dumped(cubin: bytes, what: str, pattern: str) -> list[Any]:
    """Returns what of the object dumper's report on the one function in a cubin matches the pattern, at least once."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([DUMPER, what, file.name], capture_output=True, text=True, check=True)
    found = re.findall(pattern, report.stdout + report.stderr)
    assert found, report.stdout + report.stderr
    return found
