"""What llama.cpp makes of a GGUF file: ids of texts, logits of windows, and greedy ids behind a prompt.

Runs in the peer's own environment: python llama_logits_worker.py GGUF_FILE OUT.npz, with the task on standard input:
{"texts": [...], "windows": [[ids]], "prompt": [ids], "num": n}.
"""

import json
import sys

import numpy as np
from llama_cpp import Llama


def main() -> None:
    task = json.load(sys.stdin)
    size = max([len(ids) for ids in task["windows"]] + [len(task["prompt"]) + task["num"], 8])
    options = {"n_ctx": size, "n_batch": size, "logits_all": True, "verbose": False, "n_threads": 2}
    model = Llama(sys.argv[1], **options, type_k=0, type_v=0)  # a cache in F32, as ours
    found = {"texts": [model.tokenize(text.encode(), add_bos=True, special=True) for text in task["texts"]]}
    logits = []
    for ids in task["windows"]:
        model.reset()
        model.eval(ids)
        logits.append(np.array(model.scores[: len(ids)], dtype=np.float32))
    model.reset()
    model.eval(task["prompt"])
    greedy = []
    for _ in range(task["num"]):
        greedy.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(greedy[-1:])
    found["greedy"] = greedy
    np.savez(sys.argv[2], logits=np.stack(logits), found=json.dumps(found))


if __name__ == "__main__":
    main()
