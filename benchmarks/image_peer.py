"""Pictures a second beside vLLM's server: the same checkpoint, requests and client, each server in turn.

Every request is a chat over HTTP with a picture that no other has, in a closed loop, and its ids are asked for: greedy
ids must be equal. A part of `benchmarks.images`; vLLM is installed as `benchmarks/cpu/README.md` says.
"""

import argparse
import base64
import contextlib
import http.client
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import safetensors.torch

from benchmarks.cpu.servers import MAX_STREAMS, VENVS, Server, at_rest, free_port, tcmalloc
from benchmarks.cpu.shapes import CACHE
from benchmarks.machine import median
from tests.oracle.vision_checkpoints import PLACE, TEMPLATE
from tests.system.service import serve

CLIENTS = 8
REQUESTS = 192  # of a round: while it begins and ends, fewer than all clients are served
NUM_TOKENS = 16
LOG = "vllm_pictures.log"
TOWER = "vision_tower."  # how the names of its tensors begin
SCRIPT = Path(__file__).parent / "cpu" / "peers" / "vllm_pictures_server.py"
# Files that vLLM reads beside ours.
FILES = {
    "tokenizer_config.json": {
        **{"tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "LlavaProcessor", "image_token": PLACE},
        **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"},
        **{"add_bos_token": False, "chat_template": TEMPLATE},
    },
    "processor_config.json": {
        **{"processor_class": "LlavaProcessor", "image_token": PLACE},
        **{"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    },
}
Answers = dict[int, list[int]]  # ids by request
Ask = Callable[[bytes], list[int]]


def request(data: bytes, number: int) -> bytes:
    """The body of a chat."""
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": f"What is number {number}?"}]
    asked = {"model": "bench", "messages": [{"role": "user", "content": parts}], "return_token_ids": True}
    return json.dumps({**asked, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}).encode()


@contextlib.contextmanager
def asking(port: int) -> Iterator[Ask]:
    """A connection that is kept."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)

    def ask(body: bytes) -> list[int]:
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise ConnectionError(text[:500])
        ids: list[int] = json.loads(text)["choices"][0]["token_ids"]
        return ids

    try:
        yield ask
    finally:
        connection.close()


def rate(port: int, bodies: dict[int, bytes]) -> tuple[float, Answers]:
    """Answers a second with eight clients, and the answers."""
    waiting, found = iter(list(bodies.items())), Answers()

    def repeat(_: int) -> None:
        with asking(port) as ask:
            for number, body in waiting:  # a list's iterator is shared by threads
                found[number] = ask(body)

    with ThreadPoolExecutor(CLIENTS) as threads:
        start = time.perf_counter()
        list(threads.map(repeat, range(CLIENTS)))
        return len(found) / (time.perf_counter() - start), found


def publish(path: Path, patch_size: int) -> None:
    """Gives a LLaVA's files the form of those that are published, which both servers read."""
    for name, fields in FILES.items():
        (path / name).write_text(json.dumps({**fields, "patch_size": patch_size}))
    file = path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    named = {f"{TOWER}vision_model.{name.removeprefix(TOWER)}": one for name, one in tensors.items() if TOWER in name}
    others = {name: one for name, one in tensors.items() if TOWER not in name}
    safetensors.torch.save_file({**others, **named}, file, {"format": "pt"})


@contextlib.contextmanager
def peer(path: Path, threads: int) -> Iterator[tuple[Server, int] | None]:
    """vLLM's server of a checkpoint, stopped while it is not measured, and its port; None if it is not installed."""
    python = VENVS / "vllm" / "bin" / "python"
    if not python.exists():
        print(f"vLLM: not installed in {VENVS}", flush=True)
        yield None
        return
    port = free_port()
    line = [str(python), str(SCRIPT), "--model", str(path), "--served-model-name", "bench", "--dtype", "float32"]
    line += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024", "--block-size", "128"]
    line += [
        "--max-num-seqs",
        str(MAX_STREAMS),
        "--disable-uvicorn-access-log",
        "--limit-mm-per-prompt",
        '{"image": 1}',
    ]
    cores = "0" if threads == 1 else f"0-{threads - 1}"
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment.pop("PYTHONPATH", None)
    environment |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": cores}
    if (library := tcmalloc()) is not None:
        environment["LD_PRELOAD"] = str(library)
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / LOG).open("w") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log, text=True, env=environment, start_new_session=True)
    server = Server(
        f"vLLM float32, {threads} threads", process, lambda streams, requests, seed: {}, {}, rests=True, port=port
    )
    try:
        at_rest(server, CACHE / LOG)
        yield server, port
    finally:
        server.stop()


def cpu_s(pid: int) -> float:
    """Seconds of processor time of a process and those below it."""
    root = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:2]) for one in (root, *root.children(recursive=True)))


def beside_peer(
    path: Path, options: argparse.Namespace, picture: Callable[[int], bytes], serve_options: tuple[str, ...]
) -> dict[str, object]:
    """Pictures a second of both, and their ratio in each round."""
    publish(path, json.loads((path / "config.json").read_text())["vision_config"]["patch_size"])
    rates: dict[str, list[float]] = {"here": [], "peer": []}
    took: dict[str, list[float]] = {"here": [], "peer": []}
    differing, numbers = 0, itertools.count(10_000)
    line = ("--model", str(path), "--served-model-name", "bench", "--http", "127.0.0.1:0", *serve_options)
    # Of two cores one computes small pictures, and the other prepares them. Nobody reads streams meanwhile, so that
    # encoding may take its time.
    own_options = ("--threads", str(options.threads), "--encoder-share", str(options.peer_share))
    with peer(path, options.processes) as other, serve(*line, *own_options) as service:
        own = int(service.http.rpartition(":")[2])
        if other is None:
            return {}
        server, port = other
        sides = {"here": (own, service.process.pid), "peer": (port, server.process.pid)}
        for at in range(-1, options.rounds):
            bodies = {number: request(picture(number), number) for number in itertools.islice(numbers, REQUESTS)}
            given: list[Answers] = []
            for side in ("here", "peer") if at % 2 else ("peer", "here"):
                asked, pid = sides[side]
                with server.awake() if side == "peer" else contextlib.nullcontext():
                    before = cpu_s(pid)
                    found, ids = rate(asked, bodies)
                    spent = cpu_s(pid) - before
                given.append(ids)
                if at >= 0:  # the first round starts processes
                    rates[side].append(found)
                    took[side].append(spent / len(bodies))
            differing += sum(given[0][number] != given[1][number] for number in bodies)
    both = zip(rates["here"], rates["peer"], strict=True)
    return {
        "peer": server.name,
        "clients": CLIENTS,
        "pictures_per_second": median(rates["here"]),
        "pictures_per_second_peer": median(rates["peer"]),
        "over_peer": median([one / other for one, other in both]),
        "cpu_ms_a_picture": median(took["here"]) * 1e3,
        "cpu_ms_a_picture_peer": median(took["peer"]) * 1e3,
        "differing_answers": differing,
        "answers": REQUESTS * (options.rounds + 1),
    }
