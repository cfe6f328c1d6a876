"""Images of a gateway's requests: named by digest, held by open requests, fetched before the ring sees them."""

import asyncio
import dataclasses
import hashlib
from concurrent.futures import Executor, Future
from typing import Any

import grpc
import pytest
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import Code, ServiceError, invalid
from sluice_server.engine.images import ImageForm
from sluice_server.engine.request import SamplingParams
from sluice_server.services.gateway.access.admission import RequestLimiter
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.requests.fetching import ImageFetches
from sluice_server.services.gateway.requests.images import ImageStore, held_bytes
from sluice_server.services.messages.messages import Submit
from sluice_server.services.messages.work import ChatMessage, ChatPrompt, Generate, ImageFile
from tests.services.gateway.fake_ring import Rig, generation, running, settings

URL = "https://pictures.example/a.png"
FORM = ImageForm(token_id=7, cell=1, most_tokens=4)
ON = settings(limits=dataclasses.replace(settings().limits, images=FORM), media_hosts=frozenset({"pictures.example"}))


def asking(*images: ImageFile) -> TranslatedRequest:
    prompt = ChatPrompt((ChatMessage("user", "a", parts=(None,) * len(images)),))
    return TranslatedRequest(Generate(prompt, SamplingParams(), images=images))


def images_of(asked: TranslatedRequest) -> tuple[ImageFile, ...]:
    assert isinstance(asked.work, Generate)
    return asked.work.images


def test_a_tenant_names_its_own_images_by_digest() -> None:
    store, digest = ImageStore(100), hashlib.sha256(b"file").digest()
    store.keep("a", asking(ImageFile("f", b"file")))
    asked = asking(ImageFile("f", digest=digest), ImageFile("g", b"other"))
    assert [one.data for one in images_of(store.resolved("a", asked))] == [b"file", b"other"]
    with pytest.raises(ServiceError, match=r"f\.digest: no image of this SHA-256 is kept here") as caught:
        store.resolved("b", asked)
    assert (caught.value.code, caught.value.reason) == (Code.NOT_FOUND, "IMAGE_NOT_FOUND")


def test_the_store_keeps_those_used_last_within_its_bytes() -> None:
    store = ImageStore(10)
    files = [bytes([n]) * 4 for n in range(3)]
    named = [asking(ImageFile("f", digest=hashlib.sha256(one).digest())) for one in files]
    for one in files[:2]:
        store.keep("a", asking(ImageFile("f", one)))
    store.keep("a", store.resolved("a", named[0]))  # used again
    store.keep("a", asking(ImageFile("f", files[2])))
    store.keep("a", asking(ImageFile("f", b"x" * 11)))  # larger than all of it
    assert store.num_bytes == 8
    assert [images_of(store.resolved("a", named[at]))[0].data for at in (0, 2)] == [files[0], files[2]]
    with pytest.raises(ServiceError):
        store.resolved("a", named[1])


def test_bytes_of_open_requests_are_limited_and_given_back() -> None:
    limiter = RequestLimiter(10, 1000, 10)
    limiter.reserve(1, 11)  # alone it is admitted
    with pytest.raises(ServiceError, match="open requests hold 11 bytes of images and this one has 1") as caught:
        limiter.reserve(1, 1)
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    limiter.reserve(1)
    limiter.release(1, 11)
    limiter.reserve(1, 4)
    limiter.reserve(1, 6)
    assert (limiter.num_requests, limiter.num_image_bytes) == (3, 10)


def test_an_image_to_fetch_counts_as_the_largest() -> None:
    assert held_bytes(asking(ImageFile("f", b"file"), ImageFile("g", url=URL))) == 4 + (8 << 20)


class Held(Executor):
    """Runs a call when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[Future[Any], Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401 # any call
        future: Future[Any] = Future()
        self.calls.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self) -> None:
        future, call = self.calls.pop()
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)


def fetching(rig: Rig, held: Held) -> None:
    """Has the gateway fetch: any file but one."""

    def fetch(url: str, field: str) -> bytes:
        if url.endswith("bad.png"):
            raise invalid(field, "is answered with status 404")
        return url.encode()

    rig.lane.manager.books.fetches = ImageFetches(fetch, held, asyncio.get_running_loop().call_soon)


def request(url: str = URL) -> inference_pb2.GenerateRequest:
    parts = [types_pb2.ContentPart(image=types_pb2.Image(url=url)), types_pb2.ContentPart(text="a")]
    chat = types_pb2.Chat(messages=[types_pb2.ChatMessage(role=types_pb2.ROLE_USER, parts=parts)])
    return inference_pb2.GenerateRequest(spec=types_pb2.GenerationSpec(chat=chat))


async def asked(rig: Rig, held: Held, url: str = URL) -> "asyncio.Task[inference_pb2.GenerateResponse]":
    """A call whose image is being fetched."""

    async def call() -> inference_pb2.GenerateResponse:
        return await rig.stub.Generate(request(url), timeout=10)

    task = asyncio.create_task(call())
    while not held.calls:
        await asyncio.sleep(0)
    return task


async def test_the_ring_gets_a_request_when_its_images_are_fetched() -> None:
    async with running(ON) as rig:
        held = Held()
        fetching(rig, held)
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a", "b"]))
        task = await asked(rig, held)
        (opened,) = [one for one in rig.lane.manager.requests if not one.is_own]
        rig.lane.manager.resubmit(opened)  # a process was lost meanwhile
        assert not rig.ring.submits and rig.lane.manager.books.admission.num_image_bytes == 8 << 20
        held.run()
        assert (await task).outputs[0].text == "ab"
        (submit,) = rig.ring.submits
        assert isinstance(submit, Submit) and isinstance(submit.work, Generate)
        assert [(one.data, one.url) for one in submit.work.images] == [(URL.encode(), "")]
        left_s = submit.envelope.time_left_s
        assert left_s is not None and 0 < left_s < 11  # gRPC rounds a timeout up
        rig.lane.manager.resubmit(opened)
        assert rig.lane.manager.books.admission.num_image_bytes == 0


async def test_a_url_that_is_not_fetched_fails_its_request_by_name() -> None:
    async with running(ON) as rig:
        held = Held()
        fetching(rig, held)
        task = await asked(rig, held, "https://pictures.example/bad.png")
        held.run()
        with pytest.raises(grpc.aio.AioRpcError, match="status 404") as caught:
            await task
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not rig.ring.submits and not rig.lane.manager.num_open


async def test_a_request_that_is_cancelled_meanwhile_never_reaches_the_ring() -> None:
    async with running(ON) as rig:
        held = Held()
        fetching(rig, held)
        task = await asked(rig, held)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while rig.lane.manager.num_open:
            await asyncio.sleep(0)
        held.run()
        await asyncio.sleep(0)
        assert not rig.ring.submits
