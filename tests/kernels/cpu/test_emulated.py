"""Kernels for instructions that this machine may lack, VNNI, BF16 and AMX: compiled with each of them written out as
its definition (`emulated/`), they give what the kernels of this machine give. What is left unproven is the processor's
own arithmetic."""

import importlib.util
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds, native
from sluice_server.kernels.formats import weight_formats
from sluice_server.kernels.formats import weight_formats as kinds
from sluice_server.kernels.formats.integer_linear import integer_linear
from sluice_server.kernels.formats.quantised import GROUP, QuantisedWeight
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.slots import encode
from sluice_server.kernels.reference import definitions
from tests.engine.models.layers.test_native_experts import experts, make, one_by_one
from tests.engine.models.layers.test_native_experts import rows as residuals

pytestmark = pytest.mark.long  # compiles for half a minute each

SOURCES = Path(native.__file__).parent
EMULATED = Path(__file__).parent / "emulated"
EXTENSIONS = {
    "v4_vnni": ("VNNI",),
    "v4_bf16": ("VNNI", "BF16"),
    "v4_amx": ("VNNI", "BF16", "AMX"),
}


@pytest.fixture(scope="module", params=list(EXTENSIONS))
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module that machines with an extension load, with its instructions emulated."""
    compiler = shutil.which("g++")
    if compiler is None or "v4" not in builds.runnable():
        pytest.skip("needs a C++ compiler and AVX-512")
    directory, name = tmp_path_factory.mktemp("cpu"), f"emulated_{request.param}"
    for path in (*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"), *EMULATED.glob("*.h")):
        shutil.copy(path, directory)  # the last ones in the place of their namesakes
    built = directory / f"{name}.so"
    flags = ["-std=c++20", "-O3", "-march=x86-64-v4", "-mprefer-vector-width=512", "-shared", "-fPIC", "-pthread"]
    flags += [
        "-include",
        str(directory / "instructions.h"),
        *(f"-DEMULATED_{one}" for one in EXTENSIONS[request.param]),
    ]
    flags += [f"-I{sysconfig.get_paths()['include']}", f"-DSLUICE_MODULE={name}"]
    subprocess.run([compiler, *flags, *map(str, directory.glob("*.cpp")), "-o", str(built)], check=True)
    spec = importlib.util.spec_from_file_location(name, built)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("bits", "has_minima"), [(8, False), (8, True), (4, False), (4, True)])
@pytest.mark.parametrize(("features", "inputs"), [(96, 48), (130, 1030), (704, 260)])
def test_products_of_integers_have_the_same_bits(
    bits: int, has_minima: bool, features: int, inputs: int, emulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    groups = -(-inputs // GROUP)
    levels = torch.randint(1 << bits, (features, inputs), dtype=torch.uint8)
    scales, minima = torch.randn(features, groups).half(), torch.randn(features, groups).half()
    weight = QuantisedWeight(bits, levels, scales, minima if has_minima else None)
    bias, norm = torch.randn(features), torch.rand(inputs)
    for rows in (1, 7, 20, 40):
        x, found = torch.randn(rows, inputs), []
        for module in (builds.load("v4"), emulated):
            monkeypatch.setattr(builds, "MODULE", module)
            packed, gated = (integer_linear(weight, bias, is_gated) for is_gated in (False, True))
            found.append((ops.linear_normed(x, norm, 1e-5, packed), ops.linear_gated(x, None, 1e-5, gated)))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(("features", "inputs"), [(96, 48), (130, 1030), (704, 260)])
def test_products_of_bfloat16_are_those_of_rounded_activations(
    features: int, inputs: int, emulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(builds, "MODULE", emulated)
    monkeypatch.setattr(kinds, "computes_bfloat16", lambda: False)
    rounds = "vnni" not in emulated.__name__
    weight, x = torch.randn(features, inputs).bfloat16(), torch.randn(40, inputs)
    seen = x.bfloat16() if rounds else x
    want = seen.double() @ weight.double().t()
    packed = weight_formats.pack(weight)
    whole = ops.linear(x, packed)
    assert torch.allclose(whole.double(), want, atol=1e-5 * float(want.abs().max()))
    for rows in (1, 7, 20):
        assert torch.equal(ops.linear(x[:rows], packed), whole[:rows])


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int8 affine", "int4", "int4 symmetric"])
def test_experts_in_one_call_have_the_bits_of_their_linears(
    form: str, emulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each token, and two alike."""
    monkeypatch.setattr(builds, "MODULE", emulated)
    monkeypatch.setattr(kinds, "computes_bfloat16", lambda: False)
    for per_token, logits in ((1, None), (2, torch.zeros(4))):
        mlp = make(experts(form, 4, bias=True, norm=True), per_token, logits=logits)
        for num in (1, 7, 33, 200):
            assert torch.equal(mlp.add_to(residuals(num), 1e-5), one_by_one(mlp, residuals(num))), (per_token, num)


def test_attention_over_bfloat16_equals_its_reference(emulated: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens at once, and the last ones alone."""
    torch.manual_seed(4)
    monkeypatch.setattr(builds, "MODULE", emulated)
    cache, q = torch.randn(12, 16, 2, 2, 64).bfloat16(), torch.randn(70, 4, 64)
    tables = np.array([[1, 3, 5, 7, 9]], dtype=np.int32)
    meta = AttentionMetadata.build([70], [70], tables, 16, torch.device("cpu"))
    whole = ops.paged_attention(q, cache, meta, 0.125, None)
    error = 2e-5 if "vnni" in emulated.__name__ else 0.01  # where queries and weights are rounded
    assert torch.allclose(whole, definitions.paged_attention(q, cache, meta, 0.125, None), atol=error)
    for num in (1, 9):
        last = AttentionMetadata.build([num], [70], tables, 16, torch.device("cpu"))
        assert torch.equal(ops.paged_attention(q[-num:], cache, last, 0.125, None), whole[-num:])


def test_attention_over_int8_equals_its_reference(emulated: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens at once, and the last ones alone."""
    torch.manual_seed(5)
    monkeypatch.setattr(builds, "MODULE", emulated)
    cache, q = encode(torch.randn(12, 16, 2, 2, 80), torch.int8), torch.randn(70, 4, 80)
    tables = np.array([[1, 3, 5, 7, 9]], dtype=np.int32)
    meta = AttentionMetadata.build([70], [70], tables, 16, torch.device("cpu"))
    whole = ops.paged_attention(q, cache, meta, 0.125, None)
    assert torch.allclose(whole, definitions.paged_attention(q, cache, meta, 0.125, None), atol=3e-4)
    for num in (1, 9):
        last = AttentionMetadata.build([num], [70], tables, 16, torch.device("cpu"))
        assert torch.equal(ops.paged_attention(q[-num:], cache, last, 0.125, None), whole[-num:])
