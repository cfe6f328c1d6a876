"""vLLM's decode step and prefill, its engine in this process; answers one JSON line for each it reads.

Runs in the peer's own environment: python vllm_worker.py CHECKPOINT DTYPE. With BENCH_RANKS the model is over so many
processes of one thread each, beside this one, which only hands them work.
"""

import json
import os
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

THREADS = int(os.environ.get("BENCH_THREADS", "2"))
RANKS = int(os.environ.get("BENCH_RANKS", "1"))
OF_RANKS = "|".join(map(str, range(RANKS)))
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = OF_RANKS if THREADS == 1 or RANKS > 1 else f"0-{THREADS - 1}"
CLOCK = time.process_time if os.environ.get("BENCH_CLOCK") == "cpu" else time.perf_counter
PROMPT = 128


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is not an answer
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        dtype=sys.argv[2],
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        tensor_parallel_size=RANKS,
        distributed_executor_backend="mp" if RANKS > 1 else None,
    )
    engine = llm.llm_engine
    counter = 0

    def run(num: int, prompt: int, steps: int) -> list:
        nonlocal counter
        params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True, detokenize=False)
        for i in range(num):
            counter += 1
            ids = [(counter * 131 + at * 7 + i) % 1000 + 3 for at in range(prompt)]
            engine.add_request(str(counter), {"prompt_token_ids": ids}, params)
        took = []
        while engine.has_unfinished_requests():
            start = CLOCK()
            engine.step()
            took.append(CLOCK() - start)
        return took

    run(2, PROMPT, 4)
    print(json.dumps({"ready": True, "about": os.environ.get("OMP_NUM_THREADS", "")}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["what"] == "prefill":
            took = [sum(run(1, 512, 1))]
        else:
            took = run(asked["batch"], PROMPT, asked["steps"] + 2)[2:]  # the first computes prompts
        print(json.dumps({"seconds": took}), file=answers, flush=True)


if __name__ == "__main__":
    main()
