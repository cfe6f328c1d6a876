"""llama.cpp's decode step and prefill through its low-level batch API; answers one JSON line for each it reads.

Runs in the peer's own environment: python llama_cpp_worker.py CONFIG_JSON FORMAT GGUF_FILE. The GGUF file is written
when it is missing: random weights of the shape in config.json, FORMAT one of f32, bf16, q8_0, q4_0.
"""

import ctypes
import json
import os
import sys
import time
from pathlib import Path

import gguf
import llama_cpp as lc
import numpy as np

PROMPT = 128
CONTEXT = 256
THREADS = int(os.environ.get("BENCH_THREADS", "2"))
CLOCK = time.process_time if os.environ.get("BENCH_CLOCK") == "cpu" else time.perf_counter


def describe(writer: gguf.GGUFWriter, shape: dict) -> None:
    """The shape, in the words of GGUF."""
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def write_gguf(shape: dict, form: str, path: Path) -> None:
    arch, rng = shape["model_type"], np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), arch)
    hidden, size, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    describe(writer, shape)
    kinds = {
        "f32": gguf.GGMLQuantizationType.F32,
        "bf16": gguf.GGMLQuantizationType.BF16,
        "q8_0": gguf.GGMLQuantizationType.Q8_0,
        "q4_0": gguf.GGMLQuantizationType.Q4_0,
    }

    def matrix(name: str, rows: int, columns: int) -> None:
        values = rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(columns**-0.5)
        kind = kinds[form]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def norm(name: str, width: int) -> None:
        writer.add_tensor(name, np.ones(width, dtype=np.float32))

    matrix("token_embd.weight", shape["vocab_size"], hidden)
    norm("output_norm.weight", hidden)
    if not shape["tie_word_embeddings"]:
        matrix("output.weight", shape["vocab_size"], hidden)
    for i in range(shape["num_hidden_layers"]):
        norm(f"blk.{i}.attn_norm.weight", hidden)
        norm(f"blk.{i}.ffn_norm.weight", hidden)
        matrix(f"blk.{i}.attn_q.weight", queries, hidden)
        matrix(f"blk.{i}.attn_k.weight", keys, hidden)
        matrix(f"blk.{i}.attn_v.weight", keys, hidden)
        matrix(f"blk.{i}.attn_output.weight", hidden, queries)
        if arch == "qwen3":
            norm(f"blk.{i}.attn_q_norm.weight", dim)
            norm(f"blk.{i}.attn_k_norm.weight", dim)
        matrix(f"blk.{i}.ffn_gate.weight", size, hidden)
        matrix(f"blk.{i}.ffn_up.weight", size, hidden)
        matrix(f"blk.{i}.ffn_down.weight", hidden, size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Sequences:
    """A context of `num` sequences, each with its prompt computed."""

    def __init__(self, model: object, num: int, vocab: int, context: int = CONTEXT) -> None:
        params = lc.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = num * context, 512, 512
        params.n_seq_max, params.n_threads, params.n_threads_batch = num, THREADS, THREADS
        self._context = lc.llama_init_from_model(model, params)
        self._num, self._vocab = num, vocab
        self._batch = lc.llama_batch_init(512, 0, 1)

    def decode(self, tokens: list, position: int) -> list:
        """One token of every sequence at `position`; the likeliest next."""
        self._fill([(token, position, i, True) for i, token in enumerate(tokens)])
        lc.llama_decode(self._context, self._batch)
        shape = (self._vocab,)
        rows = [np.ctypeslib.as_array(lc.llama_get_logits_ith(self._context, i), shape) for i in range(self._num)]
        return [int(row.argmax()) for row in rows]

    def prompt(self, index: int, num: int) -> None:
        self._fill([(token % 1000 + 3, token, index, token == num - 1) for token in range(num)])
        lc.llama_decode(self._context, self._batch)
        lc.llama_get_logits_ith(self._context, num - 1)

    def _fill(self, rows: list) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted

    def close(self) -> None:
        lc.llama_batch_free(self._batch)
        lc.llama_free(self._context)


def main() -> None:
    shape, form, path = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], Path(sys.argv[3])
    if not path.exists():
        write_gguf(shape, form, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    silent = lc.llama_log_callback(lambda *_: None)  # must outlive the library's use of it
    lc.llama_log_set(silent, ctypes.c_void_p(0))
    lc.llama_backend_init()
    params = lc.llama_model_default_params()
    # With AMX its own layout of rounded weights ends the first decode in a segmentation fault (llama.cpp#20824).
    params.use_extra_bufts = not (form in ("q8_0", "q4_0") and b"AMX_INT8 = 1" in lc.llama_print_system_info())
    model = lc.llama_model_load_from_file(str(path).encode(), params)
    assert model, path
    print(json.dumps({"ready": True, "about": lc.llama_print_system_info().decode()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        num, steps = asked["batch"], asked["steps"]
        if asked["what"] == "prefill":
            sequences = Sequences(model, 1, shape["vocab_size"], 1024)
            start = CLOCK()
            sequences.prompt(0, 512)
            took = [CLOCK() - start]
        else:
            sequences = Sequences(model, num, shape["vocab_size"])
            for i in range(num):
                sequences.prompt(i, PROMPT)
            tokens, took = [5] * num, []
            for i in range(steps):
                start = CLOCK()
                tokens = sequences.decode(tokens, PROMPT + i)
                took.append(CLOCK() - start)
        sequences.close()
        print(json.dumps({"seconds": took}), flush=True)


if __name__ == "__main__":
    main()
