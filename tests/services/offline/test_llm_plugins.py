"""Plugins of a program's own `LLM`: the same setting and the same request as in a service."""

from pathlib import Path

import pytest

from sluice_server import LLM, SamplingParams
from sluice_server.services.offline.errors import PromptError
from tests.engine.plugins.test_sampling_plugins import FOUND
from tests.plugins.installed import EXAMPLE, write_package


def test_a_processor_of_another_package_is_asked_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(write_package(tmp_path, "sluice_plugin_example_info", FOUND))
    monkeypatch.syspath_prepend(EXAMPLE)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logits_processors={"counting": {"of": "3"}})
    with LLM("demo", plugins="counting", threads=1, kv_cache_tokens=512) as llm:
        (answer,) = llm.generate(["Once"], params)
        assert [token % 3 for token in answer.outputs[0].token_ids] == [0, 1, 2, 0, 1, 2, 0, 1]
        with pytest.raises(PromptError, match=r"'counting' refuses them: 'of' must be 2 to 9"):
            llm.generate(["Once"], SamplingParams(logits_processors={"counting": {"of": "99"}}))
