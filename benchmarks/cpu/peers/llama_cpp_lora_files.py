"""Writes what llama.cpp's server reads of a shape with adapters: the model with a vocabulary, and the adapters.

Runs in the peer's own environment: python llama_cpp_lora_files.py CONFIG_JSON FOLDER NUM RANK. In FOLDER come base.gguf
and 0.gguf, 1.gguf, …: random weights in float32, adapters on all projections.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from llama_cpp_worker import describe

SPECIAL = ("<unk>", "<s>", "</s>")


def matrices(shape: dict) -> Iterator[tuple[str, int, int]]:
    """Name, rows and columns of each projection."""
    hidden, size, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    for i in range(shape["num_hidden_layers"]):
        yield f"blk.{i}.attn_q.weight", queries, hidden
        yield f"blk.{i}.attn_k.weight", keys, hidden
        yield f"blk.{i}.attn_v.weight", keys, hidden
        yield f"blk.{i}.attn_output.weight", hidden, queries
        yield f"blk.{i}.ffn_gate.weight", size, hidden
        yield f"blk.{i}.ffn_up.weight", size, hidden
        yield f"blk.{i}.ffn_down.weight", hidden, size


def write_base(shape: dict, path: Path) -> None:
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(str(path), shape["model_type"])
    describe(writer, shape)
    num = shape["vocab_size"]
    names = [*SPECIAL, *(f"t{i}" for i in range(len(SPECIAL), num))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([0.0] * num)
    writer.add_token_types([2, 3, 3, *([1] * (num - len(SPECIAL)))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(name, rng.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5))

    matrix("token_embd.weight", num, shape["hidden_size"])
    matrix("output.weight", num, shape["hidden_size"])
    writer.add_tensor("output_norm.weight", np.ones(shape["hidden_size"], np.float32))
    for i in range(shape["num_hidden_layers"]):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(shape["hidden_size"], np.float32))
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", np.ones(shape["hidden_size"], np.float32))
    for one in matrices(shape):
        matrix(*one)
    _finish(writer)


def write_adapter(shape: dict, path: Path, rank: int, seed: int) -> None:
    rng, writer = np.random.default_rng(seed), gguf.GGUFWriter(str(path), shape["model_type"])
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for name, rows, columns in matrices(shape):
        writer.add_tensor(f"{name}.lora_a", rng.standard_normal((rank, columns), np.float32) * np.float32(0.02))
        writer.add_tensor(f"{name}.lora_b", rng.standard_normal((rows, rank), np.float32) * np.float32(0.02))
    _finish(writer)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    shape, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    write_base(shape, folder / "base.gguf")
    for index in range(int(sys.argv[3])):
        write_adapter(shape, folder / f"{index}.gguf", int(sys.argv[4]), index + 1)


if __name__ == "__main__":
    main()
