"""The ids that are observed when weights are rounded: what a file may hold, and that they decide."""

import json
from pathlib import Path

import pytest
import torch

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.calibration import with_calibration, write_calibration
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.loading import load_model
from sluice_server.kernels.formats.packer import LinearPacker
from tests.oracle.checkpoints import Shape, make_checkpoint

CPU = torch.device("cpu")


def test_the_ids_of_a_file_are_observed_and_name_the_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape())
    config, file = read_config(tmp_path), tmp_path / "ids.json"
    names = []
    for ids in (None, range(3, 40), range(3, 40), [*range(3, 39), 50]):
        chosen = config
        if ids is not None:
            write_calibration(file, config.vocab_size, list(ids))
            chosen = with_calibration(config, str(file), "int4")
            assert chosen.calibration == tuple(ids)
        names.append(load_model(tmp_path, chosen, torch.float32, CPU, 64, LinearPacker("int4")).observed)
    assert names[1] == names[2] and len(set(names)) == 3


def test_no_more_are_observed_than_there_are_positions(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape())
    config, file = read_config(tmp_path), tmp_path / "ids.json"
    write_calibration(file, config.vocab_size, [5] * 100)
    load_model(tmp_path, with_calibration(config, str(file), "int4"), torch.float32, CPU, 32, LinearPacker("int4"))


WRONG = {
    "no JSON": (b"{", "is no file that `sluice calibrate` wrote"),
    "no text": (b"\xff\xfe\x00", "is no file that `sluice calibrate` wrote"),
    "deep": (b"[" * 100_000, "is no file that `sluice calibrate` wrote"),
    "a list": (b"[1]", "is for a vocabulary of None"),
    "another model": (
        json.dumps({"vocab_size": 7, "token_ids": [1] * 20}).encode(),
        "a vocabulary of 7, and the model",
    ),
    "none": (json.dumps({"vocab_size": 100}).encode(), "must be a list of 16 to 4096 ids"),
    "few": (json.dumps({"vocab_size": 100, "token_ids": [1] * 15}).encode(), "must be a list of 16 to 4096 ids"),
    "many": (json.dumps({"vocab_size": 100, "token_ids": [1] * 4097}).encode(), "must be a list of 16 to 4096 ids"),
    "beyond": (json.dumps({"vocab_size": 100, "token_ids": [100] * 20}).encode(), "must be numbers below 100"),
    "true": (json.dumps({"vocab_size": 100, "token_ids": [True] * 20}).encode(), "must be numbers below 100"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_file_that_is_wrong_is_refused_by_its_option(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    make_checkpoint(tmp_path, Shape(vocab=100))
    file = tmp_path / "ids.json"
    file.write_bytes(content)
    with pytest.raises(ServiceError, match=f"^--calibration: .*{message}"):
        with_calibration(read_config(tmp_path), str(file), "int4")


def test_a_file_that_is_of_no_use_or_missing_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape())
    config = read_config(tmp_path)
    assert with_calibration(config, "", "int8") is config
    for weights in ("", "int8", "fp8"):
        with pytest.raises(ServiceError, match=r"--calibration: only weights that this server rounds by .*int4"):
            with_calibration(config, "ids.json", weights)
    with pytest.raises(ServiceError, match=r"--calibration: cannot read .*: No such file or directory"):
        with_calibration(config, str(tmp_path / "none.json"), "int4")
