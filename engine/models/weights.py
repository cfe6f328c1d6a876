"""Where weights come from: safetensors files of a checkpoint, or a plan that knows only shapes.

Both answer `get(name, shape)`. Files are memory-mapped and read tensor by tensor, so that nothing is held twice but
the tensor being packed. Pickle checkpoints are refused: reading one can run code.
"""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.fields import MENDING, Fields, invalid_model, is_file, read_json, shown
from sluice_server.engine.models.stored import READERS
from sluice_server.engine.models.stored_form import StoredForm
from sluice_server.kernels.formats.packed_weights import Packed

INDEX = "model.safetensors.index.json"
FP8_NAN = 0x7F  # bits of float8_e4m3fn beside the sign


class WeightSource(Protocol):
    """Tensors by name."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, of exactly that shape."""

    def stored(self, name: str, rows: int, width: int) -> Packed | None:
        """The weight [rows, width] of the projection `name` where it is quantised already; None where it is not."""

    def has(self, name: str) -> bool:
        """Whether it is there."""


class PlannedWeights:
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
            self._files[path] = _open(path)
            self._file_of.update(dict.fromkeys(self._files[path].keys(), path))

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read, check and convert one tensor. Raises ServiceError naming file and tensor."""
        tensor = self._read(name, shape)
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            text = f"is {tensor.dtype}, and config.json's quantization_config names no scales of it"
            raise self.wrong(name, text)
        self._sizes[name] = tensor.numel()
        # Vectors are kept as they are read, while matrices are packed: what is kept must not be the file's own memory,
        # whose content is another one when the file is written over.
        return self._numbers(name, tensor.to(self._device, self._dtype, copy=tensor.dim() == 1))

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
        return self._numbers(name, found.to(self._device, copy=True))  # not the file's own memory, as above

    def _numbers(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor itself. Raises ServiceError for one that holds NaN or infinity."""
        if not is_finite(tensor):
            raise self.wrong(name, f"holds {_first_odd(tensor)}: download the checkpoint again")
        return tensor

    def wrong(self, name: str, message: str) -> ServiceError:
        """The error of a tensor that cannot be used."""
        return invalid_model(self._file_of[name], f"tensor {name} {message}")

    def layers(self, before: str) -> set[int]:
        """Numbers of the layers of which there are tensors, named `before`, number, and more."""
        names = (name.removeprefix(before).split(".", 1)[0] for name in self._file_of if name.startswith(before))
        return {int(name) for name in names if name.isdecimal() and len(name) < 10}

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that is no weight, as int64. Raises as `get`."""
        tensor = self._read(name, shape)
        if tensor.is_floating_point():
            raise self.wrong(name, f"is {tensor.dtype}; it must hold integers")
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
    if os.path.lexists(index):
        return [directory / name for name in sorted(_indexed(index))]
    single = directory / "model.safetensors"
    if os.path.lexists(single):
        return [single]
    found = sorted(directory.glob("*.safetensors"))
    if found:
        return found
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth")):
        raise invalid_model(
            directory, "holds only pickle weights, which can run code when read; convert them to safetensors first"
        )
    raise invalid_model(directory, "holds no *.safetensors file")


def _indexed(index: Path) -> set[str]:
    """The files that an index names."""
    names = set()
    for name in Fields(index, read_json(index)).within("weight_map").values.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise invalid_model(index, f"names a file outside the checkpoint directory, {shown(name)}: {MENDING}")
        names.add(name)
    return names


def _open(path: Path) -> safe_open:
    if not os.path.lexists(path):
        raise invalid_model(path, f"is missing; {INDEX} names it: download the checkpoint again")
    if not is_file(path):
        raise invalid_model(path, "is no file, or a link to none: download it again")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise invalid_model(
            path, f"is corrupt or cut short ({path.stat().st_size} bytes): download it again"
        ) from error


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are: one sum at the speed of memory, and a slow look only where that is not."""
    if tensor.dtype is torch.float8_e4m3fn:
        return not tensor.numel() or int(tensor.view(torch.uint8).bitwise_and(FP8_NAN).amax()) < FP8_NAN
    if not tensor.is_floating_point() or math.isfinite(float(tensor.sum())):
        return True
    return bool(tensor.isfinite().all())


def _first_odd(tensor: Tensor) -> str:
    """The first number that is none, and where."""
    wide = tensor.float() if tensor.itemsize == 1 else tensor
    at = tuple(wide.isfinite().logical_not().nonzero()[0].tolist()) if wide.dim() else ()
    return f"{float(wide[at])} at {list(at)}"
