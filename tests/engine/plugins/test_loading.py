"""An engine starts with all of its plugins or not at all: what is missing, incompatible or broken is named."""

import dataclasses
import importlib
import logging
from pathlib import Path

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import ModelConfig, read_config
from sluice_server.engine.plugins.loading import LoadedPlugins, load_plugins
from tests.engine.models.hostile import truthful, write
from tests.plugins.installed import write_package

ENTRIES = """[sluice.models]
OddForCausalLM = broken:MODEL
LlamaForCausalLM = broken:MODEL
[sluice.logits_processors]
odd = broken:Odd
"""
HEAD = "from sluice_server.engine.models import architectures\nfrom sluice_server.engine.plugins.interface import *\n"
PROCESSOR = "class Odd:\n    api = 1\n    def __init__(self, context): pass\n    def check(self, arguments): pass\n"
BROKEN = {
    "not there": ("odd", HEAD, "'odd' of broken 1.0 could not be imported: AttributeError"),
    "raises at import": ("odd", "raise OSError('no\\nfile')", "could not be imported: OSError: no$"),
    "raises when made": ("odd", "def Odd(context): raise KeyError(1)", "could not be made: KeyError: 1"),
    "takes no context": ("odd", "class Odd: api = 1", "could not be made: TypeError"),
    "of no version": (
        "odd",
        "def Odd(context): return object()",
        "was written for version None of the interface; this s",
    ),
    "of another version": ("odd", PROCESSOR.replace("= 1", "= 2"), "was written for version 2 of the interface; this "),
    "without apply": ("odd", PROCESSOR, "'odd' of broken 1.0 has no method apply"),
    "no ModelPlugin": ("OddForCausalLM", "MODEL = 3", "is a int, and no ModelPlugin"),
    "a model of another version": (
        "OddForCausalLM",
        f"{HEAD}MODEL = ModelPlugin(api=0, traits=architectures.llama)",
        "was written for version 0",
    ),
    "a model of another class": (
        "OddForCausalLM",
        f"{HEAD}MODEL = ModelPlugin(api=API, traits=architectures.llama, model=int)",
        "its model is no subclass of Model",
    ),
    "traits that raise": (
        "OddForCausalLM",
        f"{HEAD}def bad(config): return config.nothing\nMODEL = ModelPlugin(api=API, traits=bad)",
        "has no traits for this checkpoint: AttributeError",
    ),
    "traits of too few layers": (
        "OddForCausalLM",
        f"{HEAD}MODEL = ModelPlugin(api=API, traits=lambda config: ArchitectureTraits(windows=()))",
        "its traits must be ArchitectureTraits with a window for each of 2 layers",
    ),
    "a model of ours": (
        "LlamaForCausalLM",
        "MODEL = 3",
        "names an architecture that this server has itself: rename it",
    ),
}


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return dataclasses.replace(
        read_config(write(tmp_path, truthful("LlamaForCausalLM"))), architecture="OddForCausalLM"
    )


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packages are, as long as the test runs."""
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(importlib.sys.modules, "broken", raising=False)  # type: ignore[attr-defined] # sys, of importlib
    return tmp_path / "site"


@pytest.mark.parametrize("name", list(BROKEN))
def test_what_cannot_be_used_is_refused_by_a_line(
    name: str, package: Path, config: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    plugin, code, message = BROKEN[name]
    write_package(package, "broken", ENTRIES, code)
    with pytest.raises(ServiceError, match=message) as caught, caplog.at_level(logging.CRITICAL):
        load_plugins(plugin, config)
    assert caught.value.field == "plugins" and caught.value.message.startswith("--plugins: ")
    assert plugin in caught.value.message and "broken 1.0" in caught.value.message and "\n" not in caught.value.message


def test_nothing_is_loaded_where_nothing_is_allowed(config: ModelConfig) -> None:
    assert load_plugins("", config) == LoadedPlugins()


def test_the_code_of_a_model_is_part_of_its_name(package: Path, config: ModelConfig) -> None:
    code = f"{HEAD}MODEL = ModelPlugin(api=API, traits=lambda config: architectures.llama(config))"
    write_package(package, "broken", ENTRIES, code)
    first = load_plugins("OddForCausalLM", config)
    assert first.identity.startswith("broken 1.0 ") and "is loaded" in first.notes[0]
    (package / "broken.py").write_text(f"{code}\n# and nothing else\n")
    assert load_plugins("OddForCausalLM", config).identity != first.identity
    other = load_plugins("OddForCausalLM", dataclasses.replace(config, architecture="LlamaForCausalLM"))
    assert other.model is None and not other.identity and "not in use" in other.notes[0]
