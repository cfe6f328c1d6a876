"""Reads a PEFT folder (adapter_config.json, adapter_model.safetensors) into a frozen `Adapter`, or refuses it whole.

Everything is checked against the base before anything is kept: names, shapes, ranks and numbers of every tensor. A
tensor that would not be used is refused, as is a module that the file names and does not have. Pickle files are never
opened.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from blake3 import blake3
from torch import Tensor

from sluice_server.engine.adapters.config import (
    CONFIG,
    MAX_RANK,
    AdapterConfig,
    invalid_adapter,
    is_named,
    parse_config,
)
from sluice_server.engine.adapters.folder import PIECE, find_folder, has_file, no_rest, read_file
from sluice_server.engine.adapters.modules import Module
from sluice_server.engine.adapters.stored import tensors_of
from sluice_server.engine.errors import unsupported
from sluice_server.engine.models.fields import shown
from sluice_server.engine.models.weights import is_finite, known_name

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."  # before a base's names in PEFT's files
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20  # of a thousand layers


@dataclasses.dataclass(frozen=True, eq=False)
class LowRank:
    """What an adapter adds to a module with weight W: (W + scale · B · A) x.

    Attributes:
        a: [rank, inputs], as stored.
        b: [outputs, rank].
    """

    a: Tensor
    b: Tensor
    scale: float


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in host memory.

    Attributes:
        digest: BLAKE3 of both files: equal for equal content, whatever its name.
        parts: by the names of modules in the base's checkpoint.
    """

    digest: bytes
    parts: Mapping[str, LowRank]

    @property
    def num_bytes(self) -> int:
        """The bytes of its tensors."""
        return sum(one.nbytes for part in self.parts.values() for one in (part.a, part.b))

    @property
    def rank(self) -> int:
        """The greatest rank of its modules."""
        return max(len(part.a) for part in self.parts.values())


def read_adapter(
    root: Path, path: str, modules: Mapping[str, Module], limit: int | None = None, rest: Callable[[], None] = no_rest
) -> Adapter:
    """Reads the folder `path` below `root`, for a base with these modules; see `modules_of`.

    Args:
        limit: bytes that its tensors may have; None for what the greatest rank takes in float32.
        rest: called between tensors and between pieces of the file, so that other threads may run.

    Raises ServiceError: ADAPTER_INVALID for a folder that is no adapter of this base, UNIMPLEMENTED for an adapter of a
    kind that is not built. Nothing is kept then.
    """
    folder = find_folder(root, path)
    limits = most_bytes(modules) if limit is None else {CONFIG: MAX_CONFIG_BYTES, WEIGHTS: MAX_HEADER_BYTES + limit}
    text = read_file(root, folder, CONFIG, limits[CONFIG])
    config = parse_config(bytes(text))
    if not has_file(folder, WEIGHTS) and has_file(folder, PICKLE):
        said = f"the folder holds only {PICKLE}, which can run code when read"
        raise invalid_adapter(f"{said}: save the adapter as {WEIGHTS}")
    content = read_file(root, folder, WEIGHTS, limits[WEIGHTS], rest)
    digest = blake3()
    for one in (text, content):
        digest.update(len(one).to_bytes(8, "little"))
        for first in range(0, len(one), PIECE):
            digest.update(one[first : first + PIECE])
            rest()
    tensors = {}
    for name, tensor in tensors_of(content, WEIGHTS):
        tensors[name] = tensor
        rest()
    parts = _parts(config, modules, tensors, rest)
    _check_names(config, modules, parts)
    return Adapter(digest.digest(), parts)


def most_bytes(modules: Mapping[str, Module]) -> dict[str, int]:
    """Returns the files of an adapter of a base with these modules, and the most bytes that each may have."""
    greatest = sum(4 * MAX_RANK * (one.inputs + one.outputs) for one in modules.values())
    return {CONFIG: MAX_CONFIG_BYTES, WEIGHTS: MAX_HEADER_BYTES + greatest}


def _parts(
    config: AdapterConfig, modules: Mapping[str, Module], tensors: Mapping[str, Tensor], rest: Callable[[], None]
) -> dict[str, LowRank]:
    """Returns what an adapter adds, by module. Raises ServiceError naming the first tensor that does not fit."""
    halves: dict[str, dict[str, Tensor]] = {}
    for stored, tensor in sorted(tensors.items()):
        rest()
        name, half = _module_of(stored)
        module = modules.get(name)
        if module is None or half not in "AB":
            raise _unused(stored, modules)
        rank = config.rank_of(name)
        shape = (rank, module.inputs) if half == "A" else (module.outputs, rank)
        if tuple(tensor.shape) != shape:
            text = f"has shape {list(tensor.shape)}; {CONFIG} and the base imply {list(shape)}"
            raise invalid_adapter(f"{WEIGHTS}: tensor {stored} {text}")
        if not is_finite(tensor):
            raise invalid_adapter(f"{WEIGHTS}: tensor {stored} holds NaN or an infinity")
        pair = halves.setdefault(name, {})
        if half in pair:
            raise invalid_adapter(f"{WEIGHTS} holds lora_{half} of {name} twice, as {stored} too")
        pair[half] = tensor
    if not halves:
        raise invalid_adapter(f"{WEIGHTS} holds no tensors")
    for name, pair in halves.items():
        if len(pair) < 2:
            raise invalid_adapter(f"{WEIGHTS}: {name} has lora_{next(iter(pair))} alone")
    return {name: LowRank(pair["A"], pair["B"], config.scale_of(name)) for name, pair in halves.items()}


def _module_of(stored: str) -> tuple[str, str]:
    """Returns the module of a tensor as a checkpoint of text alone names it, and A, B or "?" for no half."""
    if stored.startswith(PREFIX):
        for half in "AB":
            if stored.endswith(f".lora_{half}.weight"):
                return known_name(stored.removeprefix(PREFIX).removesuffix(f".lora_{half}.weight")), half
    return stored, "?"


def _unused(stored: str, modules: Mapping[str, Module]) -> Exception:
    """Returns the error for a tensor that no module of the base takes."""
    said = f"{WEIGHTS}: tensor {shown(stored)}"
    for part, what in (("experts", "experts"), ("embed_tokens", "embeddings"), ("lm_head", "embeddings")):
        if part in stored:
            return unsupported("adapter", f"{said}: adapters of {what} are not supported")
    known = ", ".join(dict.fromkeys(one.projection for one in modules.values()))
    return invalid_adapter(f"{said} would not be used: this base takes lora_A.weight and lora_B.weight of {known}")


def _check_names(config: AdapterConfig, modules: Mapping[str, Module], parts: Mapping[str, LowRank]) -> None:
    """Raises ServiceError for a name in the config that names no module, or one that the tensors lack."""
    named = {"target_modules": config.targets or (), "rank_pattern": config.ranks, "alpha_pattern": config.alphas}
    for field, keys in named.items():
        for key in keys:
            found = [name for name in modules if is_named(name, key)]
            if not found:
                text = "which is no module of this base that adapters are supported for"
                raise invalid_adapter(f"{CONFIG}: {field} names {shown(key)}, {text}")
            missing = next((name for name in found if name not in parts), None)
            if field == "target_modules" and missing is not None:
                text = f"{CONFIG}: target_modules names {shown(key)}, and {WEIGHTS} has no tensors of {missing}"
                raise invalid_adapter(text)
