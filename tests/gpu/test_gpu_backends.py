"""Libraries of attention on a GPU, where they are installed: their numbers, and recorded steps with other rows."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.build import build_engine
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.worker.startup.attention import LIBRARIES
from sluice_server.kernels.backends.interface import OURS, AttentionBackend, NotInstalled, StepKind, Wanted
from sluice_server.kernels.backends.measured import AttentionSizes, is_faster, made, seconds_on_device, shares
from sluice_server.kernels.layout.ragged import AttentionOptions
from tests.gpu.test_gpu_engine import CONFIG, MARGIN, behind, run
from tests.oracle.checkpoints import Shape, make_checkpoint

DEVICE = torch.device("cuda")
SIZES = AttentionSizes(16, 4, 128, 32, torch.bfloat16, DEVICE, AttentionOptions(128**-0.5), 32, 2048, 4096)
SHAPE = Shape("qwen3", 32_000, 1024, 4, 16, 8, 128, 3072, 2048, tied=True, spread=0.04)
STEPS = {
    "decode": ([1] * 5, [1, 33, 512, 2049, 4096]),
    "drafts": ([5] * 3, [6, 700, 1030]),
    "prompts": ([577, 129, 37], [577, 463, 1030]),
    "prompts beside decodes": ([1, 1, 129, 300], [1328, 18, 463, 300]),
}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> AttentionBackend:
    """A library that is installed, and has kernels for this GPU."""
    try:
        found = LIBRARIES[request.param](DEVICE)
    except NotInstalled as error:
        pytest.skip(str(error))
    major, minor = torch.cuda.get_device_capability()
    lacking = found.supported.lacking(Wanted(10 * major + minor, torch.bfloat16, torch.bfloat16, 128))
    if lacking:
        pytest.skip(f"{request.param} does not support {', '.join(lacking)}")
    return found


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"cap": 30.0}], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_a_library_computes_what_our_kernels_do(library: AttentionBackend, step: str, options: dict[str, Any]) -> None:
    if options and not library.supported.is_recorded:
        pytest.skip("a kernel for each option would be compiled")
    sizes = dataclasses.replace(SIZES, options=AttentionOptions(128**-0.5, **options))
    q, cache, meta = made(*STEPS[step], sizes)
    got, want = (one.attend(q, cache, meta, sizes.options, None) for one in (library, OURS))
    assert got.shape == want.shape and torch.allclose(got.float(), want.float(), atol=1.5e-2, rtol=1e-2)


def test_a_recorded_step_computes_other_rows(library: AttentionBackend) -> None:
    """Lengths, starts and tables change behind the back of a graph; padding rows have no token."""
    if not library.supported.is_recorded:
        pytest.skip("it plans on the host")
    q, cache, meta = made([1, 1, 1, 1], [4096, 4096, 4096, 4096], SIZES)
    rows = dataclasses.replace(meta.ragged, max_query=1)
    held = dataclasses.replace(meta, on_device=rows)
    graph = torch.cuda.CUDAGraph()
    library.attend(q, cache, held, SIZES.options, None)
    with torch.cuda.graph(graph):
        out = library.attend(q, cache, held, SIZES.options, None)
    for starts, contexts in (([0, 1, 2, 3, 4], [4096, 7, 33, 2000]), ([0, 1, 2, 2, 2], [100, 4001, 1, 1])):
        rows.starts.copy_(torch.tensor(starts, dtype=torch.int32))
        rows.contexts.copy_(torch.tensor(contexts, dtype=torch.int32))
        rows.tables.copy_(rows.tables.flip(0))
        graph.replay()
        num = starts[-1]
        fresh = dataclasses.replace(rows, num_tokens=num)
        want = OURS.attend(q, cache, dataclasses.replace(meta, on_device=fresh), SIZES.options, None)
        assert torch.allclose(out[:num].float(), want[:num].float(), atol=1.5e-2, rtol=1e-2)


def test_a_library_is_measured(library: AttentionBackend) -> None:
    for kind in library.supported.kinds:
        found = shares(library, kind, SIZES, seconds_on_device)
        assert not isinstance(found, str), found
        print(f"{library.version}, {kind.value}: {found} of triton's time, faster: {is_faster(found)}")
        assert all(0.01 < one < 100 for one in found) and kind in StepKind


@pytest.mark.parametrize("is_measured", [False, True], ids=["by name", "auto"])
def test_the_tokens_of_an_engine_are_the_likeliest_of_transformers(
    library: AttentionBackend, is_measured: bool, tmp_path: Path
) -> None:
    with torch.device("cuda"):
        checkpoint = make_checkpoint(tmp_path, SHAPE)
    config = read_config(checkpoint)
    asked = dataclasses.replace(CONFIG, attention_backend="auto" if is_measured else library.name)
    built = build_engine(asked, config, checkpoint, limits_of(asked, config, 1 << 20))
    (note,) = (note for note in built.computing.notes if note.startswith("attention"))
    print(note)
    assert is_measured or library.version in note
    for tokens, logits in behind(checkpoint, run(built.engine, 8)):
        chosen = logits.gather(1, tokens[:, None])[:, 0]
        assert ((logits.amax(1) - chosen) / logits.abs().amax(1)).max() <= MARGIN
    torch.cuda.empty_cache()
