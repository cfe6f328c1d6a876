"""Imports torch without the parts that an engine does not use: two fifths of what importing torch takes, and 37 MB.

Torch imports all of its Python parts at once: reference implementations of every operator for its compiler, optimisers,
distributions, export, data loaders, quantisation for training. Here each of those named below is an empty module at
first, which is imported when somebody asks it for something, and all are imported before any further module of torch
is, such as its compiler. What torch itself takes of them is a stand-in until then. So nothing is missing, whatever a
plugin or another version of torch does; it only comes later.
"""

import importlib
import linecache
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

DEFERRED = (  # in torch's own order, as some of them import each other in circles
    "torch.utils.data",
    "torch.distributions",
    "torch.export",
    "torch.fx.passes",
    "torch.mps",
    "torch.mtia",
    "torch.multiprocessing",
    "torch.optim",
    "torch.profiler",
    "torch.testing",
    "torch.xpu",
    "torch.ao",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.quantization",
    "torch.masked",
    "torch._meta_registrations",  # with the decompositions and reference implementations that it imports
    "torch._native",
    "torch._higher_order_ops",  # with the tensors without memory by which compilers trace
    "torch._higher_order_ops.invoke_subgraph",
    "torch.func",
    "torch.hub",
)
# What torch's own start takes of them, and does not use until somebody else does.
TAKEN = {
    "torch._higher_order_ops": ("cond", "while_loop"),
    "torch._higher_order_ops.invoke_subgraph": ("NestedCompileRegionOptions",),
    "torch.func": ("vmap",),
    "torch.hub": ("tqdm",),
}


STANDS_IN = "_stands_in"  # an attribute of a stand-in


class Deferred(ModuleType):
    """A module that is imported when it is first asked for a name."""

    def __getattr__(self, name: str) -> object:
        """Returns the module's own attribute. What only describes a module is not worth an import."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in TAKEN.get(self.__name__, ()) and sys.modules.get(self.__name__) is self:
            return _stand_in(self.__name__, name)
        return getattr(_imported(self), name)


class _Empty(Loader):
    """Makes the module, and executes nothing."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Deferring(MetaPathFinder):
    """Finds the deferred modules as empty ones, and no others.

    Attributes:
        found: those that torch has asked for; other versions have other parts.
    """

    def __init__(self) -> None:
        self.found: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(fullname, path, target) if fullname in DEFERRED else None
        if found is None:
            return None
        self.found.add(fullname)
        spec = ModuleSpec(fullname, _Empty(), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec


class _Completing(MetaPathFinder, Loader):
    """Imports what was deferred, `names`, before the first further module of torch, and then that module."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith("torch.") else None

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        del sys.modules[module.__name__]  # an empty one, in whose place the import system finds the other
        for name in (*self._names, module.__name__):
            importlib.import_module(name)
        _replace_stand_ins()


def import_torch() -> None:
    """Imports torch, unless it is imported already. Call it before there are threads.

    Unless the environment says otherwise, torch's own threads sleep while they wait. By default they spin, which takes
    a core from the service's other processes after each of the many small operators of loading a model. The kernels
    that compute steps have threads of their own.
    """
    if "torch" in sys.modules:
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when the library is loaded
    finder = _Deferring()
    sys.meta_path.insert(0, finder)
    try:
        torch = importlib.import_module("torch")
    finally:
        sys.meta_path.remove(finder)
    linecache.clearcache()  # of torch's sources, which it reads: 1.6 MB, which what is imported next takes
    base = sys.modules.get("torch._opaque_base")
    if base is not None and hasattr(torch._C, "_set_generator_metaclass"):
        torch._C._set_generator_metaclass(base.OpaqueBaseMeta)  # else a deferred part does it
    for name in DEFERRED:  # whoever imports one from now on gets it whole
        if isinstance(sys.modules.get(name), Deferred):
            del sys.modules[name]
    sys.meta_path.insert(0, _Completing([name for name in DEFERRED if name in finder.found]))


def _stand_in(module: str, name: str) -> type:
    """Returns what calls a function of a deferred module, or makes an object of its class. It is a class itself, since
    torch names one as a parameter's type."""

    def call(_: type, *values: object, **named: object) -> object:
        return getattr(importlib.import_module(module), name)(*values, **named)

    return type(name, (), {"__new__": call, "__module__": module, STANDS_IN: True})


def _replace_stand_ins() -> None:
    """Has modules of torch hold what they took, once that is imported, in place of what stood for it."""
    for holder in [held for name, held in sys.modules.items() if name.partition(".")[0] == "torch"]:
        for module, names in TAKEN.items():
            for name in names:
                if hasattr(vars(holder).get(name), STANDS_IN):
                    setattr(holder, name, getattr(sys.modules[module], name))


def _imported(module: ModuleType) -> ModuleType:
    """Returns the module, executed: in its own place while torch is imported, which needs it at once, else anew."""
    name = module.__name__
    if sys.modules.get(name) is not module:
        return importlib.import_module(name)
    spec = PathFinder.find_spec(name, sys.modules[name.rpartition(".")[0]].__path__)
    assert spec is not None and spec.loader is not None
    module.__class__ = ModuleType
    module.__spec__, module.__loader__ = spec, spec.loader
    spec.loader.exec_module(module)
    return module
