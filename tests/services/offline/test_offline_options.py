"""Options of `LLM` are those of `sluice serve`, with the same names, types and limits."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.services.config import ServiceConfig
from sluice_server.services.offline.options import OF_SERVER, fields, settings_of


def test_every_option_of_the_engine_is_one_here() -> None:
    of_engine: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    of_service = {"model", "revision", "max_prompt_bytes", "chat_template", "trust_chat_content"}
    of_service |= {"tool_call_parser", "reasoning_parser", "allow_shared_cores"}
    assert {*of_engine, *of_service} == {*fields(), *OF_SERVER}
    settings = settings_of({})
    assert dataclasses.replace(settings.engine, **{name: of_engine[name] for name in OF_SERVER}) == EngineConfig()
    assert settings.service == ServiceConfig()


def test_values_arrive() -> None:
    engine, service = settings_of({"model": Path("/m"), "max_num_seqs": 3, "pause_hold_s": 2, "prefix_caching": False})
    assert (service.model, engine.max_num_seqs, engine.prefix_caching) == ("/m", 3, False)
    assert engine.pause_hold_s == 2.0 and isinstance(engine.pause_hold_s, float)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_modle_len": 8}, "'max_modle_len' is no option; did you mean 'max_model_len'?"),
        (
            {"qqq": 8},
            "'qqq' is no option; there are model, revision, allow_shared_cores, max_prompt_bytes, chat_template, ",
        ),
        ({"listen": "127.0.0.1:0"}, "'listen' is an option of `sluice serve` alone"),
        ({"max_queued_requests": 3}, "'max_queued_requests' is an option of `sluice serve` alone"),
        ({"max_num_seqs": "3"}, "max_num_seqs: '3' is not int"),
        ({"max_num_seqs": True}, "max_num_seqs: True is not int"),
        ({"prefix_caching": 1}, "prefix_caching: 1 is not bool"),
        ({"model": None}, "model: None is not str"),
    ],
)
def test_what_is_no_option_or_of_another_type(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match="^" + said.replace("?", r"\?")):
        settings_of(options)


def test_what_is_out_of_range_is_refused_as_the_service_refuses_it() -> None:
    with pytest.raises(ServiceError, match="--block-size: 0 is below 1") as caught:
        settings_of({"block_size": 0})
    assert (caught.value.reason, caught.value.field) == ("INVALID_SETTING", "block_size")


def test_more_ranks_than_cores_are_refused_by_name() -> None:
    with pytest.raises(ServiceError, match="--tensor-parallel-size: 4096 ranks need as many cores") as caught:
        settings_of({"tensor_parallel_size": 4096})
    assert (caught.value.reason, caught.value.field) == ("INVALID_SETTING", "tensor_parallel_size")
    assert settings_of({"tensor_parallel_size": 4096, "allow_shared_cores": True}).engine.num_ranks == 4096
