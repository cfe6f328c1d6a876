"""Folders of adapters: what PEFT writes is read to the number, everything else is refused by name and nothing kept."""

import json
import os
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice_server.engine.adapters.config import parse_config
from sluice_server.engine.adapters.files import Adapter, read_adapter
from sluice_server.engine.adapters.modules import Module
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.config import ModelConfig, read_config
from tests.engine.models.hostile import truthful, write
from tests.oracle.adapters import modules, write_adapter

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q = "model.layers.1.self_attn.q_proj"
A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"


@pytest.fixture
def base(tmp_path: Path) -> ModelConfig:
    return base_of(tmp_path, "LlamaForCausalLM")


def base_of(tmp_path: Path, architecture: str) -> ModelConfig:
    (tmp_path / "base").mkdir(exist_ok=True)
    return read_config(write(tmp_path / "base", truthful(architecture)))


def read(tmp_path: Path, base: ModelConfig, path: str = "one") -> Adapter:
    return read_adapter(tmp_path / "adapters", path, modules(base))


def folder(tmp_path: Path, name: str = "one") -> Path:
    return tmp_path / "adapters" / name


def say(tmp_path: Path, **fields: object) -> None:
    path = folder(tmp_path) / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change(tmp_path: Path, make: Callable[[dict[str, Tensor]], object]) -> None:
    found = load_file(folder(tmp_path) / FILE)
    make(found)
    save_file(found, folder(tmp_path) / FILE)


@pytest.mark.parametrize("rank", [1, 3, 8, 256])
def test_what_peft_writes_is_read(rank: int, tmp_path: Path, base: ModelConfig) -> None:
    tensors = write_adapter(folder(tmp_path), base, rank)
    found = read(tmp_path, base)
    assert set(found.parts) == set(modules(base))
    assert found.rank == rank
    assert found.num_bytes == sum(one.nbytes for one in tensors.values())
    for name, part in found.parts.items():
        assert torch.equal(part.a, tensors[f"base_model.model.{name}.lora_A.weight"])
        assert torch.equal(part.b, tensors[f"base_model.model.{name}.lora_B.weight"])
        assert part.scale == 2.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_stay_halves(dtype: torch.dtype, tmp_path: Path, base: ModelConfig) -> None:
    write_adapter(folder(tmp_path), base)
    change(tmp_path, lambda found: found.update({name: one.to(dtype) for name, one in found.items()}))
    assert {part.a.dtype for part in read(tmp_path, base).parts.values()} == {dtype}


def test_patterns_give_ranks_and_scales(tmp_path: Path, base: ModelConfig) -> None:
    ranks = {"layers.1.self_attn.q_proj": 5, "down_proj": 2}
    alphas = {f"^{Q}": 10, "up_proj": -1.5}
    write_adapter(folder(tmp_path), base, 4, rank_pattern=ranks, alpha_pattern=alphas)
    parts = read(tmp_path, base).parts
    assert len(parts[Q].a) == 5
    assert parts[Q].scale == 2.0
    assert len(parts["model.layers.0.mlp.down_proj"].a) == 2
    assert parts["model.layers.0.mlp.down_proj"].scale == 4.0
    assert parts["model.layers.0.mlp.up_proj"].scale == -0.375
    assert parts["model.layers.0.self_attn.q_proj"].scale == 2.0


def test_rank_stabilised_scales(tmp_path: Path, base: ModelConfig) -> None:
    write_adapter(folder(tmp_path), base, 16, use_rslora=True)
    assert read(tmp_path, base).parts[Q].scale == 32 / 4


def test_a_subset_is_an_adapter(tmp_path: Path, base: ModelConfig) -> None:
    write_adapter(folder(tmp_path), base, targets=("q_proj", "v_proj"))
    assert {name.rpartition(".")[2] for name in read(tmp_path, base).parts} == {"q_proj", "v_proj"}


def test_some_layers_are_an_adapter(tmp_path: Path, base: ModelConfig) -> None:
    write_adapter(folder(tmp_path), base, layers_to_transform=[1])
    change(tmp_path, lambda found: [found.pop(name) for name in list(found) if ".layers.0." in name])
    assert all(".layers.1." in name for name in read(tmp_path, base).parts)


def test_fused_projections_are_modules_of_their_own(tmp_path: Path) -> None:
    phi = base_of(tmp_path, "Phi3ForCausalLM")
    write_adapter(folder(tmp_path), phi, targets=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))
    assert len(read(tmp_path, phi).parts) == 2 * 4


def test_a_text_model_within_another_is_found(tmp_path: Path, base: ModelConfig) -> None:
    write_adapter(folder(tmp_path), base)

    def rename(found: dict[str, Tensor]) -> None:
        for name in list(found):
            found[name.replace(".model.layers", ".model.language_model.layers")] = found.pop(name)

    change(tmp_path, rename)
    assert set(read(tmp_path, base).parts) == set(modules(base))


def test_a_digest_names_content(tmp_path: Path, base: ModelConfig) -> None:
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        write_adapter(folder(tmp_path, name), base, seed=seed)
    one, same, other = (read(tmp_path, base, name).digest for name in ("one", "same", "other"))
    assert one == same != other
    assert len(one) == 32
    say(tmp_path, lora_alpha=7)
    assert read(tmp_path, base).digest != one


BUILT: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora is True"),
    "bias": ({"bias": "all"}, "bias is 'all'"),
    "bias of B": ({"lora_bias": True}, "lora_bias is True"),
    "modules to save": ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    "parameters": ({"target_parameters": ["x"]}, "target_parameters is"),
    "turned weights": ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
    "new tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
    "repeated layers": ({"layer_replication": [[0, 2]]}, "layer_replication is"),
    "activated": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
    "a field of a later release": ({"use_something": {"a": 1}}, "use_something is"),
    "another kind": ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
    "another base": ({"init_lora_weights": "pissa_niter_4"}, "changed the weights of its base"),
    "an expression": ({"rank_pattern": {"(a+)+q_proj": 4}}, "keys must be names of modules"),
}


@pytest.mark.parametrize(("fields", "said"), BUILT.values(), ids=BUILT)
def test_other_kinds_are_refused_by_name(fields: dict[str, Any], said: str, tmp_path: Path, base: ModelConfig) -> None:
    write_adapter(folder(tmp_path), base)
    say(tmp_path, **fields)
    with pytest.raises(ServiceError, match=said.replace("(", r"\(")) as caught:
        read(tmp_path, base)
    assert caught.value.code is Code.UNIMPLEMENTED


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"rank {rank}": ({"r": rank}, "r is .*; it must be a whole number from 1 to 256") for rank in (0, -1, 257, 4096)
    },
    **{f"rank {rank!r}": ({"r": rank}, "r is .*; it must be a whole") for rank in (None, 8.0, True, "8", [8], 10**400)},
    "no alpha": ({"lora_alpha": 0}, "lora_alpha is 0"),
    "alpha NaN": ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    "alpha infinite": ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
    "a pattern of rank 0": ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj is 0"),
    "a pattern that is none": ({"alpha_pattern": [1]}, "alpha_pattern is"),
    "a pattern of nothing": ({"rank_pattern": {"x_proj": 3}}, "rank_pattern names 'x_proj', which is no module"),
    "a flag that is none": ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
    "unknown targets": ({"target_modules": ["q_proj", "w1"]}, "target_modules names 'w1', which is no module"),
    "the head": ({"target_modules": ["lm_head"]}, "target_modules names 'lm_head', which is no module"),
    "no targets": ({"target_modules": []}, "target_modules is"),
    "another rank": ({"r": 4}, r"has shape \[3, 88\]; adapter_config.json and the base imply \[4, 88\]"),
    "a start that is none": ({"init_lora_weights": {"a": 1}}, "init_lora_weights is"),
}


@pytest.mark.parametrize(("fields", "said"), WRONG.values(), ids=WRONG)
def test_wrong_values_are_refused_by_name(fields: dict[str, Any], said: str, tmp_path: Path, base: ModelConfig) -> None:
    write_adapter(folder(tmp_path), base)
    say(tmp_path, **fields)
    with pytest.raises(ServiceError, match=said) as caught:
        read(tmp_path, base)
    assert (caught.value.reason, caught.value.field) == ("ADAPTER_INVALID", "adapter")


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"r": ' + b"9" * 5000 + b"}"])
def test_a_config_that_is_none(text: bytes) -> None:
    with pytest.raises(ServiceError, match=r"adapter_config\.json"):
        parse_config(text)


def swap(found: dict[str, Tensor]) -> None:
    found[A], found[B] = found[B], found[A]


def add(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda found: found.update({name: torch.ones(3, 48)})


def spoil(value: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda found: found[A].view(-1)[5:6].fill_(value)


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "A and B swapped": (swap, rf"tensor .*{Q}.lora_A.weight has shape \[64, 3\]"),
    "NaN": (spoil(float("nan")), f"tensor {A} holds NaN or an infinity"),
    "infinity": (spoil(float("inf")), f"tensor {A} holds NaN or an infinity"),
    "A alone": (lambda found: found.pop(B), f"{Q} has lora_A alone"),
    "a module fewer": (lambda found: (found.pop(A), found.pop(B)), f"has no tensors of {Q}"),
    "nothing": (dict.clear, "holds no tensors"),
    "unknown": (add("more"), "tensor 'more' would not be used"),
    "a magnitude": (add(A.replace("lora_A.weight", "lora_magnitude_vector")), "lora_magnitude_vector.*would not be us"),
    "a layer more": (add(A.replace("layers.1", "layers.2")), r"layers\.2\..* would not be used"),
    "an odd layer": (add(A.replace("layers.1", "layers.01")), r"layers\.01\..* would not be used"),
    "embeddings": (add("base_model.model.model.embed_tokens.lora_embedding_A"), "adapters of embeddings"),
    "the head": (add("base_model.model.lm_head.lora_A.weight"), "adapters of embeddings"),
    "experts": (add("base_model.model.model.layers.0.mlp.experts.1.w1.lora_A.weight"), "adapters of experts"),
    "integers": (lambda found: found.update({A: found[A].to(torch.int8)}), f"tensor {A!r} is I8; supported are F32"),
    "twice": (add(A.replace("model.model.", "model.model.language_model.")), f"holds lora_A of {Q} twice"),
    "no numbers": (lambda found: found.update({A: torch.empty(0, 48)}), r"has shape \[0, 48\]"),
    "a scalar": (lambda found: found.update({A: torch.tensor(1.0)}), r"has shape \[\]"),
}


@pytest.mark.parametrize(("make", "said"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_do_not_fit_are_named(
    make: Callable[[dict[str, Tensor]], object], said: str, tmp_path: Path, base: ModelConfig
) -> None:
    write_adapter(folder(tmp_path), base)
    change(tmp_path, make)
    with pytest.raises(ServiceError, match=said):
        read(tmp_path, base)


def test_another_base_is_refused(tmp_path: Path, base: ModelConfig) -> None:
    write_adapter(folder(tmp_path), base)
    values = {**truthful("LlamaForCausalLM"), "hidden_size": 64}
    other = read_config(write(tmp_path / "base", values))
    with pytest.raises(ServiceError, match=r"has shape \[48, 3\]; adapter_config.json and the base imply \[64, 3\]"):
        read(tmp_path, other)


def test_experts_have_adapters_of_attention_alone(tmp_path: Path) -> None:
    base = base_of(tmp_path, "MixtralForCausalLM")
    write_adapter(folder(tmp_path), base, targets=("q_proj", "o_proj"))
    assert len(read(tmp_path, base).parts) == 2 * 2
    assert not any("mlp" in name for name in modules(base))


def outside(tmp_path: Path) -> Path:
    made: Path = tmp_path / "elsewhere"
    made.mkdir()
    return made


@pytest.mark.parametrize(
    "path", ["", "..", "../elsewhere", "one/../../elsewhere", "/etc", "a\0b", "x" * 10_000, "nothing", "one/" + CONFIG]
)
def test_paths_stay_below_the_root(path: str, tmp_path: Path, base: ModelConfig) -> None:
    write_adapter(folder(tmp_path), base)
    write_adapter(outside(tmp_path), base)
    with pytest.raises(ServiceError, match=r"folder of adapters|loop") as caught:
        read(tmp_path, base, path)
    assert len(caught.value.message) < 300


def link_folder(tmp_path: Path, elsewhere: Path) -> None:
    folder(tmp_path).rename(elsewhere / "moved")
    folder(tmp_path).symlink_to(elsewhere / "moved")


def link_file(tmp_path: Path, elsewhere: Path) -> None:
    (folder(tmp_path) / FILE).rename(elsewhere / FILE)
    (folder(tmp_path) / FILE).symlink_to(elsewhere / FILE)


def loop(tmp_path: Path, _: Path) -> None:
    (folder(tmp_path) / CONFIG).unlink()
    (folder(tmp_path) / CONFIG).symlink_to(CONFIG)


def instead(make: Callable[[Path], object], name: str = FILE) -> Callable[[Path, Path], None]:
    def fault(tmp_path: Path, _: Path) -> None:
        (folder(tmp_path) / name).unlink()
        make(folder(tmp_path) / name)

    return fault


def endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 << 30)


def pickled(path: Path) -> None:
    torch.save({"a": torch.ones(1)}, path.with_name("adapter_model.bin"))


FILES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "a folder elsewhere": (link_folder, "leads out of the folder of adapters"),
    "a file elsewhere": (link_file, f"{FILE} leads out of the folder of adapters"),
    "a loop": (loop, CONFIG),
    "a pipe": (instead(os.mkfifo), "is no regular file"),
    "a directory": (instead(Path.mkdir), "is no regular file"),
    "10 GB": (instead(endless), "has 10737418240 bytes; an adapter of this base has at most"),
    "a large config": (instead(endless, CONFIG), "has 10737418240 bytes"),
    "pickle": (instead(pickled), "holds only adapter_model.bin, which can run code when read"),
    "no tensors": (instead(lambda path: None), f"the folder has no {FILE}"),
    "no config": (instead(lambda path: None, CONFIG), f"the folder has no {CONFIG}"),
    "nothing": (instead(Path.touch), r"is corrupt or cut short \(0 bytes\)"),
    "a long header": (instead(lambda path: path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")), "is corrupt or cut"),
}


@pytest.mark.parametrize(("make", "said"), FILES.values(), ids=FILES)
def test_files_that_are_none(make: Callable[[Path, Path], None], said: str, tmp_path: Path, base: ModelConfig) -> None:
    write_adapter(folder(tmp_path), base)
    make(tmp_path, outside(tmp_path))
    with pytest.raises(ServiceError, match=said):
        read(tmp_path, base)


def test_links_within_the_root_are_followed(tmp_path: Path, base: ModelConfig) -> None:
    """A cache of downloads keeps files beside the folders that link to them."""
    write_adapter(folder(tmp_path), base)
    (folder(tmp_path) / FILE).rename(tmp_path / "adapters" / "blob")
    (folder(tmp_path) / FILE).symlink_to("../blob")
    assert read(tmp_path, base).rank == 3


def test_a_limit_of_bytes(tmp_path: Path, base: ModelConfig) -> None:
    write_adapter(folder(tmp_path), base, 256)
    with pytest.raises(ServiceError, match="an adapter of this base has at most"):
        read_adapter(tmp_path / "adapters", "one", modules(base), limit=-(16 << 20) + 1000)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Module], bytes]:
    tmp_path = tmp_path_factory.mktemp("fuzzed")
    base = base_of(tmp_path, "LlamaForCausalLM")
    write_adapter(folder(tmp_path), base, targets=("q_proj", "down_proj"))
    return tmp_path, modules(base), (folder(tmp_path) / FILE).read_bytes()


@pytest.mark.parametrize("seed", range(20))
def test_a_changed_header_is_refused_or_true(seed: int, whole: tuple[Path, Mapping[str, Module], bytes]) -> None:
    """Bytes of the header are replaced, removed and repeated: an error by name, or an adapter of the right shapes."""
    tmp_path, known, content = whole
    rng, size = random.Random(seed), 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(50):
        header = bytearray(content[:size])
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(header))
            what = rng.randrange(3)
            if what == 0:
                header[at] = rng.choice(b'0123456789{}[]",:ABFx\0\xff')
            elif what == 1:
                del header[at : at + rng.randrange(1, 9)]
            else:
                header[at:at] = header[at : at + rng.randrange(1, 40)]
        (folder(tmp_path) / FILE).write_bytes(bytes(header) + content[size:])
        try:
            found = read_adapter(tmp_path / "adapters", "one", known)
        except ServiceError as error:
            assert error.field == "adapter"
            continue
        for name, part in found.parts.items():
            assert part.a.shape == (3, known[name].inputs)
            assert part.b.shape == (known[name].outputs, 3)
