"""vLLM's decode step behind long contexts, and its prefill, its engine in this process; answers one JSON line for each.

Runs in the peer's own environment: python vllm_context_worker.py CHECKPOINT DTYPE LONGEST. Contexts are not computed:
vLLM's own DecodeBenchConnector has the cache filled once, at the start, and says that prompts are there.
"""

import json
import os
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")

THREADS = int(os.environ.get("BENCH_THREADS", "2"))
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0" if THREADS == 1 else f"0-{THREADS - 1}"
CLOCK = time.process_time if os.environ.get("BENCH_CLOCK") == "cpu" else time.perf_counter
ROWS = 8
MARGIN = 256


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is not an answer
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    longest = int(sys.argv[3])
    llm = LLM(
        sys.argv[1],
        dtype=sys.argv[2],
        skip_tokenizer_init=True,
        max_model_len=longest + MARGIN,
        max_num_seqs=ROWS,
        max_num_batched_tokens=4096,
        enable_prefix_caching=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="DecodeBenchConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"startup_fill": True, "fill_mean": 0.0, "fill_std": 1.0},
        ),
    )
    engine = llm.llm_engine
    filling = engine.engine_core.engine_core.scheduler.connector.connector_scheduler
    matched = filling.get_num_new_matched_tokens
    count = 0

    def ids_of(seed: int, num: int) -> list:
        return [(at * 7919 + seed * 131) % 15000 + 3 for at in range(num)]

    def run(prompts: list, steps: int) -> list:
        nonlocal count
        params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True, detokenize=False)
        for ids in prompts:
            count += 1
            engine.add_request(str(count), {"prompt_token_ids": ids}, params)
        took = []
        while engine.has_unfinished_requests():
            start = CLOCK()
            engine.step()
            took.append(CLOCK() - start)
        return took

    run([ids_of(99, 64)] * 2, 4)
    print(json.dumps({"ready": True, "about": f"vLLM {sys.argv[2]}"}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["what"] == "prefill":
            filling.get_num_new_matched_tokens = lambda *_: (0, False)
            took = [sum(run([ids_of(1000 + count, asked["context"])], 1))]
            filling.get_num_new_matched_tokens = matched
        else:
            shared = asked["what"] == "shared"
            prompts = [[*ids_of(0 if shared else row + 1, asked["context"]), row + 3] for row in range(asked["rows"])]
            took = run(prompts, asked["steps"] + 3)[2:-1]
        print(json.dumps({"seconds": took}), file=answers, flush=True)


if __name__ == "__main__":
    main()
