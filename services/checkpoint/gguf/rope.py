"""Reads the scaling of rotary embeddings from the metadata of a GGUF file, as config.json's `rope_scaling`.

Linear and yarn scaling are in the metadata. Llama 3's is a tensor of what each frequency is divided by, from which its
four parameters are found again.
"""

import math
import struct

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.fields import Json
from sluice_server.engine.models.gguf.architectures import refused
from sluice_server.engine.models.gguf.reader import GgufHeader, mapped
from sluice_server.services.checkpoint.gguf.metadata import Metadata, shortest

FREQUENCIES = "rope_freqs.weight"
KINDS = "none, linear, yarn"
PUBLISHED = (1.0, 4.0, 8192.0)  # low and high frequency factor, original context: of every published Llama 3
MAX_BASE = 1e12
CLOSE = 1e-4  # relative error of a factor computed from the parameters found
YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def read_scaling(metadata: Metadata, dim: int) -> dict[str, Json] | None:
    """Returns rope_scaling, or None without scaling. Raises ServiceError for scaling that is not supported."""
    kind = metadata.string(".rope.scaling.type", "linear" if metadata.has(".rope.scale_linear") else "none")
    if any(f"rope_factors_{one}.weight" in metadata.header.tensors for one in ("long", "short")):
        raise refused(metadata.header, "scaling by rope_factors_long.weight", f"{KINDS}, {FREQUENCIES}")
    if FREQUENCIES in metadata.header.tensors:
        if kind != "none":
            raise refused(metadata.header, f"{kind} scaling beside {FREQUENCIES}", "one of both")
        return _llama3(metadata, dim)
    if kind == "none":
        return None
    factor = metadata.number(".rope.scaling.factor", metadata.number(".rope.scale_linear", 1.0))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor} if factor != 1 else None
    if kind == "yarn":
        return _yarn(metadata, factor)
    raise refused(metadata.header, f"{metadata.architecture}.rope.scaling.type {kind!r:.80}", KINDS)


def _yarn(metadata: Metadata, factor: float) -> dict[str, Json]:
    for name, neutral in (("yarn_log_multiplier", 0.0), ("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0)):
        value = metadata.number(f".rope.scaling.{name}", neutral)
        if value not in (neutral, -1.0 if name == "yarn_ext_factor" else neutral):
            raise refused(metadata.header, f"{metadata.architecture}.rope.scaling.{name} {value}", str(neutral))
    found: dict[str, Json] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.integer(".rope.scaling.original_context_length"),
    }
    more = {new: metadata.number(f".rope.scaling.{old}") for old, new in YARN.items() if _has(metadata, old)}
    return {**found, **more}


def _has(metadata: Metadata, name: str) -> bool:
    return metadata.has(f".rope.scaling.{name}")


def _llama3(metadata: Metadata, dim: int) -> dict[str, Json] | None:
    """Returns the parameters of Llama 3's scaling, of which the tensor's factors follow."""
    factors = read_floats(metadata.header, FREQUENCIES)
    if len(factors) != dim // 2 or not all(math.isfinite(one) and 1 <= one <= 1e6 for one in factors):
        raise metadata.wrong(f"tensor {FREQUENCIES} must hold {dim // 2} numbers from 1 to 1000000")
    factor = shortest(max(factors))
    if factor == 1:
        return None
    base = metadata.number(".rope.freq_base", 10_000.0)
    if not 1 < base <= MAX_BASE:
        raise metadata.must_be(".rope.freq_base", f"above 1 and at most {MAX_BASE:.0f}")
    frequencies = [base ** (-2 * i / dim) / (2 * math.pi) for i in range(dim // 2)]
    for bounds in (PUBLISHED, *_fitted(factors, frequencies, factor)):
        if _explains(factors, frequencies, factor, bounds):
            low, high, original = bounds
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": round(original),
            }
    raise refused(metadata.header, f"scaling by {FREQUENCIES}, which is not Llama 3's,", KINDS)


def _fitted(factors: list[float], frequencies: list[float], factor: float) -> list[tuple[float, float, float]]:
    """Returns the bounds on which the first and the last interpolated frequency lie, with the low one as 1."""
    smooth = [
        (frequency, (factor / one - 1) / (factor - 1))
        for one, frequency in zip(factors, frequencies, strict=True)
        if 1 < one < factor * (1 - CLOSE)
    ]
    if len(smooth) < 2 or smooth[0][1] <= smooth[-1][1]:
        return []
    (first, upper), (last, lower) = smooth[0], smooth[-1]
    slope = (upper - lower) / (first - last)
    offset = slope * last - lower
    if not 1e-3 < offset < 1e3:
        return []
    high = round(1 + 1 / offset, 4)
    return [(1.0, high, slope * (high - 1))]


def _explains(
    factors: list[float], frequencies: list[float], factor: float, bounds: tuple[float, float, float]
) -> bool:
    low, high, original = bounds
    for found, frequency in zip(factors, frequencies, strict=True):
        smooth = min(1.0, max(0.0, (round(original) * frequency - low) / (high - low)))
        if abs(found * ((1 - smooth) / factor + smooth) - 1) > CLOSE:
            return False
    return True


def read_floats(header: GgufHeader, name: str) -> list[float]:
    """Returns the numbers of a small F32 tensor. Raises ServiceError."""
    info = header.tensors[name]
    if info.type.name != "F32" or len(info.shape) != 1 or info.size > 1 << 20:
        raise _not_floats(header, name)
    with mapped(header.path) as data:
        return list(struct.unpack_from(f"<{info.shape[0]}f", data, info.start))


def _not_floats(header: GgufHeader, name: str) -> ServiceError:
    return refused(header, f"tensor {name} of {header.tensors[name].type.name}", "a vector of F32")
