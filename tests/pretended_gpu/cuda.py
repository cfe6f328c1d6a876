"""Pretends a GPU: CUDA's interface in torch, over `memory.DeviceMemory`, with Triton's kernels interpreted.

Streams are those of `streams`. A capture records the calls of torch and the launches of kernels with their
arguments, and leaves garbage behind; a replay repeats them with these very arguments and puts the results where those
of the capture were, so that a number of the host that a capture holds stays what it was. The programs of a launch run
in a shuffled order, and a kernel that gets memory of the host is refused. Threads may have a device each (`beside`);
one of them interprets a kernel at a time.
"""

import contextlib
import dataclasses
import itertools
import random
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from sluice_server.engine.worker import device
from sluice_server.engine.worker.startup import compiler, memory
from sluice_server.kernels.formats import gpu_plain
from sluice_server.kernels.triton import configs, dependent, gpu_traits, support
from tests.pretended_gpu.memory import (
    FRESH,
    Call,
    DeviceMemory,
    HostWaits,
    WrongDevice,
    is_on_device,
    poison,
    tensors_in,
)
from tests.pretended_gpu.streams import Stream, Streams

GIB = 1 << 30
NUM_MULTIPROCESSORS = 4
LEAST_SPLIT = 16  # so that short contexts are split
_OF_THREAD = threading.local()
_INTERPRETING = threading.RLock()  # what stands in for the language is one for all threads


class WroteTooEarly(AssertionError):
    """A program does not wait for what kernels before it write."""


@dataclasses.dataclass
class Waiting:
    """Which programs of a launch have waited for the kernels before it.

    Attributes:
        is_wanted: it may begin before these have ended, so that each of its programs has to wait.
    """

    is_wanted: bool = False
    begun: int = 0
    waited: int = 0

    def check(self, name: str) -> None:
        """Raises WroteTooEarly if a program that has begun has not waited."""
        if self.is_wanted and self.waited < self.begun:
            raise WroteTooEarly(f"a program of {name} does not wait for what kernels before it write")

    def begin(self) -> None:
        self.begun += 1

    def wait(self) -> None:
        self.waited += 1


@dataclasses.dataclass
class PretendedGpu:
    """A pretended device, and what happened on it.

    Attributes:
        launches: kernels launched one by one, by name; those of replays are not among them.
        replays: number of graphs that were replayed.
        captures: number of graphs that were captured.
    """

    memory: DeviceMemory
    random: random.Random
    launches: Counter[str] = dataclasses.field(default_factory=Counter)
    replays: int = 0
    captures: int = 0
    is_replaying: bool = False
    waiting: Waiting = dataclasses.field(default_factory=Waiting)

    def launch(
        self, run: Callable[..., None], executor: interpreter.GridExecutor, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Launches a kernel, or records the launch."""
        given = list(tensors_in((args, named)))
        strange = [list(one.shape) for one in given if not is_on_device(one)]
        if strange:
            raise WrongDevice(f"{executor.fn.__name__} gets memory of the host: {strange}")
        self.memory.streams.compute()
        if self.memory.recording is not None:  # nothing runs in a capture
            self.memory.record((lambda *args, **named: self.launch(run, executor, args, named), args, named, None))
            return
        if not self.is_replaying:
            self.launches[executor.fn.__name__] += 1
        self.waiting = Waiting(is_wanted=named.get("launch_pdl", False))
        with _INTERPRETING, torch._C.DisableTorchFunction():
            run(executor, *args, **named)
        self.waiting.check(executor.fn.__name__)

    @contextlib.contextmanager
    def beside(self, seed: int) -> Iterator["PretendedGpu"]:
        """A context in which this thread, another than that of `pretend`, has a device of its own."""
        other = PretendedGpu(DeviceMemory(), random.Random(seed))
        _OF_THREAD.gpu = other
        with other.memory:
            yield other

    def replay(self, calls: list[Call]) -> None:
        """Repeats the calls of a capture."""
        self.replays += 1
        self.is_replaying = True
        try:
            for function, args, named, found in calls:
                if getattr(function, "__name__", "") in FRESH:
                    poison(found)
                    continue
                with torch._C.DisableTorchFunction(), torch.inference_mode():
                    again = function(*args, **named)
                    for old, new in zip(tensors_in(found), tensors_in(again), strict=True):
                        if storage_of(old) != storage_of(new):
                            old.copy_(new)
        finally:
            self.is_replaying = False

    @contextlib.contextmanager
    def capture(self, graph: "Graph") -> Iterator[None]:
        """Records what is called within."""
        assert self.memory.recording is None, "captures do not nest"
        self.captures += 1
        self.memory.recording = graph.calls = []
        try:
            yield
        finally:
            self.memory.recording = None
        for _, args, named, found in graph.calls:  # nothing has been computed yet
            given = {storage_of(one) for one in tensors_in((args, named))}
            for one in tensors_in(found):
                if storage_of(one) not in given:
                    poison(one)


def storage_of(x: Tensor) -> int:
    """The address of a tensor's memory."""
    with torch._C.DisableTorchFunction():
        return x.untyped_storage().data_ptr()


def pinned(num: int, dtype: torch.dtype) -> Tensor:
    """Pinned memory of the host, also on threads that know nothing of the device."""
    found = torch.empty(num, dtype=dtype)
    found.__dict__["_pinned"] = True
    return found


class Graph:
    """See `torch.cuda.CUDAGraph`."""

    def __init__(self, gpu: PretendedGpu) -> None:
        self.calls: list[Call] = []
        self._gpu = gpu

    def replay(self) -> None:
        self._gpu.replay(self.calls)


class Event:
    """See `torch.cuda.Event`: what was begun before it is there once it was waited for."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._before: list[tuple[Tensor, Tensor]] = []
        self._was_asked = False

    def query(self) -> bool:
        """Has not happened yet when it is asked first."""
        was_asked, self._was_asked = self._was_asked, True
        return was_asked

    def record(self, stream: object = None) -> None:
        self._memory.streams.current.arrive()  # it is not asked for by what this pretends
        self._before = list(self._memory.arriving)

    def synchronize(self) -> None:
        if self._memory.recording is not None:
            raise HostWaits("an event is waited for in a capture")
        done = [i for i, one in enumerate(self._memory.arriving) if any(one is other for other in self._before)]
        self._memory.arrive(max(done, default=-1) + 1)


@contextlib.contextmanager
def pretend(seed: int = 0) -> Iterator[PretendedGpu]:
    """A context in which there is a GPU of compute capability 9.0. Nothing of it may be used afterwards."""
    gpu = _OF_THREAD.gpu = PretendedGpu(DeviceMemory(), random.Random(seed))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _interface().items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "Event", lambda _: Event(current_gpu().memory))
        patch.setattr(configs, "LEAST_SPLIT", LEAST_SPLIT)
        patch.setattr(configs, "LEAST_PREFILL_SPLIT", LEAST_SPLIT)
        patch.setattr(device, "WARM_RUNS", 1)
        patch.setattr(device, "pinned", pinned)
        patch.setattr(compiler, "missing", lambda: None)
        patch.setattr(support, "DTYPES", (*support.DTYPES, torch.float32))  # the interpreter has no registers
        patch.setattr(memory, "gc", types.SimpleNamespace(collect=lambda: 0))  # takes a second in a test run
        patch.setattr(gpu_plain, "wide_product", _wide_product)  # CPUs widen no product of 16 bits
        _intercept(patch)
        gpu_traits.gpu_of.cache_clear()
        dependent.arguments_on.cache_clear()
        try:
            with patched_language(patch), gpu.memory:
                yield gpu
        finally:
            gpu_traits.gpu_of.cache_clear()
            dependent.arguments_on.cache_clear()


@contextlib.contextmanager
def patched_language(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context in which Triton's language is made the interpreter's once, and not for each launch: a quarter of the
    time of small kernels."""
    make, scopes = interpreter._patch_lang, dict[frozenset[str], Any]()

    def once(function: Any) -> Any:  # noqa: ANN401 # as Triton's
        modules = (one.__name__ for one in function.__globals__.values() if isinstance(one, types.ModuleType))
        names = frozenset(name for name in modules if name.startswith("triton.language"))
        if names not in scopes:
            scopes[names] = make(function)
        return types.SimpleNamespace(restore=lambda: None)

    patch.setattr(interpreter, "_patch_lang", once)
    try:
        yield
    finally:
        for scope in reversed(scopes.values()):
            scope.restore()


def current_gpu() -> PretendedGpu:
    """The device of this thread."""
    found: PretendedGpu = _OF_THREAD.gpu
    return found


def _wide_product(x: Tensor, weight: Tensor, y: Tensor) -> None:
    """See `gpu_plain.wide_product`."""
    y.copy_(x.float() @ weight.t().float())


def _interface() -> dict[str, Any]:
    """What stands in for torch.cuda."""

    def streams() -> Streams:
        return current_gpu().memory.streams

    def set_debug(mode: str) -> None:
        current_gpu().memory.refuses_waits = mode == "error"

    return {
        "is_available": lambda: True,
        "is_bf16_supported": lambda: True,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "pretended",
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            name="pretended", major=9, minor=0, multi_processor_count=NUM_MULTIPROCESSORS, uuid="00-pretended"
        ),
        "mem_get_info": lambda device=None: (6 * GIB, 8 * GIB),
        "max_memory_allocated": lambda device=None: GIB,
        "memory_reserved": lambda device=None: GIB,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: current_gpu().memory.wait("synchronize"),
        "set_sync_debug_mode": set_debug,
        "is_current_stream_capturing": lambda: current_gpu().memory.recording is not None,
        "graph_pool_handle": lambda: (0, 0),
        "CUDAGraph": lambda: Graph(current_gpu()),
        "graph": lambda graph, **named: current_gpu().capture(graph),
        "Stream": Stream,
        "Event": lambda *given: Event(current_gpu().memory),
        "current_stream": lambda device=None: streams().current,
        "stream": lambda stream: streams().on(stream),
    }


def _intercept(patch: pytest.MonkeyPatch) -> None:
    """Sends launches of kernels to the device, and shuffles their programs."""
    run = interpreter.GridExecutor.__call__
    builder = interpreter.interpreter_builder
    set_dim, set_at = builder.set_grid_dim, builder.set_grid_idx
    order: dict[tuple[int, ...], tuple[int, ...]] = {}

    def dim(*sizes: int) -> None:
        places = list(itertools.product(*map(range, sizes)))
        order.clear()
        order.update(zip(places, current_gpu().random.sample(places, len(places)), strict=True))
        set_dim(*sizes)

    patch.setattr(
        interpreter.GridExecutor,
        "__call__",
        lambda self, *args, **named: current_gpu().launch(run, self, args, named),
    )
    patch.setattr(builder, "set_grid_dim", dim)
    store = builder.create_masked_store

    def begin(*at: int) -> None:
        current_gpu().waiting.begin()
        set_at(*order[at])

    def checked(*given: Any) -> Any:  # noqa: ANN401 # as Triton's
        current_gpu().waiting.check("a kernel that writes")
        return store(*given)

    patch.setattr(builder, "set_grid_idx", begin)
    patch.setattr(builder, "create_masked_store", checked)
    control = types.SimpleNamespace(gdc_launch_dependents=lambda: None, gdc_wait=lambda: current_gpu().waiting.wait())
    patch.setattr(dependent, "cuda", control)
