"""How a checkpoint says that its vectors are made: sentence-transformers' files, read as data."""

import json
from pathlib import Path

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import Pooling
from sluice_server.services.checkpoint.pooling_files import PoolingFiles, read_instruction, read_pooling

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOL = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
OFF = {"pooling_mode_cls_token": False, "pooling_mode_max_tokens": False}


def files(directory: Path, modules: object, **pooling: object) -> Path:
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({"prompts": {"query": "Judge.", "other": "x"}, "default_prompt_name": "query"}, "Judge."),
        ({"prompts": {"query": "Judge."}, "default_prompt_name": None}, ""),
        ({"prompts": {}, "default_prompt_name": "query"}, ""),
        ({}, ""),
    ],
)
def test_the_default_prompt_is_the_instruction(tmp_path: Path, settings: dict[str, object], want: str) -> None:
    assert read_instruction(tmp_path) == ""
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    assert read_instruction(tmp_path) == want


def test_a_checkpoint_without_files_pools_the_last_token_and_normalises(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == PoolingFiles(Pooling.LAST, normalize=True)


@pytest.mark.parametrize(
    ("modules", "pooling", "want"),
    [
        (
            [TRANSFORMER, POOL, NORMALIZE],
            {**OFF, "pooling_mode_lasttoken": True, "include_prompt": True},
            PoolingFiles(Pooling.LAST, normalize=True),
        ),
        (
            [TRANSFORMER, POOL],
            {**OFF, "pooling_mode_mean_tokens": True, "include_prompt": False},
            PoolingFiles(Pooling.MEAN, normalize=False, pools_instruction=False),
        ),
        ([TRANSFORMER, POOL], {"pooling_mode": "mean"}, PoolingFiles(Pooling.MEAN, normalize=False)),
    ],
)
def test_files_say_it(tmp_path: Path, modules: object, pooling: dict[str, object], want: PoolingFiles) -> None:
    assert read_pooling(files(tmp_path, modules, **pooling)) == want


@pytest.mark.parametrize("mode", [{"pooling_mode_cls_token": True}, {"pooling_mode": "cls"}])
def test_encoders_may_pool_the_first_token(tmp_path: Path, mode: dict[str, object]) -> None:
    assert read_pooling(tmp_path, is_encoder=True) == PoolingFiles(Pooling.MEAN, normalize=True)
    found = read_pooling(files(tmp_path, [TRANSFORMER, POOL, NORMALIZE], **mode), is_encoder=True)
    assert found == PoolingFiles(Pooling.FIRST, normalize=True)


def test_small_letters_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sentence_bert_config.json"
    for is_set, why in ((False, ""), (True, "sentence_bert_config.json sets do_lower_case, which is not built")):
        path.write_text(json.dumps({"max_seq_length": 128, "do_lower_case": is_set}))
        assert read_pooling(tmp_path, is_encoder=True).refusal == why


@pytest.mark.parametrize(
    ("modules", "pooling", "why"),
    [
        ([TRANSFORMER, POOL, DENSE], {"pooling_mode": "mean"}, "modules.json names a module of type 'Dense'"),
        ([TRANSFORMER], {}, "modules.json names no module that pools"),
        ([TRANSFORMER, POOL], {"pooling_mode_cls_token": True}, "1_Pooling/config.json pools by 'cls_token'"),
        (
            [TRANSFORMER, POOL],
            {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            "1_Pooling/config.json pools by 'mean_tokens and lasttoken'",
        ),
    ],
)
def test_what_is_not_built_is_named(tmp_path: Path, modules: object, pooling: dict[str, object], why: str) -> None:
    assert read_pooling(files(tmp_path, modules, **pooling)).refusal == why


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        ({}, "does not hold a list of objects"),
        ([1], "does not hold a list of objects"),
        ([{**POOL, "path": "../1_Pooling"}], "it must be a folder beside the file"),
        ([{**POOL, "path": 3}], "path is 3; it must be a string"),
        ([{**POOL, "path": "9_Pooling"}], "is missing"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, modules: object, told: str) -> None:
    with pytest.raises(ServiceError, match=told) as refused:
        read_pooling(files(tmp_path, modules))
    assert refused.value.reason == "MODEL_INVALID"
