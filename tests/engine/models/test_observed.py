"""Weights rounded by what their inputs are: observed layer by layer, for every kind of layer."""

import logging
from pathlib import Path

import pytest
import torch

from sluice_server.engine.models import observed
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.observed import ObservedLinear, WeighingPack, random_ids
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.formats.packer import PLAIN, LinearPacker
from sluice_server.kernels.formats.weight_formats import pack
from tests.engine.models.test_balanced import CPU, OPTIONS, logits_of
from tests.oracle.checkpoints import Shape, make_checkpoint


class Recording:
    """Packs like the usual one and keeps what it was given."""

    rounds = True
    weighs = True

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def __call__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
        precise: bool = False,
        importance: torch.Tensor | None = None,
    ) -> PackedLinear:
        self.seen.append((weight, importance))
        return pack(weight, bias, gated=gated, precise=precise, weights="int4", importance=importance)


@pytest.mark.parametrize("architecture", list(OPTIONS))
def test_every_weight_of_a_layer_is_rounded_by_its_own_inputs(architecture: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape(architecture, options=OPTIONS[architecture]))
    recording = Recording()
    model = load_model(tmp_path, read_config(tmp_path), torch.float32, CPU, 64, recording)
    *layers, (_, of_head) = recording.seen
    assert of_head is None  # it is rounded less anyway
    for weight, importance in layers:
        assert importance is None or importance.shape == (weight.shape[1],)
    assert sum(importance is not None for _, importance in layers) > len(layers) / 2
    assert logits_of(model).isfinite().all()


def test_importance_is_the_square_of_inputs_to_a_power_of_2() -> None:
    linear = ObservedLinear(torch.eye(3), None)
    assert linear.importance is None
    x = torch.tensor([[1.0, 3.0, 0.0], [1.0, 4.0, 0.0]])
    assert torch.equal(linear.apply(x), x)
    assert linear.importance is not None and linear.importance.tolist() == [2.0, 32.0, 0.0]
    linear.apply(torch.tensor([[float("inf"), 0.0, 0.0]]))
    assert linear.importance is None


def test_observing_takes_no_more_ids_than_there_are_positions() -> None:
    assert len(random_ids(100, 8)) == 8 and len(random_ids(100, 4096)) == observed.NUM_TOKENS
    assert torch.equal(random_ids(100, 64), random_ids(100, 64))


def test_a_weight_without_its_observation_is_an_error() -> None:
    weighing = WeighingPack(LinearPacker("int4"))
    weighing.expect([ObservedLinear(torch.eye(4), None)])
    with pytest.raises(AssertionError, match="not every weight"):
        weighing.expect([])


def test_progress_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, Shape())
    monkeypatch.setattr(observed, "LOG_EVERY_S", -1.0)
    with caplog.at_level(logging.INFO):
        load_model(tmp_path, read_config(tmp_path), torch.float32, CPU, 64, LinearPacker("int4"))
    assert "rounded the weights of layer 2 of 2" in caplog.text


def test_norms_are_not_folded_into_weights_that_are_rounded(tmp_path: Path) -> None:
    """Unfolded, a model computes in float32 what it computes folded."""
    make_checkpoint(tmp_path, Shape())

    class Unfolded(Recording):
        weighs = False

        def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, **how: object) -> PackedLinear:
            return pack(weight, bias, gated=bool(how.get("gated")))

    config = read_config(tmp_path)
    folded, apart = (
        logits_of(load_model(tmp_path, config, torch.float32, CPU, 64, how)) for how in (PLAIN, Unfolded())
    )
    assert not torch.equal(folded, apart) and torch.allclose(folded, apart, rtol=1e-4, atol=1e-4)


def test_what_was_observed_is_named(tmp_path: Path) -> None:
    """Caches of models that are rounded by other observations must not mix."""
    config, names = None, []
    for seed in (0, 0, 1):
        make_checkpoint(tmp_path, Shape(), seed)
        config = config or read_config(tmp_path)
        names.append(load_model(tmp_path, config, torch.float32, CPU, 64, LinearPacker("int4")).observed)
    assert config is not None and names[0] == names[1] != names[2]
    assert load_model(tmp_path, config, torch.float32, CPU, 64, LinearPacker("int8")).observed == ""
