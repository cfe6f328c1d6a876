"""Where weights come from: safetensors files of a checkpoint, or a plan that knows only shapes.

Both answer `get(name, shape)`. Files are memory-mapped and read tensor by tensor, so that nothing is held twice but
the tensor being packed. Pickle checkpoints are refused: reading one can run code.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.fields import invalid_model
from engine.models.stored import READERS
from engine.models.stored_form import StoredForm
from kernels.packed_weights import Packed

INDEX = "model.safetensors.index.json"


class WeightSource(Protocol):
    """Tensors by name."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, of exactly that shape."""

    def stored(self, name: str, rows: int, width: int) -> Packed | None:
        """The weight [rows, width] of the projection `name` where it is quantised already; None where it is not."""

    def has(self, name: str) -> bool:
        """Whether it is there."""


class Plan:
    """Meta tensors of any name and shape; remembers what was asked for: an 8B model is planned in no memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtype = dtype

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors asked for."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A meta tensor."""
        self.shapes[name] = shape
        return torch.empty(shape, dtype=self._dtype, device="meta")

    def stored(self, name: str, rows: int, width: int) -> None:
        """A plan is of what weights stand for."""

    def has(self, name: str) -> bool:
        """Everything is planned to be there."""
        return True


class Checkpoint:
    """The safetensors files of a directory, one or sharded."""

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device, form: StoredForm | None = None
    ) -> None:
        self._directory = directory
        self._form = form
        self._dtype = dtype
        self._device = device
        self._file_of: dict[str, Path] = {}
        self._sizes: dict[str, int] = {}  # elements of what was read
        self._files: dict[Path, safe_open] = {}
        for path in _files(directory):
            if not path.exists():
                raise invalid_model(path, f"is missing; {INDEX} names it: download the checkpoint again")
            self._files[path] = _open(path)
            self._file_of.update(dict.fromkeys(self._files[path].keys(), path))

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read, check and convert one tensor. Raises ServiceError naming file and tensor."""
        tensor = self._read(name, shape)
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            text = f"tensor {name} is {tensor.dtype}, and config.json's quantization_config names no scales of it"
            raise invalid_model(self._file_of[name], text)
        self._sizes[name] = tensor.numel()
        # Vectors are kept as they are read, while matrices are packed: what is kept must not be the file's own memory,
        # whose content is another one when the file is written over.
        return tensor.to(self._device, self._dtype, copy=tensor.dim() == 1)

    def stored(self, name: str, rows: int, width: int) -> Packed | None:
        """See `WeightSource`. Raises ServiceError naming file, tensor and what is supported."""
        reader = READERS[self._form.method] if self._form is not None else None
        if self._form is None or reader is None or not self.has(f"{name}.{reader.mark}"):
            return None
        self._sizes[name] = rows * width
        try:
            return reader.read(self, name, (rows, width), self._form)
        except ValueError as error:
            raise invalid_model(self._file_of[f"{name}.{reader.mark}"], f"{name}: {error}") from error

    def raw(self, name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> Tensor:
        """A tensor as it is stored, of one of these shapes and dtypes, on the device. Raises as `get`."""
        path = self._path(name)
        found: Tensor = self._files[path].get_tensor(name)
        for what, value, allowed in (("shape", tuple(found.shape), shapes), ("dtype", found.dtype, dtypes)):
            if value not in allowed:
                wanted = " or ".join(str(list(one) if isinstance(one, tuple) else one) for one in allowed)
                shown = list(value) if isinstance(value, tuple) else value
                raise invalid_model(path, f"tensor {name} has {what} {shown}; config.json implies {wanted}")
        return found.to(self._device, copy=True)  # not the file's own memory, as above

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that is no weight, as int64. Raises as `get`."""
        tensor = self._read(name, shape)
        if tensor.is_floating_point():
            raise invalid_model(self._file_of[name], f"tensor {name} is {tensor.dtype}; it must hold integers")
        return tensor.to(self._device, torch.int64)

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        path = self._path(name)
        found = tuple(self._files[path].get_slice(name).get_shape())
        if found != shape:
            raise invalid_model(path, f"tensor {name} has shape {list(found)}; config.json implies {list(shape)}")
        tensor: Tensor = self._files[path].get_tensor(name)
        return tensor

    def _path(self, name: str) -> Path:
        path = self._file_of.get(name)
        if path is None:
            raise invalid_model(self._directory, f"no safetensors file holds the tensor {name}")
        return path

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors read so far."""
        return sum(self._sizes.values())

    def has(self, name: str) -> bool:
        """Whether a file holds it."""
        return name in self._file_of


def _files(directory: Path) -> Iterable[Path]:
    index = directory / INDEX
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise invalid_model(index, f"is not a safetensors index ({type(error).__name__})") from error
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise invalid_model(index, "names a file outside the checkpoint directory")
        return [directory / name for name in sorted(names)]
    single = directory / "model.safetensors"
    if single.exists():
        return [single]
    found = sorted(directory.glob("*.safetensors"))
    if found:
        return found
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth")):
        raise invalid_model(
            directory, "holds only pickle weights, which can run code when read; convert them to safetensors first"
        )
    raise invalid_model(directory, "holds no *.safetensors file")


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise invalid_model(
            path, f"is corrupt or cut short ({path.stat().st_size} bytes): download it again"
        ) from error
