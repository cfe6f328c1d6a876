# ruff: noqa: ANN401 # torch hands over functions and arguments of every type
"""Memory of a pretended GPU: CPU tensors that say that they are on a CUDA device.

A function mode of torch sees every call of torch's Python interface. Tensors that are made with a CUDA device, and the
results of all that is computed from them, are of the device. As on a GPU, operations on tensors of both kinds are
refused, fresh memory holds garbage (NaN), and what a copy to pinned memory brings is there only after an event behind
it was waited for. Calls that make the host wait are counted, or refused, as in a capture.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.pretended_gpu.streams import Streams

CUDA = torch.device("cuda", 0)
GARBAGE = 0x7B  # of integers; floating point is NaN
FRESH = {"empty", "empty_like", "new_empty", "empty_strided"}
WAITS = {
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "numpy", "__array__"),
    *("nonzero", "masked_select", "equal", "is_nonzero", "unique", "bincount", "allclose"),
}
QUIET = {
    *("size", "stride", "dim", "numel", "element_size", "data_ptr", "is_contiguous", "__len__", "storage_offset"),
    *("untyped_storage", "is_floating_point", "__hash__", "__repr__", "__format__", "__set__", "is_complex"),
}
VIEWS = {"__getitem__", "view", "split", "chunk", "narrow", "unbind", "reshape", "t", "transpose", "expand", "flatten"}

Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any], Any]  # function, arguments, result


class HostWaits(RuntimeError):
    """The host would wait for the device where it must not."""


class WrongDevice(RuntimeError):
    """An operation got memory of host and device together."""


class DeviceMemory(TorchFunctionMode):
    """The mode; see the module.

    Attributes:
        refuses_waits: whether a wait of the host raises, as under `torch.cuda.set_sync_debug_mode("error")`.
        waits: what made the host wait, in order.
        recording: the calls of a capture in progress; None outside of captures.
        arriving: copies to pinned memory that are not there yet: target and values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refuses_waits = False
        self.waits: list[str] = []
        self.recording: list[Call] | None = None
        self.streams = Streams()
        self.arriving: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, named = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == "__get__":
            return self._attribute(func, args)
        if name in QUIET:
            return func(*args, **named)
        if name in COPIES:
            return COPIES[name](self, func, args, named)
        is_asked = names_cuda(named.get("device"))
        if is_asked:
            named["device"] = "cpu"
        is_pinned = bool(named.pop("pin_memory", False))
        given = list(tensors_in((args, named)))
        is_own = any(map(is_on_device, given))
        if (is_own or is_asked) and name not in VIEWS:
            self.streams.compute()
        if is_own:
            self._check(name, args, given)
        found = func(*args, **named)
        if is_asked or (is_own and name not in WAITS):
            self._made(name, (func, args, named, found))
        if is_pinned:
            found._pinned = True
        return found

    def wait(self, what: str) -> None:
        """Notes that the host waits for the device. Raises HostWaits where that is refused."""
        if self.refuses_waits or self.recording is not None:
            raise HostWaits(f"{what} makes the host wait for the device")
        self.waits.append(what)
        self.arrive(len(self.arriving))

    def arrive(self, num: int) -> None:
        """Carries out the oldest `num` copies to pinned memory."""
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            for target, values in self.arriving[:num]:
                target.copy_(values)
        del self.arriving[:num]

    def record(self, call: Call) -> None:
        """Adds a call to the capture in progress, if there is one."""
        if self.recording is not None:
            self.recording.append(call)

    def _made(self, name: str, call: Call) -> None:
        """Makes the results of a call the device's."""
        found = call[3]
        mark(found)
        if name in ("tensor", "as_tensor", "from_numpy"):
            self.wait(f"{name} from pageable memory")
        if name in FRESH:  # in a capture nothing fills it, and operations of torch may take it for indices
            poison(found, GARBAGE if self.recording is None else 0)
        self.record(call)

    def _attribute(self, func: Any, args: tuple[Any, ...]) -> Any:
        x, name = args[0], getattr(getattr(func, "__self__", None), "__name__", "")
        is_own = isinstance(x, Tensor) and is_on_device(x)
        if is_own and name in ("device", "is_cuda"):
            return CUDA if name == "device" else True
        found = func(*args)
        if is_own and isinstance(found, Tensor):
            mark(found)
            self.record((func, args, {}, found))
        return found

    def _check(self, name: str, args: tuple[Any, ...], given: list[Tensor]) -> None:
        """Refuses memory of host and device together, and notes what makes the host wait."""
        if name in WAITS:
            self.wait(name)
        strange = [one for one in given if not is_on_device(one) and one.dim() > 0]
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            masks = [one for one in index if isinstance(one, Tensor) and one.dtype is torch.bool]
            is_filled = name == "__setitem__" and not (isinstance(args[2], Tensor) and args[2].dim())
            if strange or any(isinstance(one, list) for one in index) or (masks and not is_filled):
                self.wait(f"{name} with a mask, or an index of the host")
        elif strange:
            shapes = [list(one.shape) for one in strange]
            raise WrongDevice(f"{name}: {shapes} of the host beside tensors of the device")

    def _pin(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        pinned: Tensor = args[0].clone()
        pinned._pinned = True  # type: ignore[attr-defined]
        return pinned

    def _to(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        """Carries out `Tensor.to`, `cpu` and `cuda`."""
        x, *rest = args
        before, after = is_on_device(x), is_on_device(x)
        is_async = bool(named.pop("non_blocking", False))
        if func.__name__ != "to":
            after, rest, named = func.__name__ == "cuda", [], {}
        targets = [one for one in (*rest, named.get("device")) if isinstance(one, str | torch.device)]
        if targets:
            after = names_cuda(targets[0])
        rest = ["cpu" if isinstance(one, str | torch.device) else one for one in rest]
        named = {key: "cpu" if key == "device" else value for key, value in named.items()}
        if before is not after:
            self._crosses(x, is_async=is_async, is_upload=after)
            named = {**named, "copy": True} if rest or named else named
        found: Tensor = x.to(*rest, **named) if rest or named else x.clone() if before is not after else x
        if after:
            mark(found)
            self.record((Tensor.to, (x, *rest), named, found))
        return found

    def _crosses(self, x: Tensor, *, is_async: bool, is_upload: bool) -> None:
        """Notes a copy from host to device or back that makes a new tensor."""
        if self.recording is not None:
            raise HostWaits("a capture copies between host and device")
        if is_async and not is_upload:
            raise HostWaits("an asynchronous copy to memory that is not pinned, which no event tells the end of")
        if not (is_async and is_pinned(x)):
            self.wait("a copy to the device" if is_upload else "a copy to the host")

    def _copy(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        target, source, *rest = args
        is_async = bool(named.get("non_blocking", bool(rest and rest[0])))
        if is_on_device(target) is is_on_device(source):
            found: Tensor = target.copy_(source)
            if is_on_device(target):
                self.record((Tensor.copy_, (target, source), {}, found))
            return found
        is_quiet = is_async and is_on_device(target) and is_pinned(source)
        if self.recording is not None and not is_quiet:
            raise HostWaits("a capture copies between host and device")
        if is_quiet:
            coming: Tensor = target
            self.streams.bring(coming, lambda: self._bring(target, source), lambda: self._spoil(target))
            return coming
        if is_on_device(source) and is_async and is_pinned(target):
            self.arriving.append((target, source.clone()))
            poison(target)
            waiting: Tensor = target
            return waiting
        self.wait("copy_ between device and pageable memory")
        copied: Tensor = target.copy_(source)
        return copied

    def _bring(self, target: Tensor, source: Tensor) -> None:
        """Carries out a copy from pinned memory."""
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            target.copy_(source)
        self.record((Tensor.copy_, (target, source), {}, target))

    def _spoil(self, target: Tensor) -> None:
        """Leaves what a copy that is on its way may leave."""
        poison(target)
        self.record((poison, (target,), {}, None))


COPIES: dict[str, Callable[[DeviceMemory, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    "pin_memory": DeviceMemory._pin,
    "is_pinned": lambda self, func, args, named: is_pinned(args[0]),
    "copy_": DeviceMemory._copy,
    **dict.fromkeys(("to", "cpu", "cuda"), DeviceMemory._to),
}


def names_cuda(device: Any) -> bool:
    """Whether that is a CUDA device, by its name or as an object."""
    return device is not None and str(device).startswith("cuda")


def is_on_device(x: Tensor) -> bool:
    """Whether a tensor is of the pretended device."""
    return "_on_device" in x.__dict__


def is_pinned(x: Tensor) -> bool:
    """Whether a tensor of the host, or the one that it is a view of, is pinned."""
    base = x._base
    return "_pinned" in x.__dict__ or (base is not None and "_pinned" in base.__dict__)


def mark(found: Any) -> None:
    """Makes tensors the device's."""
    for one in tensors_in(found):
        one.__dict__["_on_device"] = True


def poison(found: Tensor, integer: int = GARBAGE) -> None:
    """Fills a tensor with what fresh memory may hold at worst."""
    with torch._C.DisableTorchFunction(), torch.inference_mode():
        if found.is_complex() or (found.is_floating_point() and found.element_size() > 1):
            found.fill_(math.nan)
        elif found.element_size() == 1:
            found.view(torch.uint8).fill_(integer)
        else:
            found.fill_(integer)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors of nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
