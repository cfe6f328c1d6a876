"""vLLM's vectors of texts, its engine in this process; answers one JSON line for each it reads.

Runs in the peer's own environment: python vllm_pooling_worker.py CHECKPOINT DTYPE. Reads {"texts": [[id, …], …]}, and
answers with the seconds that it took and the first vector.
"""

import json
import os
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
THREADS = int(os.environ.get("BENCH_THREADS", "1"))
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0" if THREADS == 1 else f"0-{THREADS - 1}"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is not an answer
    from vllm import LLM

    llm = LLM(
        sys.argv[1],
        dtype=sys.argv[2],
        runner="pooling",
        max_model_len=512,
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
    )
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": ids} for ids in json.loads(line)["texts"]]
        start = time.perf_counter()
        found = llm.encode(prompts, pooling_task="embed", use_tqdm=False)
        took = time.perf_counter() - start
        assert len(found) == len(prompts)
        print(json.dumps({"seconds": took, "first": found[0].outputs.data.tolist()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
