"""A model over two ranks with a GPU each: likely tokens according to transformers, and the tokens of one GPU that adds
as many parts. The other rank is a process that this one starts."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from tests.gpu.test_gpu_engine import CONFIG, MARGIN, SHAPES, behind, run
from tests.oracle.checkpoints import make_checkpoint

NUM = 2
EIGHT_BITS = {"kv_cache_dtype": "int8"}
FORMS: dict[str, dict[str, Any]] = {"bf16": {}, "W8A16": {"quantization": "int8"}, "int8 cache": EIGHT_BITS}


@pytest.fixture(autouse=True)
def gpus() -> None:
    if torch.cuda.device_count() < NUM:
        pytest.skip(f"needs {NUM} GPUs")


@contextlib.contextmanager
def engine_over(directory: Path, config: EngineConfig) -> Iterator[Engine]:
    """An engine over as many ranks as its settings say; this process is rank 0."""
    from sluice_server.services.checkpoint.digests import remembered
    from sluice_server.services.checkpoint.model_source import CheckpointFiles, resolve_model
    from sluice_server.services.config import ServiceConfig
    from sluice_server.services.ranks.settings import config_of_rank
    from sluice_server.services.ranks.started import started

    model, service = read_config(directory), ServiceConfig(model=str(directory), allow_shared_cores=True)
    limits = limits_of(config, model, service.max_prompt_bytes)
    with contextlib.ExitStack() as closing:
        group = None
        if config.num_ranks > 1:
            contents = CheckpointFiles(resolve_model(service.model, ""), remembered(), with_weights=True)
            group = closing.enter_context(started(config, service, contents.configuration))
        built = build_engine(config_of_rank(config), model, directory, limits, workers=group)
        yield built.engine
        built.close()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", ["0.6B", "1B"])
def test_tokens_are_the_likeliest_of_transformers(tmp_path: Path, shape: str, form: str) -> None:
    directory = make_checkpoint(tmp_path, SHAPES[shape])
    with engine_over(directory, dataclasses.replace(CONFIG, tensor_parallel_size=NUM, **FORMS[form])) as engine:
        found = run(engine, 6)
    if form == "bf16":
        for tokens, logits in behind(directory, found):
            chosen = logits.gather(1, tokens[:, None])[:, 0]
            assert (logits.amax(1) - chosen <= MARGIN * logits.abs().amax(1)).all()
    assert all(len(ids) == 24 for ids in found.values())


def test_the_tokens_of_one_gpu_that_adds_as_many_parts(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, SHAPES["1B"])
    config = dataclasses.replace(CONFIG, sum_shards=NUM)
    with engine_over(directory, config) as engine:
        want = run(engine, 4, temperature=0.8)
    with engine_over(directory, dataclasses.replace(config, tensor_parallel_size=NUM)) as engine:
        assert run(engine, 4, temperature=0.8) == want
