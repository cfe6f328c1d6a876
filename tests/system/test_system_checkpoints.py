"""Broken checkpoints in real processes: each start ends with a line that says why, and a status other than 0."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

DEMO = Path("demo")
TIMEOUT_S = 60.0


def start(*options: str) -> "subprocess.CompletedProcess[str]":
    """Runs `sluice serve` until it ends by itself."""
    command = [sys.executable, "-m", "sluice_server", "serve", "--log-level", "warning", "--threads", "1", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def copied(directory: Path, name: str = "target") -> Path:
    return Path(shutil.copytree(DEMO / name, directory / name))


def say(directory: Path, **changes: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


def spoil(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def not_a_number(weights: dict[str, Tensor]) -> None:
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")


def too_large(weights: dict[str, Tensor]) -> None:
    for tensor in weights.values():
        tensor.mul_(1e30)


SAID_AT_ONCE: dict[str, tuple[dict[str, object], str]] = {
    "base of 0": ({"rope_theta": 0}, "rope_theta is 0; it must be a number from 2 to"),
    "no such end": ({"eos_token_id": -1}, "eos_token_id is -1; it must be one or more ids from 0 to 4095"),
    "layers without end": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be a whole number"),
    "unknown": ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported"),
}


@pytest.mark.parametrize("name", list(SAID_AT_ONCE))
def test_what_its_files_say_of_themselves_is_said_once(name: str, tmp_path: Path) -> None:
    changes, said = SAID_AT_ONCE[name]
    ended = start("--model", str(say(copied(tmp_path), **changes)), "--listen", f"unix:{tmp_path}/s")
    assert ended.returncode != 0
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line


SAID_BY_THE_ENGINE = {
    "no number": (not_a_number, r"model.safetensors: tensor model.layers.1.mlp.up_proj.weight holds nan at [3, 5]"),
    "too large": (too_large, "the first tokens have no finite logits: weights are too large"),
}


@pytest.mark.parametrize("name", ["too large", pytest.param("no number", marks=pytest.mark.long)])
def test_weights_that_give_no_numbers_end_the_service(name: str, tmp_path: Path) -> None:
    """Such a service would otherwise never become ready, nor report why."""
    change, said = SAID_BY_THE_ENGINE[name]
    ended = start("--model", str(spoil(copied(tmp_path), change)), "--listen", f"unix:{tmp_path}/s")
    assert ended.returncode != 0
    (line,) = ended.stderr.splitlines()
    assert line.startswith("sluice: engine-0 ended with exit status 2 (") and said in line
    assert line.endswith("), before the service was ready; the service ends")


def test_an_engine_alone_says_it_too(tmp_path: Path) -> None:
    model = spoil(copied(tmp_path), not_a_number)
    ring = ("--inbox", f"ipc://{tmp_path}/e", "--detokenizer-peers", f"detokenizer-0=ipc://{tmp_path}/d")
    ended = start("--model", str(model), "--role", "engine", *ring)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: {model}/model.safetensors: tensor model.layers.1.mlp.up_proj.weight holds nan")


KINDS = {"draft": ("draft", "model.norm.weight"), "eagle": ("head", "norm.weight")}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_draft_that_says_what_cannot_be_is_named(kind: str, tmp_path: Path) -> None:
    draft = say(copied(tmp_path, KINDS[kind][0]), rms_norm_eps=-1)
    ended = start("--listen", f"unix:{tmp_path}/s", "--speculation", kind, "--draft-model", str(draft))
    assert ended.returncode != 0
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: {draft}/config.json: rms_norm_eps is -1; it must be a number from 1e-30 to 1")


@pytest.mark.long
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_draft_whose_weights_are_no_numbers_is_named(kind: str, tmp_path: Path) -> None:
    directory, name = KINDS[kind]
    draft = spoil(copied(tmp_path, directory), lambda weights: weights[name].fill_(float("inf")))
    ended = start("--listen", f"unix:{tmp_path}/s", "--speculation", kind, "--draft-model", str(draft))
    assert ended.returncode != 0
    assert ended.stderr.startswith(f"sluice: engine-0 ended with exit status 2 ({draft}/model.safetensors: tensor ")
