"""The VNNI kernels on a machine without VNNI: compiled with the one instruction written out as its definition, they
must give what the kernels of this machine give, to the bit. What is left unproven is the processor's own arithmetic."""

import importlib.util
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels import native, ops

pytestmark = pytest.mark.long  # compiles for half a minute

SOURCES = Path(native.__file__).parent / "cpu"
NAME = "emulated"
INSTRUCTION = "_mm512_dpbusd_epi32"
DEFINITION = """
#define __AVX512VNNI__ 1
inline __m512i four_products(__m512i sum, __m512i a, __m512i b) {
  int32_t total[16];
  uint8_t left[64];
  int8_t right[64];
  std::memcpy(total, &sum, 64), std::memcpy(left, &a, 64), std::memcpy(right, &b, 64);
  for (int i = 0; i < 64; ++i) total[i / 4] += left[i] * right[i];
  std::memcpy(&sum, total, 64);
  return sum;
}
"""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module that VNNI machines load, with its instruction emulated."""
    compiler = shutil.which("g++")
    if compiler is None or "v4" not in native.runnable():
        pytest.skip("needs a C++ compiler and AVX-512")
    directory = tmp_path_factory.mktemp("cpu")
    for path in (*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")):
        shutil.copy(path, directory)
    dot = (directory / "dot.h").read_text().replace(INSTRUCTION, "four_products")
    include = '#include "vector.h"\n'
    assert dot.count("four_products") == 1
    (directory / "dot.h").write_text(dot.replace(include, include + "#include <cstring>" + DEFINITION))
    built = directory / f"{NAME}.so"
    flags = ["-std=c++20", "-O3", "-march=x86-64-v4", "-mprefer-vector-width=512", "-shared", "-fPIC", "-pthread"]
    flags += [f"-I{sysconfig.get_paths()['include']}", f"-DSLUICE_MODULE={NAME}"]
    subprocess.run([compiler, *flags, *map(str, directory.glob("*.cpp")), "-o", str(built)], check=True)
    spec = importlib.util.spec_from_file_location(NAME, built)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize(("features", "inputs"), [(96, 48), (130, 1030), (704, 260)])
def test_the_same_bits_with_vnni(
    weights: str, features: int, inputs: int, emulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    weight, bias = torch.randn(features, inputs), torch.randn(features)
    weight[:, 3] *= 50.0
    for rows in (1, 7, 40):
        x, found = torch.randn(rows, inputs), []
        for module in (native.load("v4"), emulated):
            monkeypatch.setattr(native, "MODULE", module)
            packed, gated = (ops.pack_linear(weight, bias, gated=g, weights=weights) for g in (False, True))
            found.append((ops.linear_normed(x, None, 1e-5, packed), ops.linear_gated(x, None, 1e-5, gated)))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)
