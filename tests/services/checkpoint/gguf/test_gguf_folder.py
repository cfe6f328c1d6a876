"""The directory that is made for a GGUF file: its files, its names, and what is refused."""

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.gguf.reader import read_header
from sluice_server.engine.models.registry import read_served
from sluice_server.services.checkpoint import digests
from sluice_server.services.checkpoint.gguf.configuration import make_configuration
from sluice_server.services.checkpoint.gguf.folder import open_folder
from sluice_server.services.checkpoint.model_source import CheckpointFiles, resolve_draft, resolve_model
from tests.oracle import gguf_files
from tests.oracle.gguf_files import Vocabulary, plain, write_gguf


def test_a_directory_is_made_once_for_a_file(file: Path, cache: Path) -> None:
    folder = open_folder(file)
    assert folder.parent == cache and open_folder(file) == folder
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.gguf"}
    assert (folder / "model.gguf").resolve() == file
    assert cache.stat().st_mode & 0o077 == 0
    assert [path.name for path in cache.iterdir()] == [folder.name]  # nothing half made is left


def test_a_file_that_is_replaced_gets_another_directory(file: Path, checkpoint: Path) -> None:
    source = resolve_model(str(file), "")
    before = CheckpointFiles(source, digests.Remembered(None))
    served = CheckpointFiles(source, digests.Remembered(None), with_weights=True).named()
    other = file.with_name("other")
    write_gguf(checkpoint, other, "Q8_0", more={"*.context_length": 128})
    os.replace(other, file)
    assert before.is_changed()
    after = CheckpointFiles(source, digests.Remembered(None), with_weights=True).named()
    assert after.revision != served.revision
    assert read_served(source.directory).context_length == 128


def test_a_revision_names_weights_and_configuration_wherever_the_file_lies(
    file: Path, checkpoint: Path, tmp_path: Path
) -> None:
    def revision(path: Path) -> str:
        return (
            CheckpointFiles(resolve_model(str(path), ""), digests.Remembered(None), with_weights=True).named().revision
        )

    copy = tmp_path / "elsewhere.gguf"
    copy.write_bytes(file.read_bytes())
    assert revision(copy) == revision(file)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    configuration, _, weights = revision(file).partition("-")
    assert revision(copy).startswith(f"{configuration}-") and not revision(copy).endswith(weights)


def test_a_model_is_named_after_its_file(file: Path, tmp_path: Path) -> None:
    assert resolve_model(str(file), "").name == "Tiny-Q8_0"
    assert resolve_model(str(tmp_path), "").path == file
    assert resolve_draft(str(file), "draft").directory == open_folder(file)
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"images")
    assert resolve_model(str(tmp_path), "").path == file
    (tmp_path / "Tiny-Q4_0.gguf").write_bytes(b"another")
    with pytest.raises(ServiceError, match=r"there are 2 GGUF files; name one of: Tiny-Q4_0\.gguf, Tiny-Q8_0\.gguf"):
        resolve_model(str(tmp_path), "")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path), "").path == tmp_path
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ServiceError, match=r"is a file; give the checkpoint's directory, or a GGUF file"):
        resolve_model(str(tmp_path / "notes.txt"), "")


def test_shards_are_one_model(checkpoint: Path, tmp_path: Path) -> None:
    whole = write_gguf(checkpoint, tmp_path / "whole", "F32")
    tensors = list(gguf.GGUFReader(whole).tensors)
    for number, part in enumerate((tensors[:5], tensors[5:]), 1):
        path = tmp_path / f"big-0000{number}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        if number == 1:
            _copy(writer, whole)
        for one in part:
            writer.add_tensor(one.name, np.array(one.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    source = resolve_model(str(tmp_path / "big-00001-of-00002.gguf"), "")
    assert source.name == "big"
    links = sorted(path.name for path in source.directory.glob("*.gguf"))
    assert links == ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"]
    assert read_served(source.directory).tied_embeddings is False
    with pytest.raises(ServiceError, match=r"is shard 2; give the first one, big-00001-of-00002\.gguf"):
        open_folder(tmp_path / "big-00002-of-00002.gguf")
    (tmp_path / "big-00002-of-00002.gguf").unlink()
    with pytest.raises(ServiceError, match=r"big-00002-of-00002\.gguf: is missing; there are 2 shards"):
        open_folder(tmp_path / "big-00001-of-00002.gguf")


def _copy(writer: gguf.GGUFWriter, path: Path) -> None:
    for name, field in gguf.GGUFReader(path).fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], *field.types[1:2])


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "no architecture of ours": ({"general.architecture": "mamba"}, "general.architecture 'mamba' is not supported; "),
    "no width": ({"*.embedding_length": None}, "llama.embedding_length is missing; it must be a whole number"),
    "no heads": ({"*.attention.head_count": 0}, "llama.attention.head_count is 0; it must be above 0"),
    "heads in words": ({"*.attention.head_count": "four"}, "head_count is 'four'; it must be a whole number"),
    "a part of the head rotated": ({"*.rope.dimension_count": 4}, "llama.rope.dimension_count is 4; it must be 8"),
    "values of another size": ({"*.attention.value_length": 16}, "llama.attention.value_length is 16; it must be 8"),
    "many layers": ({"*.block_count": 1 << 31}, "config.json: num_hidden_layers is 2147483648"),
    "longrope": ({"*.rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope' is not supported; "),
    "bos outside": ({"tokenizer.ggml.bos_token_id": 64}, "tokenizer.ggml.bos_token_id is 64; it must be from 0 to 63"),
    "eos outside": ({"tokenizer.ggml.eos_token_id": 64}, "eos_token_id"),
    "another tokenizer": (
        {"tokenizer.ggml.model": "bert"},
        "tokenizer.ggml.model 'bert' is not supported; supported are",
    ),
    "unknown splitting": (
        {"tokenizer.ggml.pre": "odd"},
        "tokenizer.ggml.pre 'odd' is not supported; supported are def",
    ),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_what_is_missing_or_unknown_is_refused_by_name(
    name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, message = CHANGES[name]
    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", _replacing(changes))
    path = write_gguf(checkpoint, tmp_path / "x.gguf", more={k: v for k, v in changes.items() if k.startswith("*")})
    with pytest.raises(ServiceError, match=message) as caught:
        open_folder(path)
    assert caught.value.message.startswith(f"{path}: ") and "\n" not in caught.value.message


def _replacing(changes: dict[str, Any]) -> Any:  # noqa: ANN401 # a method of the package
    add = gguf.GGUFWriter.add_key_value

    def replaced(self: gguf.GGUFWriter, key: str, value: object, *more: Any, **named: Any) -> None:  # noqa: ANN401
        add(self, key, changes.get(key, value), *more, **named)

    return replaced


VOCABULARIES: dict[str, tuple[Vocabulary, str]] = {
    "a token twice": (Vocabulary(tokens=("a",) * 64, types=(1,) * 64, merges=("a a",)), "has 'a' twice, as 0 and as 1"),
    "a merge of no tokens": (
        Vocabulary(tokens=plain(64).tokens, types=plain(64).types, merges=("a z",)),
        "element 0, is 'a z': it is not of two tokens that make one",
    ),
    "scores of too few": (
        Vocabulary(model="llama", tokens=plain(64).tokens, types=plain(64).types, scores=(0.0,)),
        "hold 1 scores and 64 types for 64 tokens",
    ),
    "no token": (Vocabulary(tokens=(), types=(), merges=("a a",)), "tokenizer.ggml.tokens is missing"),
    "an unknown token outside": (
        Vocabulary("llama", "", plain(64).tokens, (1,) * 64, (), (0.0,) * 64, (("unknown_token_id", 64),)),
        "tokenizer.ggml.unknown_token_id is 64; it must be from 0 to 63",
    ),
    "a long piece": (
        Vocabulary(model="llama", tokens=("x" * 200, *plain(63).tokens), types=(1,) * 64, scores=(0.0,) * 64),
        "which has 200 characters; at most 128 are merged",
    ),
}


@pytest.mark.parametrize("name", list(VOCABULARIES))
def test_a_vocabulary_that_is_none_is_refused(name: str, checkpoint: Path, tmp_path: Path) -> None:
    vocabulary, message = VOCABULARIES[name]
    path = write_gguf(checkpoint, tmp_path / "x.gguf", vocabulary=vocabulary)
    with pytest.raises(ServiceError, match=message):
        open_folder(path)


FACTORS: dict[str, tuple[list[float], dict[str, Any], str]] = {
    "of another number": ([1.0], {}, r"tensor rope_freqs\.weight must hold 4 numbers from 1 to 1000000"),
    "below 1": ([1.0, 1.0, 0.5, 2.0], {}, "must hold 4 numbers from 1 to 1000000"),
    "not finite": ([1.0, 1.0, 1.0, float("nan")], {}, "must hold 4 numbers from 1 to 1000000"),
    "of another kind": ([1.0, 7.0, 2.0, 8.0], {}, r"rope_freqs\.weight, which is not Llama 3's, is not supported"),
    "beside a scaling": ([1.0, 1.0, 1.0, 8.0], {"*.rope.scaling.type": "linear"}, r"linear scaling beside rope_freqs"),
    "on a base of 0": (
        [1.0, 1.0, 1.0, 8.0],
        {"*.rope.freq_base": 0.0},
        "llama.rope.freq_base is 0.0; it must be above 1",
    ),
    "on a base below 0": ([1.0, 2.0, 4.0, 8.0], {"*.rope.freq_base": -3.0}, "freq_base is -3.0; it must be above 1"),
}


@pytest.mark.parametrize("name", list(FACTORS))
def test_factors_of_frequencies_that_are_none_are_refused(
    name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors, more, message = FACTORS[name]
    monkeypatch.setattr(gguf_files, "_factors", lambda config: np.array(factors, dtype=np.float32))
    path = write_gguf(checkpoint, tmp_path / "x.gguf", more=more)
    with pytest.raises(ServiceError, match=message):
        open_folder(path)


def test_no_damage_of_the_metadata_is_more_than_an_error(file: Path, tmp_path: Path) -> None:
    whole, rng, path, refused = file.read_bytes(), random.Random(2), tmp_path / "damaged.gguf", 0
    start = min(one.start for one in read_header(file).tensors.values())
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 2, 4))):
            at = rng.randrange(24, start)
            data[at : at + 1] = rng.choice((bytes([rng.randrange(256)]), struct.pack("<B", rng.choice((0, 255)))))
        path.write_bytes(data)
        try:
            make_configuration(read_header(path))
        except ServiceError as error:
            refused += 1
            assert error.reason in ("MODEL_INVALID", "FEATURE_UNSUPPORTED") and "\n" not in error.message
    assert 500 < refused < 1500


def test_sampling_parameters_and_ends_are_those_of_the_file(checkpoint: Path, tmp_path: Path) -> None:
    tokens = ("<s>", "</s>", "<|im_end|>", *plain(64).tokens[2:-1])
    vocabulary = Vocabulary(
        tokens=tokens,
        types=(3, 3, 3, *[1] * 61),
        merges=("a b",),
        special=(("bos_token_id", 0), ("eos_token_id", 1), ("eot_token_id", 5)),
        template="{{ messages[0].content }}",
    )
    sampling = {"general.sampling.temp": 0.6, "general.sampling.top_p": 0.95, "general.sampling.top_k": 20}
    folder = open_folder(write_gguf(checkpoint, tmp_path / "x.gguf", vocabulary=vocabulary, more=sampling))
    config = read_served(folder)
    assert config.eos_ids == (1, 5, 2)
    assert (config.defaults.temperature, config.defaults.top_p, config.defaults.top_k) == (0.6, 0.95, 20)
    found = json.loads((folder / "tokenizer_config.json").read_text())
    assert found["chat_template"] == "{{ messages[0].content }}" and found["eos_token"] == "</s>"


def test_a_cache_that_cannot_be_written_says_what_to_do(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no").write_text("a file where the folder is to be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no"))
    digests.remembered.cache_clear()
    with pytest.raises(ServiceError, match=r"cannot be written to .*: set XDG_CACHE_HOME, or use sluice import-gguf"):
        open_folder(file)
