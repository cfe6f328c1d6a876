"""llama.cpp's decode step behind long contexts, and its prefill; answers one JSON line for each it reads.

Runs in the peer's own environment: python llama_cpp_context_worker.py CONFIG_JSON CACHE_TYPE LONGEST GGUF_FILE. Weights
are in F32, flash attention is on, the cache in f16 or q8_0. Contexts are not computed: a short one is, and its saved
state is repeated. Rows with a prefix in common share its cells.
"""

import ctypes
import json
import struct
import sys
from pathlib import Path

import llama_cpp as lc
from llama_cpp_worker import CLOCK, THREADS, write_gguf

ROWS = 8
MARGIN = 256
TYPES = {"f16": 1, "q8_0": 8}  # ggml_type
FLASH_ON = 1  # llama_flash_attn_type
CHUNK = 512
HEAD = 8  # bytes of a state before its streams


class Contexts:
    """A context of llama.cpp with eight sequences, each with cells of its own unless `unified`."""

    def __init__(self, model: object, cache: str, tokens: int, rows: int, unified: bool) -> None:
        params = lc.llama_context_default_params()
        params.n_ctx = tokens if unified else rows * tokens
        params.n_batch = params.n_ubatch = CHUNK
        params.n_seq_max, params.n_threads, params.n_threads_batch = rows, THREADS, THREADS
        params.flash_attn_type, params.kv_unified = FLASH_ON, unified
        params.type_k = params.type_v = TYPES[cache]
        self.context = lc.llama_init_from_model(model, params)
        assert self.context
        self.memory = lc.llama_get_memory(self.context)
        self._batch = lc.llama_batch_init(CHUNK, 0, 1)

    def compute(self, tokens: list, first: int = 0, sequence: int = 0) -> None:
        """A prompt from position `first` on."""
        for at in range(0, len(tokens), CHUNK):
            part = tokens[at : at + CHUNK]
            last = at + len(part) == len(tokens)
            self._decode([(id, first + at + i, sequence, last and i == len(part) - 1) for i, id in enumerate(part)])
        lc.llama_get_logits_ith(self.context, -1)

    def fill(self, num: int, rows: int) -> None:
        """Gives rows `num` tokens each, of which a part is computed."""
        self.compute(prompt(CHUNK, 0))
        state = (ctypes.c_uint8 * lc.llama_state_seq_get_size(self.context, 0))()
        assert lc.llama_state_seq_get_data(self.context, state, len(state), 0) == len(state)
        tiled = tile(bytes(state), num // CHUNK)
        full = (ctypes.c_uint8 * len(tiled)).from_buffer_copy(tiled)
        for row in range(rows):
            assert lc.llama_state_seq_set_data(self.context, full, len(full), row) == len(full)
            assert lc.llama_memory_seq_pos_max(self.memory, row) == num - 1

    def step(self, rows: int, position: int) -> None:
        """A token of each row."""
        self._decode([(5 + row, position, row, True) for row in range(rows)])
        for row in range(rows):
            lc.llama_get_logits_ith(self.context, row)

    def _decode(self, rows: list) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        failed = lc.llama_decode(self.context, batch)
        assert not failed, failed

    def close(self) -> None:
        lc.llama_batch_free(self._batch)
        lc.llama_free(self.context)


class Filled:
    """Contexts of eight rows, each filled with copies of a short one. What is asked for must not become longer."""

    def __init__(self, model: object, cache: str, longest: int) -> None:
        self._contexts = Contexts(model, cache, longest + MARGIN, ROWS, unified=False)
        self._contexts.fill(longest, ROWS)
        self.longest = longest

    def decode(self, context: int, rows: int, steps: int) -> list:
        assert context <= self.longest, "contexts only become shorter"
        self.longest = context
        for row in range(ROWS):
            assert lc.llama_memory_seq_rm(self._contexts.memory, row, context, -1)
        self._contexts.step(rows, context)
        took = timed_steps(self._contexts, rows, context + 1, steps)
        for row in range(ROWS):
            lc.llama_memory_seq_rm(self._contexts.memory, row, context, -1)
        return took

    def close(self) -> None:
        self._contexts.close()


def tile(state: bytes, times: int) -> bytes:
    """The state of a sequence, `times` as long: its keys and values again and again, at positions that go on.

    As this version writes it: magic and version; streams; of each the number of its cells; of the one that has any
    each cell's position and sequences; whether values are transposed, layers; of each layer type, bytes of a cell and
    all cells, keys and then values.
    """
    made, at = bytearray(), 0

    def take(num: int) -> bytes:
        nonlocal at
        at += num
        return state[at - num : at]

    def number(kind: str = "I") -> tuple:
        raw = take(struct.calcsize(kind))
        return struct.unpack(kind, raw)[0], raw

    made += take(HEAD)
    streams, raw = number()
    made += raw
    for _ in range(streams):
        cells, raw = number()
        if not cells:
            made += raw
            continue
        made += struct.pack("I", cells * times)
        about = []
        for i in range(cells):
            position, _ = number("i")
            assert position == i, "the cells are not in order"
            names, raw = number()
            about.append(raw + take(4 * names))
        made += b"".join(struct.pack("i", i) + about[i % cells] for i in range(cells * times))
        transposed, raw = number()
        assert not transposed, "flash attention is off"
        layers, more = number()
        made += raw + more
        for _ in range(2 * layers):
            made += take(4)
            size, raw = number("Q")
            made += raw + take(size * cells) * times
    assert at == len(state), "this version writes another state"
    return bytes(made)


def timed_steps(contexts: Contexts, rows: int, position: int, steps: int) -> list:
    took = []
    for i in range(steps):
        start = CLOCK()
        contexts.step(rows, position + i)
        took.append(CLOCK() - start)
    return took


def prompt(num: int, seed: int) -> list:
    return [(at * 7919 + seed * 131) % 15000 + 3 for at in range(num)]


class Shared:
    """Rows behind one prefix, whose cells are theirs together."""

    def __init__(self, model: object, cache: str, num: int) -> None:
        self._contexts, self._num = Contexts(model, cache, num + ROWS * MARGIN, ROWS, unified=True), num
        self._contexts.fill(num, 1)
        for row in range(1, ROWS):
            lc.llama_memory_seq_cp(self._contexts.memory, 0, row, -1, -1)

    def decode(self, rows: int, steps: int) -> list:
        self._contexts.step(rows, self._num)
        took = timed_steps(self._contexts, rows, self._num + 1, steps)
        for row in range(ROWS):
            lc.llama_memory_seq_rm(self._contexts.memory, row, self._num, -1)
        return took


def main() -> None:
    shape, cache, longest, path = (
        json.loads(Path(sys.argv[1]).read_text()),
        sys.argv[2],
        int(sys.argv[3]),
        Path(sys.argv[4]),
    )
    if not path.exists():
        write_gguf(shape, "f32", path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    silent = lc.llama_log_callback(lambda *_: None)  # must outlive the library's use of it
    lc.llama_log_set(silent, ctypes.c_void_p(0))
    lc.llama_backend_init()
    model = lc.llama_model_load_from_file(str(path).encode(), lc.llama_model_default_params())
    assert model, path
    filled = Filled(model, cache, longest)
    shared: Shared | None = None
    print(json.dumps({"ready": True, "about": lc.llama_print_system_info().decode()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["what"] == "prefill":
            contexts = Contexts(model, cache, asked["context"] + MARGIN, 1, unified=True)
            start = CLOCK()
            contexts.compute(prompt(asked["context"], 2))
            took = [CLOCK() - start]
            contexts.close()
        elif asked["what"] == "shared":
            shared = shared or Shared(model, cache, asked["context"])
            took = shared.decode(asked["rows"], asked["steps"])
        else:
            if filled.longest < asked["context"]:
                filled.close()
                filled = Filled(model, cache, longest)
            took = filled.decode(asked["context"], asked["rows"], asked["steps"])
        print(json.dumps({"seconds": took}), flush=True)


if __name__ == "__main__":
    main()
