"""The example package, installed as its users do, through the real service."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from sluice.v1 import inference_pb2, types_pb2

from tests.engine.plugins.test_sampling_plugins import SHAPE, counted
from tests.engine.test_engine_oracle import some_prompts
from tests.oracle.checkpoints import make_checkpoint
from tests.oracle.tokenizers import byte_level_bpe
from tests.plugins.installed import install_example, make_biased, write_package
from tests.system.service import Service, generate, serve, spec

TIGHT = ("--block-size", "8", "--kv-cache-tokens", "112", "--max-num-batched-tokens", "7", "--max-num-seqs", "5")
ALL = ("--plugins", "BiasedLlamaForCausalLM,counting,failing,second", "--dtype", "float32", *TIGHT)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that finds the installed package."""
    return {"PYTHONPATH": str(install_example(tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("building")))}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint without the bias."""
    return make_checkpoint(tmp_path_factory.mktemp("plain"), SHAPE)


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    directory = tmp_path_factory.mktemp("biased")
    byte_level_bpe(directory)
    return directory, make_biased(directory, SHAPE)


def asking(prompt: list[int], num: int, **processors: dict[str, str]) -> types_pb2.GenerationSpec:
    made = spec(prompt, num)
    for name, arguments in processors.items():
        made.sampling.logits_processors.add(name=name, arguments=arguments)
    return made


def chosen(prompt: list[int], num: int, p: str) -> types_pb2.GenerationSpec:
    made = spec(prompt, num)
    made.sampling.ClearField("temperature")
    made.sampling.strategy.CopyFrom(types_pb2.SamplingStrategy(name="second", arguments={"p": p}))
    return made


def refusal(service: Service, wanted: types_pb2.GenerationSpec) -> grpc.RpcError:
    with service.stub() as stub, pytest.raises(grpc.RpcError) as caught:
        stub.Generate(inference_pb2.GenerateRequest(spec=wanted), timeout=60)
    return caught.value


def test_a_model_and_processors_of_another_package_serve(
    site: dict[str, str], plain: Path, biased: tuple[Path, torch.Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    directory, bias = biased
    prompts = list(some_prompts(SHAPE.vocab, 6).values())
    want = [counted(plain, one, 12, 3 * (at % 2), bias) for at, one in enumerate(prompts)]
    asked = [asking(one, 12, **({"counting": {"of": "3"}} if at % 2 else {})) for at, one in enumerate(prompts)]
    asked.append(chosen(prompts[0], 12, "0"))  # always the likeliest
    want.append(want[0])
    asked.append(asking(prompts[0], 12, failing={"at": "5"}))
    options = ("--model", str(directory), "--log-level", "info", *ALL)
    with serve(*options, environment=site) as service, service.stub() as stub:

        def outcome(one: types_pb2.GenerationSpec) -> list[int] | grpc.RpcError:
            try:
                return [token.id for token in generate(stub, one).tokens]
            except grpc.RpcError as error:
                return error

        with ThreadPoolExecutor(len(asked)) as pool:
            *outputs, failed = pool.map(outcome, asked)
        assert outputs == want
        assert isinstance(failed, grpc.RpcError) and failed.code() is grpc.StatusCode.INTERNAL
        assert "logits processor 'failing' raised RuntimeError" in str(failed.details())
        assert "secret" not in str(failed.details())
        error = refusal(service, asking(prompts[0], 3, counting={"of": "x"}))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "'of' must be 2 to 9" in str(error.details())
        error = refusal(service, chosen(prompts[0], 3, "2"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "'p' must be 0 to 1" in str(error.details())
        error = refusal(service, asking(prompts[0], 3, other={}))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "'other' is not served" in str(error.details())
    said = capfd.readouterr().err
    assert re.search(r"serving revision \w{12}-\w{12}-[0-9a-f]{16} on", said)  # the model's code is part of it
    assert "sluice.models plugin 'BiasedLlamaForCausalLM' of sluice-plugin-example 1.0 is loaded" in said
    assert "sluice.logits_processors plugin 'counting' of sluice-plugin-example 1.0 is loaded" in said


def test_what_is_installed_and_not_allowed_is_not_there(
    site: dict[str, str], biased: tuple[Path, torch.Tensor]
) -> None:
    with serve("--kv-cache-tokens", "512", environment=site) as service:
        error = refusal(service, asking([3, 4], 3, counting={"of": "3"}))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "this server was started without any (--plugins)" in str(error.details())
    assert "architecture 'BiasedLlamaForCausalLM' is not supported" in refused_start(site, "--model", str(biased[0]))


def refused_start(environment: dict[str, str], *options: str) -> str:
    """What a service says that does not start."""
    command = [sys.executable, "-m", "sluice_server", "serve", "--listen", "127.0.0.1:0", *options]
    env = {**os.environ, **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode not in (0, -9), done.stdout
    return done.stdout + done.stderr


@pytest.mark.long
def test_a_plugin_that_is_missing_or_broken_ends_the_start(site: dict[str, str], tmp_path: Path) -> None:
    said = refused_start(site, "--plugins", "counting,absent")
    assert "--plugins: 'absent' is offered by no installed package" in said
    write_package(tmp_path, "broken", "[sluice.logits_processors]\nodd = broken:Odd\n", "raise OSError('no disk')\n")
    said = refused_start({"PYTHONPATH": str(tmp_path)}, "--plugins", "odd", "--kv-cache-tokens", "512")
    assert "'odd' of broken 1.0 could not be imported: OSError: no disk" in said
