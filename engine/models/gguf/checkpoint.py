"""The weights of GGUF files as a `WeightSource`: tensors by their Hugging Face names, widened to the model's dtype.

Files are memory-mapped and read tensor by tensor, as those of `Checkpoint` are.
"""

import math
import mmap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sluice_server.engine.models.fields import invalid_model
from sluice_server.engine.models.gguf.architectures import TensorPlace, architecture_of
from sluice_server.engine.models.gguf.blocks import IN_GROUPS, in_groups, widen
from sluice_server.engine.models.gguf.reader import GgufHeader, TensorInfo, mapped, parse_header
from sluice_server.engine.models.gguf.tensor_types import TensorType
from sluice_server.engine.models.spans import Dim, Shape, sizes_of, spans_of, whole_of
from sluice_server.engine.models.weights import is_finite
from sluice_server.kernels.formats.packed_weights import AffineWeight


class GgufCheckpoint:
    """The GGUF files of one model: one, or shards in their order."""

    def __init__(self, paths: Sequence[Path], dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._files: dict[str, tuple[GgufHeader, mmap.mmap, TensorInfo]] = {}  # by the file's name of a tensor
        self._sizes: dict[str, int] = {}  # elements of each tensor read
        self._widened = Widened()
        headers = [self._open(path.resolve()) for path in paths]
        self._header = headers[0]
        self._architecture = architecture_of(self._header)

    def _open(self, path: Path) -> GgufHeader:
        data = mapped(path)
        header = parse_header(path, data)
        for name, info in header.tensors.items():
            if name in self._files:
                raise invalid_model(path, f"holds the tensor {name}, as another shard does: download them again")
            self._files[name] = (header, data, info)
        return header

    def get(self, name: str, shape: Shape) -> Tensor:
        """Reads, checks and converts one tensor, or a part of it. Raises ServiceError naming file and tensor."""
        place = self._architecture.place(name)
        if place is None or place.name not in self._files:
            file_name = name if place is None else place.name
            raise invalid_model(self._header.path, f"holds no tensor {file_name}: its metadata asks for one")
        kind = self._files[place.name][2].type
        rows = self._rows(place, shape)
        found = widen(rows, kind, torch.float32 if place.offset else self._dtype).view(sizes_of(shape))
        if place.offset:
            found = (found - place.offset).to(self._dtype)
        self._check(place, found)
        self._sizes[name] = math.prod(whole_of(shape))
        if kind.is_quantised:
            self._widened.add(kind, found.numel(), found.numel() * found.itemsize)
        return found.to(self._device, copy=found.dim() == 1)  # vectors are kept, and must not be mapped from the file

    def stored(self, name: str, rows: Dim, width: Dim) -> AffineWeight | None:
        """Returns a projection in groups of 32 inputs, for the CPU's kernels, or None for one that is to be widened."""
        place = self._architecture.place(f"{name}.weight")
        if place is None or place.name not in self._files or self._device.type != "cpu":
            return None
        kind = self._files[place.name][2].type
        if kind.name not in IN_GROUPS:
            return None
        found = in_groups(self._rows(place, (rows, width)), kind)
        for numbers in (found.scales, found.minima):
            if numbers is not None:
                self._check(place, numbers)
        self._sizes[f"{name}.weight"] = math.prod(whole_of((rows, width)))
        return found

    def stored_experts(self, name: str, shape: tuple[Dim, Dim, Dim]) -> None:
        """Returns None: experts are read one by one."""

    def _check(self, place: TensorPlace, found: Tensor) -> None:
        """Raises ServiceError for numbers that are not finite."""
        if not is_finite(found):
            text = f"tensor {place.name} holds NaN or infinity: download the file again"
            raise invalid_model(self._files[place.name][0].path, text)

    def _rows(self, place: TensorPlace, shape: Shape) -> Tensor:
        """Returns the stored bytes of a tensor, or of a part of it, uint8 [rows, bytes], in the order of Hugging Face's
        rows. Raises OffBorder for a part whose inputs begin or end within a block."""
        header, data, info = self._files[place.name]
        whole = info.shape if place.expert is None else info.shape[1:]
        if whole != whole_of(shape) or (place.expert or 0) >= info.shape[0]:
            text = f"tensor {place.name} has shape {list(info.shape)}; the metadata implies {list(whole_of(shape))}"
            raise invalid_model(header.path, text if place.expert is None else f"{text} for each expert")
        if len(shape) == 1 and info.type.is_quantised:
            text = f"tensor {place.name} is a vector of {info.type.name}; vectors must be of F32, F16 or BF16"
            raise invalid_model(header.path, text)
        size = info.size // (1 if place.expert is None else info.shape[0])
        start = info.start + size * (place.expert or 0)
        rows = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start).view(whole[0], -1)
        first, *inputs = spans_of(shape)
        for one in inputs:  # of a matrix
            rows = rows[:, one.words(info.type.block, "inputs").times(info.type.size).slice]
        if place.turned:
            return rows.index_select(0, self._halves(place, whole[0])[first.slice])
        return rows[first.slice].contiguous()

    def _halves(self, place: TensorPlace, rows: int) -> Tensor:
        """Returns the order of rows that puts the even ones of each head before the odd ones: int64 [rows]."""
        metadata, name = self._header.metadata, self._header.metadata["general.architecture"]
        heads = metadata.get(f"{name}.attention.{place.turned}", metadata.get(f"{name}.attention.head_count"))
        if type(heads) is not int or heads < 1 or rows % (2 * heads):
            text = f"tensor {place.name} has {rows} rows, which are not of {heads} heads of an even size"
            raise invalid_model(self._header.path, text)
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)

    def has(self, name: str) -> bool:
        """Returns whether a file holds the tensor."""
        place = self._architecture.place(name)
        return place is not None and place.name in self._files

    def layers(self, before: str) -> set[int]:
        """Returns the numbers of layers that have tensors."""
        names = (name.split(".") for name in self._files if name.startswith("blk."))
        return {int(parts[1]) for parts in names if parts[1].isdecimal() and len(parts[1]) < 10}

    @property
    def num_parameters(self) -> int:
        """The number of elements of all tensors read so far."""
        return sum(self._sizes.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """For the operator: which types were widened, and what memory that takes."""
        return self._widened.notes(self._dtype)


class Widened:
    """What was widened: tensors of each type, and bytes before and after."""

    def __init__(self) -> None:
        self._types: Counter[str] = Counter()
        self._stored_bytes = self._widened_bytes = 0

    def add(self, kind: TensorType, num: int, size: int) -> None:
        """Counts a tensor of `num` numbers that takes `size` bytes now."""
        self._types[kind.name] += 1
        self._stored_bytes += num // kind.block * kind.size
        self._widened_bytes += size

    def notes(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Returns a line for the operator; none if nothing was widened."""
        if not self._types:
            return ()
        types = ", ".join(f"{num} of {name}" for name, num in self._types.items())
        sizes = f"{self._widened_bytes >> 20} instead of {self._stored_bytes >> 20}"
        return (f"quantised tensors are widened to {str(dtype)[6:]} when they are loaded ({types}): {sizes} MiB",)


def gguf_files(directory: Path) -> list[Path]:
    """Returns the GGUF files of a checkpoint directory, in the order of their shards; none if it has safetensors."""
    if any(directory.glob("*.safetensors")):
        return []
    return sorted(directory.glob("model*.gguf"))
