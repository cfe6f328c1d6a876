"""Weights of 4 bits on a pretended device are rounded by what is observed there, as on a CPU."""

import dataclasses
from pathlib import Path

import torch

from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.layers.decoder import DecoderLayer
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.model import Model
from sluice_server.kernels.formats.packer import LinearPacker
from tests.pretended_gpu.cuda import pretend
from tests.pretended_gpu.test_pretended_engines import SHAPES, checkpoint


def test_a_calibration_is_observed_and_rounds_weights(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, SHAPES["llama"])
    config = read_config(directory)

    def loaded(*ids: int) -> Model:
        asked = dataclasses.replace(config, calibration=ids)
        return load_model(directory, asked, torch.float32, torch.device("cuda", 0), 0, LinearPacker("int4"))

    def words(model: Model) -> list[torch.Tensor]:
        layers = [one for one in model._layers if isinstance(one, DecoderLayer)]
        return [matrix.weight.clone() for layer in layers for matrix in layer.matrices]

    with pretend():
        plain, again, other = loaded(), loaded(), loaded(*range(3, 40))
        assert plain.observed and plain.observed == again.observed != other.observed
        first, same, weighed = map(words, (plain, again, other))
        assert first and all(map(torch.equal, first, same)) and not all(map(torch.equal, first, weighed))
