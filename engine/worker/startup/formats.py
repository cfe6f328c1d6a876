"""Chooses the number formats of weights and cache from the settings, checked against the device.

Gives one value and notes for the log. Raises ServiceError at start for what is not supported, with an alternative.
"""

import dataclasses
from collections.abc import Iterator

import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.config import ModelConfig
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats import private_operators as private
from sluice_server.kernels.formats.weight_formats import computes_bfloat16

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
# Values of settings that a CPU does not support, with what to take instead.
NOT_ON_CPU = {
    "quantization": {"w8a8": "int8, which rounds activations too on a CPU", "fp8": "none, int8 or int4"},
    "kv_cache_dtype": {"fp8": "auto, float32, bfloat16 or int8"},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Formats:
    """The number formats of one engine.

    Attributes:
        dtype: of weights that are not rounded; on CUDA also of activations, including those between rounded weights. On
            CPU activations are float32 with our own kernels.
        weights: int8 or int4 if matrices are rounded, w8a8 or fp8 if activations are too, else empty.
        cache: of keys and values.
        notes: for the operator: why something is slower than it could be.
    """

    dtype: torch.dtype
    weights: str
    cache: torch.dtype
    notes: tuple[str, ...] = ()

    @property
    def fp8_setting(self) -> str:
        """The flag that requests float8, or an empty string."""
        if self.weights == "fp8":
            return "--quantization fp8"
        return "--kv-cache-dtype fp8" if self.cache is torch.float8_e4m3fn else ""


def choose_formats(config: EngineConfig, device: torch.device) -> Formats:
    """Returns the formats. Raises ServiceError naming the flag, its value and what to do."""
    weights = "" if config.quantization == "none" else config.quantization
    on_cpu = device.type == "cpu"
    if on_cpu:
        _refuse_on_cpu(config)
    if weights and on_cpu and config.dtype == "bfloat16":
        raise unusable(
            "quantization", f"{weights} computes in float32 between its integers: leave out --dtype bfloat16"
        )
    unrounded = choose_dtype(config.dtype, device)
    dtype = torch.float32 if weights and on_cpu else unrounded
    cache = auto_cache(config, device) if config.kv_cache_dtype == "auto" else DTYPES[config.kv_cache_dtype]
    if not on_cpu and cache not in (dtype, torch.int8, torch.float8_e4m3fn):
        text = f"{config.kv_cache_dtype} needs --device cpu; take {name_of(dtype)}, int8 or fp8"
        raise unusable("kv_cache_dtype", text)
    return Formats(dtype, weights, cache, notes_of(dtype, weights) if on_cpu else ())


def name_of(dtype: torch.dtype) -> str:
    """Returns the dtype's name as settings and clients write it."""
    return next((name for name, one in DTYPES.items() if one is dtype), str(dtype).removeprefix("torch."))


def _refuse_on_cpu(config: EngineConfig) -> None:
    """Raises ServiceError for settings that need a GPU."""
    for name, value in (("quantization", config.quantization), ("kv_cache_dtype", config.kv_cache_dtype)):
        instead = NOT_ON_CPU[name].get(value)
        if instead is not None:
            raise unusable(name, f"{value} needs --device cuda; on a CPU take {instead}")


def check_stored(model: ModelConfig, formats: Formats) -> None:
    """Raises ServiceError if the weights of a checkpoint that is quantised already are to be rounded again.

    Of a GGUF file only those are that would be widened.
    """
    if formats.weights and model.stored is not None and model.stored.method != "gguf":
        text = f"{formats.weights}: the checkpoint is quantised already, with {model.stored.method}: leave it out"
        raise unusable("quantization", text)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the dtype of that name.

    auto takes bfloat16 only where the device computes in it: emulated, it is slower.
    """
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if computes_bfloat16() else torch.float32


def auto_cache(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Returns the cache's format where the settings name none: --dtype.

    Beside weights that are rounded on a CPU it is bfloat16, which rounds far less than they do, at half the bytes.
    """
    if config.dtype == "auto" and config.quantization != "none" and device.type == "cpu":
        return torch.bfloat16
    return choose_dtype(config.dtype, device)


def notes_of(dtype: torch.dtype, weights: str) -> tuple[str, ...]:
    """Returns what is slower on this CPU than it could be, and why."""
    notes = [*_machine_notes(weights)]
    if dtype is torch.bfloat16:
        notes += _bfloat16_notes()
    return tuple(notes)


def _machine_notes(weights: str) -> Iterator[str]:
    """Yields what this machine lacks."""
    known = builds.best_known()
    if not known:
        yield "this CPU has no AVX2, which sluice's kernels need: torch's slower operators are used"
    elif not builds.is_available():
        yield (
            f"no CPU kernels for {known} are installed: torch's slower operators are used; install a C++ compiler and "
            "reinstall sluice"
        )
    elif not known.startswith("v4"):
        yield "this CPU has no AVX-512: the kernels for AVX2 are used, with half as many numbers per instruction"
    elif builds.instruction_set() != known:
        yield f"the CPU kernels for {known} cannot be used here ({builds.why_not(known)}): slower"
    elif not builds.multiplies("avx512_vnni"):
        products = f"products of {weights} weights take" if weights else "with --quantization, products would take"
        yield f"this CPU has no AVX-512 VNNI: {products} four instructions where one would do"


def _bfloat16_notes() -> Iterator[str]:
    """Yields what this machine or this torch lacks for weights in bfloat16."""
    able, has_own = computes_bfloat16(), builds.is_available()
    if not able:
        yield "this CPU has no bfloat16 arithmetic: weights are kept in bfloat16 and widened as they are read"
    is_needed = not builds.multiplies("avx512_bf16") if able else not has_own
    if is_needed and (why := private.fault(private.PACKED_LINEAR[torch.bfloat16])):
        instead = "sluice's own" if has_own else "its plain one"
        yield f"torch's packed bfloat16 linear {why}: {instead} is used"


def unusable(name: str, message: str) -> ServiceError:
    """Returns the error for a setting that this machine or model does not support; it names the flag."""
    text = f"--{name.replace('_', '-')}: {message}"
    return ServiceError(Code.FAILED_PRECONDITION, "INVALID_SETTING", text, field=name)
