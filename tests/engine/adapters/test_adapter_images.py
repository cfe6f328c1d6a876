"""Images of adapters: their matrices as a device computes with them, and where they begin."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sluice_server.engine.adapters.files import Adapter, LowRank, read_adapter
from sluice_server.engine.adapters.images import ALIGN, image_of
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.layers.sides import Folding
from tests.oracle.adapters import modules, write_adapter
from tests.oracle.checkpoints import Shape, make_checkpoint

LLAMA = Shape("llama", 61, 32, 1, 2, 1, 64, 48)


def zeros(num: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(num, dtype=dtype)


@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    base = make_checkpoint(tmp_path / "base", LLAMA)
    config = read_config(base)
    write_adapter(tmp_path / "own", config, 3, ("q_proj", "v_proj", "gate_proj"), rank_pattern={"v_proj": 5})
    return read_adapter(tmp_path, "own", modules(config))


def foldings_of(norm: Tensor | None, order: Tensor) -> dict[str, Folding]:
    at = "model.layers.0"
    sizes = {
        "q": LLAMA.heads * LLAMA.head_dim,
        "k": LLAMA.kv_heads * LLAMA.head_dim,
        "v": LLAMA.kv_heads * LLAMA.head_dim,
    }
    qkv = tuple((f"{at}.self_attn.{name}_proj", size) for name, size in sizes.items())
    gated = tuple((f"{at}.mlp.{name}_proj", LLAMA.intermediate) for name in ("gate", "up"))
    return {
        qkv[0][0]: Folding(qkv, norm, {qkv[0][0]: order}),
        gated[0][0]: Folding(gated, None, {}),
    }


def test_an_image_has_each_matrix_once_with_its_own_rank(adapter: Adapter) -> None:
    """Those of A below each other, times the norm; those of B in the order of the weight's rows, transposed."""
    order, norm = torch.randperm(LLAMA.heads * LLAMA.head_dim), torch.rand(LLAMA.hidden)
    image = image_of(adapter.parts, foldings_of(norm, order), 1, torch.float16, zeros)
    first, rank, *parts = image.places[0, 0].tolist()
    at, memory = "model.layers.0.self_attn", image.memory
    q, v = (adapter.parts[f"{at}.{name}_proj"] for name in "qv")
    assert (rank, parts[0:2], parts[3:5], parts[6:8]) == (8, [0, 3], [0, 0], [3, 5])
    a = memory[first : first + 8 * LLAMA.hidden].view(8, -1)
    assert torch.equal(a, (torch.cat([q.a, v.a]) * norm).half())
    b = memory[parts[2] : parts[2] + q.b.numel()].view(3, -1)
    assert torch.equal(b, q.b[order].t().half())
    assert torch.equal(memory[parts[8] : parts[8] + v.b.numel()].view(5, -1), v.b.t().half())
    assert image.scales[0, 0].tolist() == pytest.approx([q.scale, 0.0, v.scale])
    assert all(place % ALIGN == 0 for place in (first, parts[2], parts[8])) and not image.places[0, 1].any()
    used = sum(one.numel() for part in adapter.parts.values() for one in (part.a, part.b))
    assert used <= len(memory) < used + 6 * ALIGN and image.num_bytes == 2 * len(memory)


def test_numbers_that_the_models_format_has_not_are_refused(adapter: Adapter) -> None:
    def image(parts: dict[str, LowRank]) -> None:
        order = torch.arange(LLAMA.heads * LLAMA.head_dim)
        image_of(parts, foldings_of(None, order), 1, torch.float16, zeros)

    name, part = next(iter(adapter.parts.items()))
    image(dict(adapter.parts))
    with pytest.raises(ServiceError, match="numbers that float16 has not"):
        image({**adapter.parts, name: LowRank(part.a * 1e6, part.b, part.scale)})
    with pytest.raises(ServiceError, match=r"model.layers.7.q_proj is no linear"):
        image({**adapter.parts, "model.layers.7.q_proj": part})
