"""Builds the CPU kernels with the package, once for each instruction set; everything else is in pyproject.toml.

They are optional: without a compiler the installation goes on and torch's own operators serve, more slowly.
"""

import copy
import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("sluice_server/kernels/cpu")
SOURCES = ("module.cpp", "automaton.cpp", "sampling.cpp", "sums.cpp", "encoder.cpp", "backing.cpp")
LEVELS = {
    "x86_64": {
        "v4_amx": ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
        "v4_bf16": ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"],
        "v4_vnni": ["-march=x86-64-v4", "-mavx512vnni"],
        "v4": ["-march=x86-64-v4"],
        "v3": ["-march=x86-64-v3"],
    }
}
FLAGS = ["-std=c++20", "-O3", "-fno-math-errno", "-fvisibility=hidden", "-mprefer-vector-width=512", "-pthread"]


def kernels() -> list[Extension]:
    """One for each instruction set of this machine's architecture."""
    return [
        Extension(
            f"sluice_server.kernels.cpu.{name}",
            sources=[str(FOLDER / source) for source in SOURCES],
            depends=[str(header) for header in sorted(FOLDER.glob("*.h"))],
            define_macros=[("SLUICE_MODULE", name)],
            extra_compile_args=[*FLAGS, *level],
            extra_link_args=["-pthread"],
            optional=True,
        )
        for name, level in LEVELS.get(platform.machine(), {}).items()
    ]


class BuildSets(build_ext):
    """Builds the instruction sets side by side, the objects of each in a folder of its own: all have the same sources,
    and setuptools would put the objects of all into one place."""

    def finalize_options(self) -> None:
        """One build a processor, unless -j says otherwise."""
        super().finalize_options()
        self.parallel = self.parallel or len(os.sched_getaffinity(0))

    def build_extension(self, ext: Extension) -> None:
        """Builds one of them."""
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp, ext.name))
        build_ext.build_extension(own, ext)


setup(ext_modules=kernels(), cmdclass={"build_ext": BuildSets})
