"""The memory that is planned for a model beside what its engine has once its cache was used, in real processes."""

import sys
from pathlib import Path

import pytest

import sluice_server.demo
from sluice_server.engine.config import EngineConfig
from sluice_server.services.checks.planned import DETOKENIZER_BYTES, TOKENIZER_BYTES, with_plans
from sluice_server.services.config import ServiceConfig
from sluice_server.services.process.model_table import LaneEntry, Options
from tests.system.service import generate, serve, spec

TARGET = Path(sluice_server.demo.__file__).parent / "target"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="counts resident pages")
@pytest.mark.parametrize("more", [{}, {"quantization": "int8", "kv_cache_dtype": "int8"}], ids=["plain", "int8"])
def test_an_engine_takes_what_is_planned(more: Options) -> None:
    options: Options = {"kv_cache_tokens": 65536, "max_num_seqs": 4, **more}
    entry = with_plans(EngineConfig(), ServiceConfig(), [LaneEntry("x", str(TARGET), options=options)])[0]
    planned = entry.planned.total - TOKENIZER_BYTES - DETOKENIZER_BYTES
    given = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    with serve("--model", str(TARGET), *given) as service:
        with service.stub() as stub:
            for at in range(70):  # other tokens each time: they fill the cache
                generate(stub, spec([3 + at] * 950, 1))
        taken = service.children()["engine-0"].memory_info().rss
    assert 0.9 < planned / taken < 1.1, f"{planned >> 20} MiB are planned, and {taken >> 20} are taken"
