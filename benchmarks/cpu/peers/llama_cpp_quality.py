"""llama.cpp's predictions in formats that its own library makes, compared with a reference.

Runs in the peer's own environment, from the root of the repository: python -m benchmarks.cpu.peers.llama_cpp_quality
FOLDER IDS_JSON REFERENCE_NPY FORMATS. FOLDER is a Hugging Face folder of a Llama; answers one JSON line a format.
"""

import ctypes
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import llama_cpp as lc
import numpy as np

from benchmarks.cpu.divergence import compare

THREADS = int(os.environ.get("BENCH_THREADS", "2"))
FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7}  # llama_ftype
F32 = 0  # ggml_type
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and float32 values of the safetensors file, whose header is JSON."""
    data = np.memmap(folder / "model.safetensors", mode="r", dtype=np.uint8)
    size = int(data[:8].view(np.uint64)[0])
    header = json.loads(data[8 : 8 + size].tobytes())
    for name, about in header.items():
        if name != "__metadata__":
            first, last = about["data_offsets"]
            yield name, data[8 + size + first : 8 + size + last].view(np.float32).reshape(about["shape"])


def write_gguf(folder: Path, path: Path) -> None:
    """Writes the model in float32."""
    shape = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), "llama")
    heads = {"attn_q": shape["num_attention_heads"], "attn_k": shape["num_key_value_heads"]}
    dim = shape["hidden_size"] // shape["num_attention_heads"]
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(heads["attn_q"])
    writer.add_head_count_kv(heads["attn_k"])
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, tensor in tensors(folder):
        if name in outside:
            writer.add_tensor(outside[name], tensor)
            continue
        _, _, index, what = name.removesuffix(".weight").split(".", 3)
        if NAMES[what] in heads:  # the halves of rotated heads are interleaved
            tensor = tensor.reshape(heads[NAMES[what]], 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"blk.{index}.{NAMES[what]}.weight", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(plain: Path, form: str, to: Path) -> None:
    params = lc.llama_model_quantize_default_params()
    params.ftype, params.nthread = FILE_TYPES[form], THREADS
    failed = lc.llama_model_quantize(str(plain).encode(), str(to).encode(), ctypes.byref(params))
    assert not failed, failed


def logits(path: Path, windows: list, vocab: int) -> Iterator[np.ndarray]:
    """float32 [window, vocabulary] of each window."""
    params = lc.llama_model_default_params()
    params.use_extra_bufts = False  # its own layouts of rounded weights compute the same, and crash with AMX
    model = lc.llama_model_load_from_file(str(path).encode(), params)
    assert model, path
    size = len(windows[0])
    about = lc.llama_context_default_params()
    about.n_ctx, about.n_batch, about.n_ubatch, about.n_seq_max = size, size, size, 1
    about.n_threads = about.n_threads_batch = THREADS
    about.type_k = about.type_v = F32
    batch = lc.llama_batch_init(size, 0, 1)
    for ids in windows:
        context = lc.llama_init_from_model(model, about)
        batch.n_tokens = size
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, True
        assert not lc.llama_decode(context, batch)
        yield np.ctypeslib.as_array(lc.llama_get_logits(context), (size, vocab)).copy()
        lc.llama_free(context)
    lc.llama_batch_free(batch)
    lc.llama_model_free(model)


def main() -> None:
    folder, windows = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    reference = np.load(sys.argv[3], mmap_mode="r")
    silent = lc.llama_log_callback(lambda *_: None)  # must outlive the library's use of it
    lc.llama_log_set(silent, ctypes.c_void_p(0))
    lc.llama_backend_init()
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch, "f32.gguf")
        write_gguf(folder, plain)
        for form in sys.argv[4].split(","):
            path = plain if form == "f32" else Path(scratch, f"{form}.gguf")
            if form != "f32":
                quantise(plain, form, path)
            found = compare(windows, logits(path, windows, reference.shape[2]), reference)
            print(json.dumps({"format": form, **dataclasses.asdict(found)}), flush=True)


if __name__ == "__main__":
    main()
