"""The driver of the Python client, with `--aio` of the asyncio one; tests/conformance/README.md has the contract."""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import sluice
from sluice.completion import finish_name
from sluice.progress import Progress
from sluice.v1 import control_pb2, types_pb2

Asked: TypeAlias = dict[str, Any]


class Seen:
    """What was received of one generation, and the next action at each delta."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._grants = list(asked.get("grants", ()))
        self._allowed = asked.get("window", 0)
        self._text: list[str] = []
        self._ids: list[int] = []
        self._num_tokens = 0
        self._num_empty = 0
        self._seqs: list[int] = []

    def take(self, delta: types_pb2.Delta) -> tuple[str, int]:
        """Records a delta. Returns what to do now: nothing, cancel, pause, or grant a number of tokens."""
        self._text.append(delta.text)
        self._ids.extend(token.id for token in delta.tokens)
        self._num_tokens += delta.consumed
        self._num_empty += bool(delta.tokens and not delta.text)
        self._seqs.append(delta.seq)
        if "grants" in self._asked and self._num_tokens >= self._allowed:
            if not self._grants:
                return "cancel", 0
            self._allowed += self._grants[0]
            return "grant", self._grants.pop(0)
        if len(self._seqs) == self._asked.get("cancel_after"):
            return "cancel", 0
        if len(self._seqs) == self._asked.get("pause_after"):
            return "pause", 0
        return "", 0

    def tell(self, progress: Progress, num_broken: int, error: sluice.SluiceError | None) -> None:
        """Prints the end of the generation."""
        used = progress.finished.usage if progress.finished is not None else error.usage if error is not None else None
        end = progress.ends.get(0)
        told = {
            "text": "".join(self._text),
            "token_ids": self._ids,
            "finish_reason": finish_name(end.finish_reason) if end is not None else "",
            "completion_tokens": used.completion_tokens if used is not None else None,
            "num_deltas": len(self._seqs),
            "num_empty": self._num_empty,
            "seqs_rise": self._seqs == list(range(1, len(self._seqs) + 1)),
            "num_broken": num_broken,
            "error": failure(error),
        }
        say({"end": told})


def say(told: dict[str, object]) -> None:
    """Prints one line of JSON."""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def failure(error: sluice.SluiceError | None) -> dict[str, object] | None:
    """Returns an error in the form of the drivers' contract."""
    if error is None:
        return None
    return {
        "code": error.code.name,
        "reason": error.reason,
        "message": error.message,
        "fields": [one.field for one in error.violations],
        "retry_after_s": error.retry_after_s or 0,
        "generation_id": error.generation_id,
        "last_seq": error.last_seq,
    }


def names_of(adapters: Iterable[control_pb2.Adapter]) -> str:
    """Returns the names of adapters."""
    return ",".join(one.name for one in adapters)


def tell_whole(answer: sluice.Completion | None, error: sluice.SluiceError | None, text: str = "") -> None:
    """Prints the end of a unary call."""
    told: dict[str, object] = {"text": text, "token_ids": [], "finish_reason": "", "completion_tokens": None}
    if answer is not None:
        told |= {"text": answer.text, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
        told["completion_tokens"] = answer.usage.completion_tokens
    say({"end": {**told, "num_deltas": 0, "num_empty": 0, "seqs_rise": True, "num_broken": 0, "error": failure(error)}})


def pause(progress: Progress) -> None:
    """Prints that the driver pauses, and waits for a line on stdin."""
    say({"paused": {"generation_id": progress.accepted.generation_id if progress.accepted else ""}})
    sys.stdin.readline()


def prompt_of(asked: Asked) -> Any:  # noqa: ANN401 # a text or a chat
    """Returns the prompt: a text, or a turn of the user with a picture before it."""
    text = asked.get("text", "") * asked.get("repeat", 1)
    return sluice.chat(("user", [Path(asked["image"]).read_bytes(), text])) if "image" in asked else text


def options_of(asked: Asked) -> dict[str, Any]:
    """Returns the keyword arguments of the SDK."""
    options: dict[str, Any] = {"temperature": 0.0, "timeout_s": asked.get("timeout_s")}
    options |= {name: asked[name] for name in ("max_tokens", "seed", "choices") if name in asked}
    if "choices" not in asked:
        options["ignore_eos"] = True
    return options


def session_options(asked: Asked) -> dict[str, Any]:
    """Returns the keyword arguments of a session's `open`."""
    found: dict[str, Any] = {"window": asked["window"]} if "window" in asked else {}
    return {**found, "grants": "grants" not in asked}


def adapters(client: sluice.Client, name: str) -> None:
    """Loads an adapter, lists all, and takes its name away."""
    try:
        digest = client.load_adapter(name, name).digest
        loaded = names_of(client.adapters())
        client.unload_adapter(name, grace_s=1.5)
        tell_whole(None, None, f"{len(digest)} {loaded} {names_of(client.adapters())}")
    except sluice.SluiceError as error:
        tell_whole(None, error)


async def adapters_aio(client: sluice.AsyncClient, name: str) -> None:
    """Does the same with the asyncio client."""
    try:
        digest = (await client.load_adapter(name, name)).digest
        loaded = names_of(await client.adapters())
        await client.unload_adapter(name, grace_s=1.5)
        tell_whole(None, None, f"{len(digest)} {loaded} {names_of(await client.adapters())}")
    except sluice.SluiceError as error:
        tell_whole(None, error)


def blocking(client: sluice.Client, asked: Asked) -> None:
    """Run the request with the blocking client, in threads where there are several at once."""
    prompt, options = prompt_of(asked), options_of(asked)

    def generate() -> None:
        try:
            tell_whole(client.generate(prompt, **options), None)
        except sluice.SluiceError as error:
            tell_whole(None, error)

    def follow(opened: Any) -> None:  # noqa: ANN401 # a stream or a generation of a session
        seen, error = Seen(asked), None
        try:
            for delta in opened:
                act(opened, *seen.take(delta))
        except sluice.SluiceError as failed:
            error = failed
        seen.tell(opened.progress, opened.num_broken, error)

    count = asked.get("count", 1)
    if asked["call"] == "generate":
        together([generate] * count)
    elif asked["call"] == "adapters":
        adapters(client, prompt)
    elif asked["call"] == "stream":
        together([lambda: follow(client.stream(prompt, **options))] * count)
    else:
        with client.converse() as session:
            together([lambda: follow(session.open(prompt, **session_options(asked), **options))] * count)


def act(opened: Any, action: str, num: int) -> None:  # noqa: ANN401 # a stream or a generation of a session
    """Performs the action at a delta."""
    if action == "pause":
        pause(opened.progress)
    elif action == "cancel":
        opened.cancel()
    elif action == "grant":
        opened.grant(num)


async def act_aio(opened: Any, action: str, num: int) -> None:  # noqa: ANN401 # as above
    """Performs the action at a delta, for asyncio."""
    if action == "pause":
        await asyncio.to_thread(pause, opened.progress)
    elif action == "cancel":
        await opened.cancel()
    else:
        act(opened, action, num)


def together(jobs: Iterable[Callable[[], None]]) -> None:
    """Runs all jobs at the same time and waits for them."""
    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


async def waiting(client: sluice.AsyncClient, asked: Asked) -> None:
    """Run the request with the asyncio client, in tasks where there are several at once."""
    prompt, options = prompt_of(asked), options_of(asked)

    async def generate() -> None:
        try:
            tell_whole(await client.generate(prompt, **options), None)
        except sluice.SluiceError as error:
            tell_whole(None, error)

    async def follow(opened: Any) -> None:  # noqa: ANN401 # as above
        seen, error = Seen(asked), None
        try:
            async for delta in opened:
                await act_aio(opened, *seen.take(delta))
        except sluice.SluiceError as failed:
            error = failed
        seen.tell(opened.progress, opened.num_broken, error)

    count = asked.get("count", 1)
    if asked["call"] == "adapters":
        await adapters_aio(client, prompt)
    elif asked["call"] == "generate":
        await asyncio.gather(*(generate() for _ in range(count)))
    elif asked["call"] == "stream":
        await asyncio.gather(*(follow(client.stream(prompt, **options)) for _ in range(count)))
    else:
        async with client.converse() as session:
            opened = [session.open(prompt, **session_options(asked), **options) for _ in range(count)]
            await asyncio.gather(*map(follow, opened))


def main() -> None:
    """Reads the request and runs it."""
    parser = argparse.ArgumentParser()
    for name in ("--address", "--tls-ca", "--tls-cert", "--tls-key", "--token"):
        parser.add_argument(name)
    parser.add_argument("--no-retry", action="store_true")
    parser.add_argument("--aio", action="store_true")
    args = parser.parse_args()
    files = [Path(one) if one else None for one in (args.tls_ca, args.tls_cert, args.tls_key)]
    tls = sluice.Tls(*files) if args.tls_ca else None
    reach: dict[str, Any] = {"tls": tls, "token": args.token, "retry": sluice.NEVER if args.no_retry else None}
    asked: Asked = json.loads(sys.stdin.readline())
    if args.aio:

        async def run() -> None:
            async with sluice.AsyncClient(args.address.split(","), **reach) as client:
                await waiting(client, asked)

        asyncio.run(run())
    else:
        with sluice.Client(args.address.split(","), **reach) as client:
            blocking(client, asked)


if __name__ == "__main__":
    main()
