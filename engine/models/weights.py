"""Sources of weights: the safetensors files of a checkpoint, or a plan that has shapes only.

Both implement `get(name, shape)`. Files are memory-mapped and read tensor by tensor, so that only the tensor being
packed is in memory twice. Pickle checkpoints raise ServiceError: reading one can run code.
"""

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.bare import full_name, is_bare
from sluice_server.engine.models.fields import MENDING, Fields, invalid_model, is_file, read_json, shown, unreadable
from sluice_server.engine.models.spans import Dim, OffBorder, Shape, sizes_of, slices_of, span_of, spans_of, whole_of
from sluice_server.engine.models.stored import READERS, read_experts
from sluice_server.engine.models.stored_form import StoredForm
from sluice_server.kernels.formats.packed_weights import Packed

INDEX = "model.safetensors.index.json"
# Of a text model within one that takes images, in the spellings that exist, and without it.
TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
FP8_NAN = 0x7F  # bits of a NaN in float8_e4m3fn, without the sign


class WeightSource(Protocol):
    """A source of tensors, and of parts of them, by name."""

    def get(self, name: str, shape: Shape) -> Tensor:
        """Returns the tensor, of exactly that shape, or the part of it that the shape names."""

    def stored(self, name: str, rows: Dim, width: Dim) -> Packed | None:
        """Returns the quantised weight [rows, width] of the projection `name`, or None if it is not quantised.

        Raises OffBorder for a part that begins or ends within numbers that are stored together.
        """

    def stored_experts(self, name: str, shape: tuple[Dim, Dim, Dim]) -> Sequence[Packed] | None:
        """Returns the quantised weights [experts, rows, width] of the tensor `name`, or None if it is not quantised.

        Raises OffBorder as `stored` does.
        """

    def has(self, name: str) -> bool:
        """Returns whether the tensor exists."""


class PlannedWeights:
    """A source of meta tensors of any name and shape that records these: an 8B model is planned without memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}  # of whole tensors
        self._dtype = dtype

    @property
    def num_parameters(self) -> int:
        """The number of elements of all requested tensors."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def get(self, name: str, shape: Shape) -> Tensor:
        """Returns a meta tensor."""
        self.shapes[name] = whole_of(shape)
        return torch.empty(sizes_of(shape), dtype=self._dtype, device="meta")

    def stored(self, name: str, rows: Dim, width: Dim) -> None:
        """Returns None: a plan has the shapes of unquantised weights."""

    def stored_experts(self, name: str, shape: tuple[Dim, Dim, Dim]) -> None:
        """Returns None, as `stored` does."""

    def has(self, name: str) -> bool:
        """Returns True: a plan has every tensor."""
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
        self._name_of: dict[str, str] = {}  # in the file
        self._sizes: dict[str, int] = {}  # elements of each tensor of which something was read
        self._files: dict[Path, safe_open] = {}
        for path in weight_files(directory):
            self._files[path] = _open(path)
            for name in self._files[path].keys():  # noqa: SIM118 # not a mapping
                self._name_of[known := known_name(name)] = name
                self._file_of[known] = path
        if is_bare(self._name_of):
            self._name_of = {full_name(name): stored for name, stored in self._name_of.items()}
            self._file_of = {full_name(name): path for name, path in self._file_of.items()}

    def get(self, name: str, shape: Shape) -> Tensor:
        """Reads, checks and converts one tensor, or a part of it. Raises ServiceError naming file and tensor."""
        tensor = self._read(name, shape)
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            text = f"is {tensor.dtype}, and config.json's quantization_config names no scales of it"
            raise self.wrong(name, text)
        self._sizes[name] = math.prod(whole_of(shape))
        # Vectors are kept as read, while matrices are packed. What is kept must not be memory mapped from the file,
        # as that changes when the file is overwritten.
        found = tensor.to(self._device, self._dtype, copy=tensor.dim() == 1)
        return self._numbers(name, found.contiguous(), shape)  # part of the columns of a matrix is not

    def stored(self, name: str, rows: Dim, width: Dim) -> Packed | None:
        """Implements `WeightSource.stored`. Raises ServiceError naming file, tensor and what is supported."""
        reader = READERS.get(self._form.method) if self._form is not None else None
        mark = next((mark for mark in reader.marks if self.has(f"{name}.{mark}")), None) if reader else None
        if self._form is None or reader is None or mark is None:
            return None
        self._sizes[name] = math.prod(whole_of((rows, width)))
        with self._supported(f"{name}.{mark}", name):
            return reader.read(self, name, (span_of(rows), span_of(width)), self._form)

    def stored_experts(self, name: str, shape: tuple[Dim, Dim, Dim]) -> Sequence[Packed] | None:
        """Implements `WeightSource.stored_experts`. Raises ServiceError naming file, tensor and what is supported."""
        if self._form is None or not self.has(f"{name}_blocks"):
            return None
        self._sizes[name] = math.prod(whole_of(shape))
        num, rows, width = spans_of(shape)
        with self._supported(f"{name}_blocks", name):
            return read_experts(self, name, (num, rows, width), self._form)

    @contextlib.contextmanager
    def _supported(self, tensor: str, name: str) -> Iterator[None]:
        """A context in which a ValueError becomes a ServiceError that names the file of `tensor`, and `name`."""
        try:
            yield
        except OffBorder:  # not the file's fault
            raise
        except ValueError as error:
            raise invalid_model(self._file_of[tensor], f"{name}: {error}") from error

    def raw(self, name: str, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> Tensor:
        """Returns a tensor as it is stored, or a part of it, of one of these shapes and dtypes, on the device.

        Raises like `get`.
        """
        path, kept = self._path(name), self._name_of[name]
        has = tuple(self._files[path].get_slice(kept).get_shape())
        shape = next((one for one in shapes if whole_of(one) == has), None)
        if shape is None:
            wanted = " or ".join(str(list(whole_of(one))) for one in shapes)
            raise invalid_model(path, f"tensor {name} has shape {list(has)}; config.json implies {wanted}")
        found = self._part(name, shape)
        if found.dtype not in dtypes:
            wanted = " or ".join(map(str, dtypes))
            raise invalid_model(path, f"tensor {name} has dtype {found.dtype}; config.json implies {wanted}")
        # Not memory mapped from the file, as above.
        return self._numbers(name, found.to(self._device, copy=True, memory_format=torch.contiguous_format), shape)

    def _numbers(self, name: str, tensor: Tensor, shape: Shape) -> Tensor:
        """Returns the tensor, which is what `shape` names. Raises ServiceError if it holds NaN or infinity."""
        if not is_finite(tensor):
            raise self.wrong(name, f"holds {_first_odd(tensor, shape)}: download the checkpoint again")
        return tensor

    def wrong(self, name: str, message: str) -> ServiceError:
        """Returns the error for a tensor that cannot be used."""
        return invalid_model(self._file_of[name], f"tensor {name} {message}")

    def layers(self, before: str) -> set[int]:
        """Returns the numbers of layers that have tensors; their names are `before`, the number, and more."""
        names = (name.removeprefix(before).split(".", 1)[0] for name in self._file_of if name.startswith(before))
        return {int(name) for name in names if name.isdecimal() and len(name) < 10}

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a tensor that is not a weight, as int64. Raises like `get`."""
        tensor = self._read(name, shape)
        if tensor.is_floating_point():
            raise self.wrong(name, f"is {tensor.dtype}; it must hold integers")
        return tensor.to(self._device, torch.int64)

    def _read(self, name: str, shape: Shape) -> Tensor:
        path, whole = self._path(name), whole_of(shape)
        found = tuple(self._files[path].get_slice(self._name_of[name]).get_shape())
        if found != whole:
            raise invalid_model(path, f"tensor {name} has shape {list(found)}; config.json implies {list(whole)}")
        return self._part(name, shape)

    def _part(self, name: str, shape: Shape) -> Tensor:
        """Returns what a shape names of a tensor of that shape; nothing else of the file is read."""
        file, kept, part = self._files[self._path(name)], self._name_of[name], slices_of(shape)
        found: Tensor = file.get_tensor(kept) if part is None else file.get_slice(kept)[part]
        return found

    def _path(self, name: str) -> Path:
        path = self._file_of.get(name)
        if path is None:
            raise invalid_model(self._directory, f"no safetensors file holds the tensor {name}")
        return path

    @property
    def num_parameters(self) -> int:
        """The number of elements of all tensors read so far."""
        return sum(self._sizes.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """For the operator: nothing, as tensors are used as they are stored."""
        return ()

    def has(self, name: str) -> bool:
        """Returns whether a file holds the tensor."""
        return name in self._file_of


def known_name(name: str) -> str:
    """Returns the name of a tensor as in a checkpoint of text alone; those of a text model within another differ."""
    for before, known in TEXT_PREFIXES:
        if name.startswith(before):
            return known + name.removeprefix(before)
    return name


def weight_files(directory: Path) -> Iterable[Path]:
    """Returns the safetensors files of a directory. Raises ServiceError if there are none."""
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
    """Returns the files that an index names."""
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
        path.open("rb").close()  # whose error says why
        return safe_open(path, framework="pt", device="cpu")
    except PermissionError as error:
        raise unreadable(path, error) from error
    except (SafetensorError, OSError) as error:
        raise invalid_model(
            path, f"is corrupt or cut short ({path.stat().st_size} bytes): download it again"
        ) from error


def is_finite(tensor: Tensor) -> bool:
    """Returns whether all numbers of a tensor are finite.

    One sum runs at memory speed; each number is checked only if the sum is not finite.
    """
    if tensor.dtype is torch.float8_e4m3fn:
        return not tensor.numel() or int(tensor.view(torch.uint8).bitwise_and(FP8_NAN).amax()) < FP8_NAN
    if not tensor.is_floating_point() or math.isfinite(float(tensor.sum())):
        return True
    return bool(tensor.isfinite().all())


def _first_odd(tensor: Tensor, shape: Shape) -> str:
    """Returns the first number that is not finite, and its index in the whole tensor."""
    wide = tensor.float() if tensor.itemsize == 1 else tensor
    at = tuple(wide.isfinite().logical_not().nonzero()[0].tolist()) if wide.dim() else ()
    places = [span.start + one for span, one in zip(spans_of(shape), at, strict=False)]  # none of a single number
    return f"{float(wide[at])} at {places}"
