"""The Hugging Face folder that is written for a GGUF file: `transformers` reads the converted checkpoint back."""

import dataclasses
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sluice_server.services.checkpoint.gguf.importing import import_gguf
from sluice_server.services.cli.main import app
from tests.oracle.checkpoints import make_checkpoint, reference
from tests.oracle.gguf_files import write_gguf
from tests.services.checkpoint.gguf.test_gguf_models import SHAPES, some_ids


@pytest.mark.parametrize("name", list(SHAPES))
def test_transformers_reads_the_converted_checkpoint_back(name: str, tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "folder"
    make_checkpoint(source, SHAPES[name])
    num = import_gguf(write_gguf(source, tmp_path / "x.gguf"), folder, torch.float32)
    one, other, ids = reference(source), reference(folder), some_ids(SHAPES[name].vocab)
    assert type(one).__name__.replace("Mistral", "Llama") == type(other).__name__
    assert num == one.num_parameters() == other.num_parameters()
    with torch.inference_mode():
        want, got = one(ids[None]).logits, other(ids[None]).logits
    assert float((want - got).abs().max()) < 1e-4


def test_shards_hold_every_tensor_once(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", SHAPES["llama"])
    path = write_gguf(tmp_path / "source", tmp_path / "x.gguf")
    import_gguf(path, tmp_path / "folder", torch.bfloat16, max_shard_bytes=20_000)
    assert len(list((tmp_path / "folder").glob("model-*-of-*.safetensors"))) > 2
    want, got = reference(tmp_path / "source").state_dict(), reference(tmp_path / "folder").state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name].bfloat16().float(), got[name]) for name in want)


def test_the_command_writes_a_folder_and_refuses_a_full_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", dataclasses.replace(SHAPES["llama"], layers=1))
    path = write_gguf(tmp_path / "source", tmp_path / "x.gguf", "BF16")
    command = ["import-gguf", str(path), str(tmp_path / "folder"), "--dtype", "bfloat16"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "parameters in bfloat16" in done.output
    again = CliRunner().invoke(app, command)
    assert again.exit_code != 0 and "is not empty" in str(again.exception)
    assert "is not one of float32, bfloat16" in str(CliRunner().invoke(app, [*command[:-1], "int4"]).exception)
