"""Weights that are wrong: NaN, tensors that config.json does not have, files of another kind. Each is refused by a
line that names file and tensor, before the service starts."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice_server.engine.build import build_engine
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models import weights
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.eagle import load_head
from sluice_server.engine.models.limits import check_tables, limits_of
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.weights import is_finite
from sluice_server.kernels.formats.packer import PLAIN
from tests.engine.test_engine_oracle import ROOMY, make_engine
from tests.oracle import published
from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.heads import make_head
from tests.oracle.published import AWQ, FBGEMM, publish

CPU = torch.device("cpu")
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"
DEEP = '{"weight_map":' + "[" * 100_000


def load(directory: Path, dtype: torch.dtype = torch.float32) -> None:
    load_model(directory, read_config(directory), dtype, CPU)


def change(directory: Path, make: Callable[[dict[str, Tensor]], object]) -> None:
    found = load_file(directory / FILE)
    make(found)
    save_file(found, directory / FILE, {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("value", "said"), [(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "-inf")])
def test_a_number_that_is_none_is_found(
    value: float, said: str, stored: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, Shape())

    def spoil(found: dict[str, Tensor]) -> None:
        found[UP] = found[UP].to(stored)
        found[UP][3, 5] = value

    change(tmp_path, spoil)
    with pytest.raises(ServiceError, match=rf"{FILE}: tensor {UP} holds {said} at \[3, 5\]: download") as caught:
        load(tmp_path, dtype)
    assert caught.value.reason == "MODEL_INVALID"


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight"],
)
def test_it_is_found_wherever_it_is(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape())
    change(tmp_path, lambda found: found[name].view(-1)[-1:].fill_(float("nan")))
    with pytest.raises(ServiceError, match=f"tensor {name} holds nan at"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_large_numbers_are_numbers(dtype: torch.dtype) -> None:
    """Large finite weights are accepted, also if their sum overflows."""
    most = torch.full((40, 40), torch.finfo(dtype).max).to(dtype)
    assert is_finite(most)
    assert is_finite(most[:0])
    assert not is_finite(torch.cat([most.float(), torch.full((1, 40), float("nan"))]).to(dtype))


SCALES: list[tuple[str, Callable[[Path], object], str, float]] = [
    ("awq", lambda path: publish(path, AWQ, published.awq), "q_proj.scales", float("inf")),
    ("fp8", lambda path: publish(path, FBGEMM, published.fp8), "q_proj.weight_scale", float("nan")),
    ("fp8 itself", lambda path: publish(path, FBGEMM, published.fp8), "q_proj.weight", float("nan")),
]


@pytest.mark.parametrize(("make", "name", "value"), [one[1:] for one in SCALES], ids=[one[0] for one in SCALES])
def test_scales_are_looked_at_too(make: Callable[[Path], object], name: str, value: float, tmp_path: Path) -> None:
    made = make(tmp_path)
    assert isinstance(made, published.Published)

    def spoil(found: dict[str, Tensor]) -> None:
        whole = found[f"model.layers.1.self_attn.{name}"]
        wide = whole.float()
        wide.view(-1)[7] = value
        found[f"model.layers.1.self_attn.{name}"] = wide.to(whole.dtype)

    change(made.directory, spoil)
    with pytest.raises(ServiceError, match=rf"tensor model\.layers\.1\.self_attn\.{name} holds {value} at"):
        load(made.directory)


@pytest.mark.parametrize(
    ("said", "held"), [(1, "tensors of layer 1"), (3, "no tensor of layer 2"), (4096, "no tensor of")]
)
def test_as_many_layers_are_said_as_held(said: int, held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, Shape())
    values = json.loads((tmp_path / "config.json").read_text())
    values["layer_types"] = None
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_hidden_layers": said}))
    monkeypatch.delattr(weights.Checkpoint, "_read")  # nothing is read for that
    with pytest.raises(ServiceError, match=rf"config\.json: num_hidden_layers is {said}, and the files hold {held}"):
        load(tmp_path)


def instead(make: Callable[[Path], object], name: str = FILE) -> Callable[[Path], None]:
    """Puts something else in place of a file."""

    def fault(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return fault


def endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


NO_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link to nothing": (instead(lambda path: path.symlink_to("/nowhere")), rf"{FILE}: is no file, or a link to none"),
    "a directory": (instead(Path.mkdir), rf"{FILE}: is no file, or a link to none"),
    "a pipe": (instead(os.mkfifo), rf"{FILE}: is no file, or a link to none"),
    "nothing": (instead(Path.touch), r"is corrupt or cut short \(0 bytes\)"),
    "a header of 2^40 bytes": (
        instead(lambda path: path.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")),
        "corrupt or",
    ),
    "an index that is a list": (
        instead(lambda path: path.write_text("[]"), INDEX),
        f"{INDEX}: does not hold a JSON ob",
    ),
    "a list for a map": (
        instead(lambda path: path.write_text('{"weight_map": []}'), INDEX),
        rf"{INDEX}: weight_map is \[\]; it must be an object",
    ),
    "lists in a map": (
        instead(lambda path: path.write_text('{"weight_map": {"x": []}}'), INDEX),
        f"{INDEX}: names a file outside the checkpoint",
    ),
    "a deep index": (instead(lambda path: path.write_text(DEEP), INDEX), f"{INDEX}: is nested too deeply"),
    "a name that no file has": (
        instead(lambda path: path.write_text(json.dumps({"weight_map": {"x": "y" * 9999}})), INDEX),
        "is missing",
    ),
    "a config that is a directory": (instead(Path.mkdir, "config.json"), r"config\.json: is no file"),
    "a config that is a pipe": (instead(os.mkfifo, "config.json"), r"config\.json: is no file"),
    "an empty config": (instead(Path.touch, "config.json"), r"config\.json: cannot be read as JSON"),
    "a config in Latin-1": (
        instead(lambda path: path.write_bytes(b'{"\xe9": 1}'), "config.json"),
        r"config\.json: cannot be read as JSON \(UnicodeDecodeError\)",
    ),
    "a number of 5000 digits": (
        instead(lambda path: path.write_text('{"vocab_size": ' + "9" * 5000 + "}"), "config.json"),
        r"config\.json: cannot be read as JSON \(ValueError\)",
    ),
    "a config without end": (
        instead(endless, "config.json"),
        r"config\.json: has 1099511627776 bytes; at most",
    ),
    "deep defaults": (
        instead(lambda path: path.write_text(DEEP), "generation_config.json"),
        r"generation_config\.json: is nested too deeply",
    ),
}


@pytest.mark.parametrize("name", list(NO_FILES))
def test_what_is_no_file_of_its_kind_is_named(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape())
    fault, said = NO_FILES[name]
    fault(tmp_path)
    with pytest.raises(ServiceError, match=said) as caught:
        load(tmp_path)
    assert "\n" not in caught.value.message


def test_finite_weights_that_give_no_numbers_end_the_start(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape())
    change(tmp_path, lambda found: [one.mul_(1e30) for one in found.values()])
    with pytest.raises(ServiceError, match="the first tokens have no finite logits: weights are too large") as caught:
        make_engine(tmp_path, ROOMY)
    assert caught.value.reason == "MODEL_INVALID"


def test_the_token_that_a_service_begins_with_is_tried(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape())
    change(tmp_path, lambda found: found["model.embed_tokens.weight"][2].fill_(3e38))  # of the end of a sequence
    with pytest.raises(ServiceError, match="the first tokens have no finite logits"):
        make_engine(tmp_path, ROOMY)


@pytest.mark.parametrize("spoil", [float("nan"), 1e30])
def test_a_draft_is_looked_at_as_the_model_is(spoil: float, tmp_path: Path) -> None:
    target, draft = make_checkpoint(tmp_path / "target", Shape(layers=3)), make_checkpoint(tmp_path / "draft", Shape())
    change(draft, lambda found: [one.mul_(spoil) for one in found.values()])
    config = read_config(target)
    with pytest.raises(ServiceError, match=f"{draft}.*(holds nan at|no finite logits)"):
        build_engine(ROOMY, config, target, limits_of(ROOMY, config, 1 << 20), draft)


@pytest.mark.parametrize("value", [-1, 111, 1 << 62])
def test_a_head_proposes_ids_that_there_are(value: int, tmp_path: Path) -> None:
    shape, head = Shape(layers=4), tmp_path / "head"
    target = make_checkpoint(tmp_path / "target", shape)
    head.mkdir()
    make_head(head, shape, 50)
    change(head, lambda found: found["d2t"].__setitem__(0, value))
    model = load_model(target, read_config(target), torch.float32, CPU)
    with pytest.raises(ServiceError, match="tensor d2t does not name 50 different ids from 0 to 110"):
        load_head(head, model, 64, PLAIN)


def test_tables_that_a_machine_has_no_room_for_name_the_flag(tmp_path: Path) -> None:
    config = read_config(make_checkpoint(tmp_path, Shape(context=1 << 20)))
    limits = limits_of(ROOMY, config, 1 << 20)
    check_tables(config, limits, 1 << 30)
    with pytest.raises(
        ServiceError, match=r"--max-model-len: 1048576 positions .* need rotary tables of 64 MiB; .* 32"
    ):
        check_tables(config, limits, 128 << 20)
