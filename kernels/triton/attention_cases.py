"""Configurations of the attention kernels that are compiled ahead of time: those that the rules of `configs` choose."""

import torch

from sluice_server.kernels.triton import attention_plan, configs
from sluice_server.kernels.triton.aot import SHARED_BYTES, SPILLED_BYTES, AotCase
from sluice_server.kernels.triton.attention import MERGED, precision
from sluice_server.kernels.triton.attention_merge import attention_merge_kernel
from sluice_server.kernels.triton.attention_prefill import attention_prefill_kernel
from sluice_server.kernels.triton.attention_split import attention_split_kernel
from sluice_server.kernels.triton.configs import AttentionShape, AttentionTiles
from sluice_server.kernels.triton.numbers import next_power_of_two, pointer
from sluice_server.kernels.triton.support import FP8_SINCE

INTS = ("q_token", "q_head", "cache_block", "cache_offset", "cache_kind", "cache_head", "tables_row", "out_token")
LOOSE = ("scales_block", "scales_offset", "scales_kind", "scales_head", "window")  # not divisible by 16 in general
FLOATS = ("scale", "cap")
# Bytes that a case may spill beyond what all may: with Triton 3.7.1 for sm_100 48, with 3.9.0 for sm_90 40.
SPILLED = {"split/d128-g4-fixed": 48}


def _computed(kept: torch.dtype) -> torch.dtype:
    """Returns the dtype of queries for keys stored in `kept`."""
    return torch.bfloat16 if kept.itemsize == 1 else kept


def _types(kept: torch.dtype) -> dict[str, str]:
    """Returns the argument types that both schedules share."""
    scales = "*fp32" if kept.itemsize == 1 else pointer(kept)
    types = dict.fromkeys((*INTS, *LOOSE), "i32") | dict.fromkeys(FLOATS, "fp32")
    computed = pointer(_computed(kept))
    types |= {"q": computed, "cache": pointer(kept), "scales": scales, "out": computed}
    types |= {"parts": "*fp32", "sums": "*fp32"}
    return types | dict.fromkeys(("tables", "starts", "contexts", "items", "ends"), "*i32")


def _constants(shape: AttentionShape, tiles: AttentionTiles, kept: torch.dtype, flags: set[str]) -> dict[str, object]:
    return {
        "KEYS": 8,
        "GROUP": shape.group,
        "DIM": shape.dim,
        "WIDTH": shape.width,
        "BLOCK": 32,
        "TILE": tiles.tile,
        "BLOCK_M": tiles.block_m,
        "HAS_WINDOW": "window" in flags,
        "HAS_CAP": "cap" in flags,
        "HAS_SINKS": "sinks" in flags,
        "HAS_ENDS": "ends" in flags,
        "QUANTISED": kept.itemsize == 1,
        "PRECISION": precision(_computed(kept)),
    }


def _split(
    name: str,
    capability: int,
    dim: int,
    group: int,
    kept: torch.dtype = torch.bfloat16,
    *,
    max_query: int = 1,
    flags: str = "",
    is_quick: bool = False,
) -> AotCase:
    shape, given = AttentionShape(dim, group, kept.itemsize, capability), set(flags.split())
    is_fixed = "fixed" in given
    tiles = configs.split_tiles(shape, configs.FIXED_ROWS if is_fixed else max_query)
    types = _types(kept)
    types |= {"sinks": "*fp32" if "sinks" in given else types["q"], "tree": "*i64" if "tree" in given else "*i32"}
    constants = _constants(shape, tiles, kept, given) | {
        "SPLIT": configs.FIXED_SPLIT if is_fixed else 0,
        "IS_CAUSAL": not given & {"prefix", "tree"},
        "HAS_TREE": "tree" in given,
    }
    return _case(f"split/{name}", attention_split_kernel, types, constants, tiles, "mma", capability, is_quick)


def _prefill(
    name: str,
    capability: int,
    dim: int,
    group: int,
    kept: torch.dtype = torch.bfloat16,
    *,
    flags: str = "",
    is_quick: bool = False,
) -> AotCase:
    shape, given = AttentionShape(dim, group, kept.itemsize, capability), set(flags.split())
    tiles = configs.prefill_tiles(shape)
    types = _types(kept)
    types |= {"sinks": "*fp32" if "sinks" in given else types["q"]}
    constants = _constants(shape, tiles, kept, given)
    return _case(f"prefill/{name}", attention_prefill_kernel, types, constants, tiles, "wgmma", capability, is_quick)


def _case(
    name: str,
    kernel: object,
    types: dict[str, str],
    constants: dict[str, object],
    tiles: AttentionTiles,
    tensor_cores: str,
    capability: int,
    is_quick: bool,
) -> AotCase:
    vectors = frozenset({"loads"})
    return AotCase(
        f"attention-{name}",
        kernel,
        types,
        constants,
        frozenset(LOOSE),
        tiles.num_warps,
        tiles.num_stages,
        tensor_cores,
        vectors,
        capability,
        is_quick,
        until=capability,
        is_pipelined=True,
        spilled=SPILLED.get(name, SPILLED_BYTES),
    )


def _merge(dim: int, *, is_fixed: bool = False, has_before: bool = False, is_quick: bool = False) -> AotCase:
    types = dict.fromkeys(("parts", "sums", "parts_before", "sums_before", "sinks"), "*fp32")
    types |= {"entries": "*i32", "before": "*i32", "out": "*bf16", "out_token": "i32"}
    constants = {"HEADS": 32, "DIM": dim, "WIDTH": next_power_of_two(dim), "CHUNK": 1 if is_fixed else MERGED}
    constants |= {"HAS_BEFORE": has_before, "HAS_SINKS": True}
    name = f"d{dim}{'-fixed' if is_fixed else ''}{'-before' if has_before else ''}"
    vectors = frozenset[str]() if is_fixed else frozenset({"loads"})
    return AotCase(
        f"attention-merge/{name}", attention_merge_kernel, types, constants, vectors=vectors, is_quick=is_quick
    )


def _of(capability: int) -> tuple[AotCase, ...]:
    is_new = capability >= FP8_SINCE
    names = {torch.float16: "fp16", torch.int8: "int8"}
    if is_new:
        names |= {torch.float8_e4m3fn: "fp8"}
    narrow = [one for one in names if one.itemsize == 1]
    eight_bits = [(one, dim) for one in narrow for dim in (64, 192, 256)]
    variants = {
        "window": "window",
        "cap": "cap",
        "sinks": "sinks",
        "prefix": "prefix",
        "fixed": "fixed",
    }
    return (
        _split("d128-g4", capability, 128, 4, is_quick=True),
        *(_split(f"d{dim}-g4", capability, dim, 4) for dim in (64, 80, 96, 192, 256)),
        *(_split(f"d128-g{group}", capability, 128, group) for group in (1, 5, 8, 32)),
        *(_split(f"d128-g4-{name}", capability, 128, 4, one, is_quick=name == "fp8") for one, name in names.items()),
        *(_split(f"d128-g4-{name}", capability, 128, 4, flags=flags) for name, flags in variants.items()),
        _split("d128-g4-drafts", capability, 128, 4, max_query=5),
        _split("d128-g4-tree", capability, 128, 4, max_query=32, flags="tree"),
        _split("d128-g4-tree-window", capability, 128, 4, max_query=32, flags="tree window"),
        _prefill("d128-g4", capability, 128, 4, is_quick=True),
        *(_prefill(f"d{dim}-g4", capability, dim, 4) for dim in (64, 80, 96, 192, 256)),
        *(_prefill(f"d128-g{group}", capability, 128, group) for group in (1, 5, 8, 32)),
        *(_prefill(f"d128-g4-{name}", capability, 128, 4, one) for one, name in names.items()),
        *(_split(f"d{dim}-g4-{names[one]}", capability, dim, 4, one) for one, dim in eight_bits),
        *(_prefill(f"d{dim}-g4-{names[one]}", capability, dim, 4, one) for one, dim in eight_bits),
        *(_prefill(f"d128-g4-{name}", capability, 128, 4, flags=name) for name in ("window", "cap", "sinks")),
        _split("d256-g2-cap-window", capability, 256, 2, flags="cap window"),
        _prefill("d256-g2-cap-window", capability, 256, 2, flags="cap window"),
        _prefill("d256-g2-ends-window", capability, 256, 2, flags="ends window"),
        _split("d256-g2-tree-cap-window", capability, 256, 2, max_query=32, flags="tree cap window"),
        _split("d256-g2-fixed-cap-window", capability, 256, 2, flags="fixed cap window"),
        *(_split(f"d256-g2-cap-{names[one]}", capability, 256, 2, one, flags="cap window") for one in narrow),
        *(_prefill(f"d256-g2-cap-{names[one]}", capability, 256, 2, one, flags="cap window") for one in narrow),
    )


CASES = (
    *(case for capability in SHARED_BYTES for case in _of(capability)),
    *(_merge(dim, is_quick=dim == 128) for dim in (64, 80, 128, 256)),
    _merge(128, is_fixed=True),
    _merge(128, has_before=True),
    *attention_plan.CASES,
)
