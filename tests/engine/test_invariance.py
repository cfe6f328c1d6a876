"""`--batch-invariant`: refused where it is impossible, reported where it is on, and passed to the kernels of a GPU."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.model import Model
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import settings_of
from sluice_server.engine.worker.overlapped import overlap
from sluice_server.engine.worker.runner import Runner
from sluice_server.engine.worker.slots.state import Slots
from sluice_server.engine.worker.startup.device_support import ON_CPU, ON_CUDA, check_invariance
from sluice_server.kernels import gpu
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats import weight_formats as kinds
from sluice_server.kernels.layout.ragged import AttentionOptions, Ragged
from tests.engine.worker import host_device
from tests.engine.worker.host_device import HostDevice, reference_family
from tests.oracle.checkpoints import Shape, make_checkpoint

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ASKED = EngineConfig(
    batch_invariant=True, device="cpu", dtype="float32", block_size=8, threads=1, max_num_seqs=4, kv_cache_tokens=512
)


def test_nothing_is_said_where_nothing_was_asked() -> None:
    assert check_invariance(EngineConfig(max_draft_width=8), 64, CUDA) == ()


def test_a_gpu_does_it_by_other_schedules_but_not_for_trees() -> None:
    assert check_invariance(ASKED, 64, CUDA) == (ON_CUDA,)
    with pytest.raises(ServiceError, match="--batch-invariant: with --max-draft-width 2 on cuda: take 1"):
        check_invariance(dataclasses.replace(ASKED, max_draft_width=2), 64, CUDA)


def test_a_cpu_does_it_anyhow_or_names_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in bfloat16 by oneDNN, whose products are computed in blocks of rows."""
    monkeypatch.setattr(builds, "is_available", lambda: True)
    monkeypatch.setattr(kinds, "serves_onednn", lambda: True)
    assert check_invariance(dataclasses.replace(ASKED, dtype="bfloat16"), 64, CPU) == (ON_CPU,)
    with pytest.raises(ServiceError, match=r"--batch-invariant: paged_attention depend .* of 20; leave it out") as no:
        check_invariance(ASKED, 20, CPU)
    assert no.value.field == "batch_invariant"
    monkeypatch.setattr(builds, "is_available", lambda: False)
    with pytest.raises(ServiceError, match=r"soft_cap, paged_attention depend on .* install sluice .* compiler"):
        check_invariance(ASKED, 64, CPU)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), Shape(kv_heads=1))


@pytest.mark.skipif(not builds.is_available(), reason="without our kernels it is refused")
def test_an_operator_is_told(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    for asked in (ASKED, dataclasses.replace(ASKED, batch_invariant=False)):
        built = build_engine(asked, config, checkpoint, limits_of(asked, config, 1 << 20))
        assert (ON_CPU in built.computing.notes) is asked.batch_invariant


class Seen:
    """Records the calls of a GPU's kernels, which compute with their reference implementations."""

    def __init__(self) -> None:
        self.attention: list[bool] = []
        self.products = 0

    def family(self, name: str) -> object:
        """See `kernels.gpu.family`."""
        return self if name in ("attention", "linear16") else reference_family(name)

    def paged_attention(
        self, q: Tensor, cache: Tensor, batch: Ragged, options: AttentionOptions, scales: Tensor | None = None
    ) -> Tensor:
        """Attention by its reference implementation."""
        self.attention.append(options.is_batch_invariant)
        return host_device._attend(q, cache, batch, options, scales)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Products in one order by their reference implementation."""
        self.products += 1
        return F.linear(x, weight, bias)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The recorded calls of an engine set up as on a GPU."""
    found = Seen()
    on_gpu = {name: tuple(one for one in table if one.fits(CUDA)) for name, table in kinds.KINDS.items()}
    table = {name: tuple(dataclasses.replace(one, fits=lambda _: True) for one in own) for name, own in on_gpu.items()}
    monkeypatch.setattr(kinds, "KINDS", table)
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    monkeypatch.setattr(gpu, "family", found.family)
    return found


def load(checkpoint: Path, *, is_fixed: bool) -> Model:
    model = load_model(checkpoint, read_config(checkpoint), torch.float32, CPU, 64)
    if is_fixed:
        model.fix()
    return model


def run(checkpoint: Path, model: Model, **params: Any) -> list[int]:  # noqa: ANN401 # of SamplingParams' types
    """The tokens of a prompt that is computed in chunks and decoded by recorded steps of a device."""
    config = read_config(checkpoint)
    store = BlockStore(model.new_cache(32, 8))
    plain = Runner(model, store, 8, 4, 64)
    own = overlap(plain, model, store, HostDevice(), Slots(4, 64, 8))
    scheduler = Scheduler(
        KVCache(32, 8, True), limits_of(ASKED, config, 1 << 20), config.eos_ids, 4, 16, settings_of(ASKED, None)
    )
    engine = Engine(scheduler, own)
    options = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True, **params}
    engine.add(EngineRequest("a", tuple(range(1, 30)), SamplingParams(**options)))
    out: list[int] = []
    while engine.has_work:
        events = engine.step()
        assert not events.failed
        out += [token for event in events.sampled for token in event.token_ids]
    return out


@pytest.mark.parametrize("params", [{}, {"logprobs": 1}], ids=["recorded", "computed one by one"])
def test_every_product_and_every_attention_is_asked_for_one_order(
    checkpoint: Path, seen: Seen, params: dict[str, Any]
) -> None:
    plain = load(checkpoint, is_fixed=False)
    want = run(checkpoint, plain, **params)
    assert seen.attention and not any(seen.attention) and not seen.products
    seen.attention.clear()
    assert run(checkpoint, load(checkpoint, is_fixed=True), **params) == want
    layers = len(seen.attention)
    heads = layers // plain.config.num_layers  # at least so many forwards, each with logits or not
    assert all(seen.attention) and 4 * layers <= seen.products <= 4 * layers + heads


def test_no_prefix_is_looked_at_apart(checkpoint: Path, seen: Seen) -> None:
    for is_fixed in (False, True):
        model = load(checkpoint, is_fixed=is_fixed)
        store = BlockStore(model.new_cache(4, 8))
        own = overlap(Runner(model, store, 8, 2, 64), model, store, HostDevice(), Slots(2, 64, 8))
        assert (own._prefixes is None) is is_fixed
