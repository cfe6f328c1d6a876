"""Broken checkpoints: each gives a ServiceError that names the file and its fault."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.weights import Checkpoint
from tests.oracle.checkpoints import Shape, make_checkpoint

WEIGHTS = "model.safetensors"


def edit_config(**changes: object) -> Callable[[Path], None]:
    """A fault that changes config.json; None removes a field."""

    def fault(directory: Path) -> None:
        path = directory / "config.json"
        values = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return fault


def replace_weights(directory: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(111, 48)}, directory / WEIGHTS)


def pickle_only(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")


def index(entry: str) -> Callable[[Path], None]:
    def fault(directory: Path) -> None:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": entry}}))

    return fault


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), r"config\.json: is missing"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), r"config\.json: cannot be read as JSON"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "does not hold a JSON object"),
    "no architecture": (edit_config(architectures=[]), "architectures is missing"),
    "other architecture": (edit_config(architectures=["GPT2LMHeadModel"]), "supported are .*Gemma2ForCausalLM"),
    "text for a number": (edit_config(hidden_size="big"), "hidden_size is 'big'; it must be a whole number from 1 to"),
    "missing number": (edit_config(num_hidden_layers=None), "num_hidden_layers is None"),
    "quantised": (
        edit_config(quantization_config={"bits": 4}),
        r"quantization_config\.quant_method is None; supported are awq",
    ),
    "unknown rope": (edit_config(rope_parameters={"rope_type": "magic"}), "'magic'; supported are default"),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), r"holds no \*\.safetensors"),
    "pickle only": (pickle_only, "holds only pickle weights, which can run code"),
    "cut short": (lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:5000]), "corrupt or cut short"),
    "garbage": (lambda d: (d / WEIGHTS).write_bytes(b"\xff" * 500), "corrupt or cut short"),
    "tensor missing": (replace_weights, "no safetensors file holds the tensor model.layers.0."),
    "wrong shape": (edit_config(intermediate_size=64), r"has shape \[88, 48\]; config\.json implies \[64, 48\]"),
    "dense with experts": (
        edit_config(num_experts=8, num_experts_per_tok=2),
        "names 8 experts: .LlamaForCausalLM.",
    ),
    "index names nothing": (index("gone.safetensors"), r"gone\.safetensors: is missing"),
    "index leaves the directory": (index("../x.safetensors"), "names a file outside the checkpoint directory"),
}


EXPERTS = Shape("qwen3_moe", options=(("num_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 24)))
OF_EXPERTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (edit_config(num_experts=None, num_local_experts=None), "names no experts: 'Qwen3MoeForCausalLM'"),
    "too few": (edit_config(num_experts_per_tok=5), "num_experts_per_tok is 5; num_(local_)?experts is 4"),
    "no choice": (edit_config(num_experts_per_tok=None), "num_experts_per_tok is None; it must be a whole number"),
    "a word for layers": (edit_config(mlp_only_layers=["0"]), r"mlp_only_layers is \['0'\]; it must be a list of"),
    "a word for a switch": (edit_config(norm_topk_prob="yes"), "norm_topk_prob is 'yes'; it must be true or false"),
    "no step": (edit_config(decoder_sparse_step=-1), "decoder_sparse_step is -1; it must be a whole number"),
    "another gate": (edit_config(swiglu_limit=5.0), r"swiglu_limit is 5\.0; supported is 7\.0"),
    "exl3": (edit_config(quantization_config={"quant_method": "exl3"}), "quant_method is 'exl3'; supported are awq"),
    "another width": (edit_config(moe_intermediate_size=32), r"experts\.0\.gate_proj\.weight has shape \[24, 48\]"),
    "dense after all": (edit_config(mlp_only_layers=[0]), r"holds the tensor model\.layers\.0\.mlp\.gate_proj\.weight"),
}


@pytest.mark.parametrize("name", list(OF_EXPERTS))
def test_each_fault_of_experts_is_named(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, EXPERTS)
    fault, message = OF_EXPERTS[name]
    fault(tmp_path)
    with pytest.raises(ServiceError, match=message):
        load_model(tmp_path, read_config(tmp_path), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", list(FAULTS))
def test_each_fault_is_named(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape())
    fault, message = FAULTS[name]
    fault(tmp_path)
    with pytest.raises(ServiceError, match=message) as caught:
        load_model(tmp_path, read_config(tmp_path), torch.float32, torch.device("cpu"))
    assert caught.value.code in (Code.FAILED_PRECONDITION, Code.UNIMPLEMENTED)


def test_loading_holds_a_few_raw_tensors_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tensors read, only those being packed are alive, besides what the model keeps as it is (embeddings)."""
    make_checkpoint(tmp_path, Shape(layers=8, vocab=64), max_shard_size="100KB")
    alive: list[weakref.ref[torch.Tensor]] = []
    peak = total = 0
    get = Checkpoint.get

    def counted(self: Checkpoint, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        nonlocal peak, total
        tensor = get(self, name, shape)
        alive.append(weakref.ref(tensor))
        total += tensor.nbytes
        peak = max(peak, sum(found.nbytes for ref in alive if (found := ref()) is not None))
        return tensor

    monkeypatch.setattr(Checkpoint, "get", counted)
    load_model(tmp_path, read_config(tmp_path), torch.float32, torch.device("cpu"))
    shards = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert len(shards) > 4
    assert total > 5 * peak
    assert peak < max(shards)
