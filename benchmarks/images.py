"""Pictures beside streams of text, pictures that come again, and the processes that prepare them.

    python -m benchmarks.images [--rounds 5] [--streams 8] [--rate 8] [--seconds 6] [--share 1]
        [--only streams,again,prepare,peer] [--shape small|base|vit-b] [--threads 1]

Random LLaVAs of two sizes with one engine of one thread, in float32. Streams: the p99 of the time between two messages
of greedy streams of text while new pictures arrive, over that without; rounds take turns with another load, prompts of
as many text tokens, which shows what of it the pictures cost. Again: the time to the first token of a picture that is
new, of the same request once more, and of the picture in another conversation. Prepare: pictures a second that one
process and several decode and resize. Peer: pictures a second of eight clients here and in vLLM's server, in turns,
with equal ids. A busy machine changes from one second to the next: ratios are medians of those within a round.
"""

import argparse
import contextlib
import io
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from PIL import Image
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from benchmarks.image_peer import beside_peer
from benchmarks.machine import end_as_asked, median, save
from sluice_server.engine.config import DEFAULTS
from sluice_server.engine.models.vision.config import read_vision
from sluice_server.services.media.image_workers import ImageWorkers
from sluice_server.services.media.processor import read_processor
from tests.oracle.vision_checkpoints import make_served_llava
from tests.system.service import serve, spec

TEXT = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 704}
_PATCHES = {"patch_size": 14, "num_attention_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {  # of the tower; 64, 256 and 196 tokens a picture
    "small": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "image_size": 112, **_PATCHES},
    "base": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "image_size": 224, **_PATCHES},
    "vit-b": {  # CLIP's ViT-B/16
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224},
        **{"patch_size": 16, "num_attention_heads": 12},
    },
}
SIZE = 640, 480  # of a picture as it is sent
Stub = inference_pb2_grpc.InferenceServiceStub
Ask = Callable[[int], types_pb2.GenerationSpec]


def picture(seed: int) -> bytes:
    """A JPEG unlike any other, with something to see."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    out = io.BytesIO()
    coarse.resize(SIZE, Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def asked(data: bytes, text: str, num: int = 1) -> types_pb2.GenerationSpec:
    """A turn of the user that begins with its text."""
    made = spec("", num)
    made.chat.messages.add(role=types_pb2.ROLE_USER).parts.extend(
        [
            types_pb2.ContentPart(text=text),
            types_pb2.ContentPart(image=types_pb2.Image(data=data)),
            types_pb2.ContentPart(text="What is it?"),
        ]
    )
    return made


def first_token_s(stub: Stub, wanted: types_pb2.GenerationSpec) -> float:
    """The time to the first token."""
    start = time.perf_counter()
    for event in stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=wanted), timeout=120):
        if event.WhichOneof("event") == "delta":
            return time.perf_counter() - start
    raise RuntimeError("no token came")


def streamed(stub: Stub, seed: int, num: int) -> list[float]:
    """The times at which a stream's messages came."""
    prompt = np.random.default_rng(seed).integers(3, 250, 64).tolist()
    events = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec(prompt, num)), timeout=300)
    return [time.perf_counter() for event in events if event.WhichOneof("event") == "delta"]


@contextlib.contextmanager
def arriving(stub: Stub, ask: Ask | None, rate: float) -> Iterator[list[float]]:
    """Sends requests, if any, at a rate until the block ends; the times of those that were answered."""
    is_over, answered, numbers = threading.Event(), list[float](), itertools.count()
    if ask is None:
        yield answered
        return

    def send(number: int) -> None:
        with contextlib.suppress(grpc.RpcError):
            stub.Generate(inference_pb2.GenerateRequest(spec=ask(number)), timeout=120)
            answered.append(time.perf_counter())

    def repeat() -> None:
        with ThreadPoolExecutor(64) as threads:
            due = time.perf_counter()
            while not is_over.wait(max(0.0, due - time.perf_counter())):
                threads.submit(send, next(numbers))
                due += 1 / rate

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield answered
    finally:
        is_over.set()
        thread.join()


def gaps_of(stub: Stub, num: int, seconds: float, ask: Ask | None, rate: float) -> tuple[float, float]:
    """The p99 of the gaps of streams in seconds, and requests answered a second beside them."""
    end = time.perf_counter() + seconds

    def repeat(seed: int) -> list[float]:
        found: list[float] = []
        for again in itertools.count():
            times = streamed(stub, 1000 * seed + again, 128)
            found += [b - a for a, b in itertools.pairwise(times[4:])]
            if time.perf_counter() >= end:
                return found
        raise AssertionError

    with ThreadPoolExecutor(num) as threads, arriving(stub, ask, rate) as done:
        start = time.perf_counter()
        gaps = sorted(gap for own in threads.map(repeat, range(num)) for gap in own)
        took, answered = time.perf_counter() - start, len(done)
    return gaps[int(len(gaps) * 0.99)], answered / took


def beside_streams(path: Path, options: argparse.Namespace) -> dict[str, object]:
    """The ratios of the streams' gaps."""
    make_served_llava(path, context=2048, text=TEXT, vision=SHAPES["small"])
    numbers = itertools.count()
    tokens = (SHAPES["small"]["image_size"] // SHAPES["small"]["patch_size"]) ** 2 + 32

    def text(_: int) -> types_pb2.GenerationSpec:
        return spec(np.random.default_rng(next(numbers)).integers(3, 250, tokens).tolist(), 1)

    num = int((options.rounds + 1) * options.rate * (options.seconds + 2))
    # Made before they are sent: encoding JPEGs takes processors from those who read streams.
    files = itertools.chain([picture(number) for number in range(num)], map(picture, itertools.count(num)))

    def pictures(_: int) -> types_pb2.GenerationSpec:
        return asked(next(files), "Look: ")

    found: dict[str, list[float]] = {"alone": [], "text": [], "pictures": []}
    served = []
    serving = serve("--model", str(path), *_SERVE, "--encoder-share", str(options.share))
    with serving as service, grpc.insecure_channel(service.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        loads: list[tuple[str, Ask | None]] = [("alone", None), ("text", text), ("pictures", pictures)]
        gaps_of(stub, options.streams, 1.0, pictures, options.rate)
        for at in range(options.rounds):
            for name, ask in loads[at % 3 :] + loads[: at % 3]:
                gap, rate = gaps_of(stub, options.streams, options.seconds, ask, options.rate)
                found[name].append(gap)
                if name == "pictures":
                    served.append(rate)
    return {
        "pictures_per_second": options.rate,
        "encoder_share": options.share,
        "served_per_second": median(served),
        **{f"gap_p99_{name}_ms": median(values) * 1e3 for name, values in found.items()},
        "gap_p99_over_alone": median(ratios(found["pictures"], found["alone"])),
        "gap_p99_text_over_alone": median(ratios(found["text"], found["alone"])),
    }


def again(path: Path, options: argparse.Namespace) -> dict[str, object]:
    """The times to the first token."""
    make_served_llava(path, context=2048, text=TEXT, vision=SHAPES["base"])
    times: dict[str, list[float]] = {"first": [], "repeated": [], "elsewhere": []}
    with serve("--model", str(path), *_SERVE) as service, grpc.insecure_channel(service.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        first_token_s(stub, asked(picture(0), "Hello. "))
        for number in range(1, 4 * options.rounds + 1):
            data, words = picture(number), f"Conversation {number}. "
            times["first"].append(first_token_s(stub, asked(data, words)))
            times["repeated"].append(first_token_s(stub, asked(data, words)))
            times["elsewhere"].append(first_token_s(stub, asked(data, f"{number} is another one. ")))
    return {
        **{f"ttft_{name}_ms": median(values) * 1e3 for name, values in times.items()},
        **{
            f"ttft_{name}_over_first": median(ratios(times[name], times["first"])) for name in ("repeated", "elsewhere")
        },
    }


def prepare(path: Path, options: argparse.Namespace) -> dict[str, object]:
    """Pictures a second by processes."""
    make_served_llava(path, vision=SHAPES["base"])
    processor = read_processor(path, read_vision(path).form)
    data = [picture(number) for number in range(32)]
    nums = range(1, options.processes + 1)
    rates: dict[int, list[float]] = {num: [] for num in nums}
    with contextlib.ExitStack() as stack:
        pools = {
            num: (
                stack.enter_context(contextlib.closing(ImageWorkers(processor, num=num))),
                stack.enter_context(ThreadPoolExecutor(num)),  # kept: a process ends with the thread that started it
            )
            for num in nums
        }
        for at in range(-1, options.rounds):
            for num, (pool, threads) in pools.items():
                start = time.perf_counter()
                list(threads.map(lambda one, pool=pool: pool.prepare(one, "image"), data * 4))
                if at >= 0:  # the first round starts the processes
                    rates[num].append(4 * len(data) / (time.perf_counter() - start))
    return {
        "pictures_per_second_by_processes": {num: median(values) for num, values in rates.items()},
        "over_one_process_each": {num: median(ratios(values, rates[1])) / num for num, values in rates.items()},
    }


def ratios(values: Sequence[float], to: Sequence[float]) -> list[float]:
    """The ratios of each round."""
    return [one / other for one, other in zip(values, to, strict=True)]


def peer(path: Path, options: argparse.Namespace) -> dict[str, object]:
    """Pictures a second, and vLLM's."""
    vision = SHAPES[options.shape]
    make_served_llava(path, context=2048, as_published=True, text=TEXT, vision=vision)  # names that vLLM knows, too
    return beside_peer(path, options, picture, _SERVE)


_SERVE = ("--dtype", "float32", "--device", "cpu", "--kv-cache-tokens", "32768")
PARTS: dict[str, Callable[[Path, argparse.Namespace], dict[str, object]]] = {
    "streams": beside_streams,
    "again": again,
    "prepare": prepare,
    "peer": peer,
}


def main() -> None:
    """Run it and print the figures."""
    end_as_asked()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--share", type=float, default=DEFAULTS.encoder_share, help="--encoder-share")
    parser.add_argument("--processes", type=int, default=2, help="that prepare pictures; threads of each server")
    parser.add_argument("--peer-share", type=float, default=4.0, help="--encoder-share beside a peer")
    parser.add_argument("--threads", type=int, default=1, help="of the engine beside a peer")
    parser.add_argument("--shape", choices=list(SHAPES), default="small", help="of the tower beside a peer")
    parser.add_argument("--only", default=",".join(PARTS))
    options = parser.parse_args()
    figures: dict[str, object] = {"rounds": options.rounds, "streams": options.streams}
    command = f"python -m benchmarks.images --rounds {options.rounds} --only {options.only}"
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = PARTS[name](Path(folder), options)
        print(name, figures[name], flush=True)
        save("images", command, figures)  # after each, as a run may be cut short


if __name__ == "__main__":
    main()
