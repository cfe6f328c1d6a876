"""Images of a chat: what becomes work, what is refused, and how errors name it."""

import dataclasses
from typing import Any

import pytest
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.images import ImageForm
from sluice_server.services.gateway.contract.translate import generation, tokenization
from sluice_server.services.messages.work import ChatPrompt, Generate, ImageFile
from tests.services.gateway.fake_ring import settings

FORM = ImageForm(token_id=7, cell=1, most_tokens=40, max_images=2)
ON = settings(limits=dataclasses.replace(settings().limits, images=FORM), media_hosts=frozenset({"pictures.example"}))
URL = "https://pictures.example/a.png"


def asked(*parts: dict[str, Any], role: int = types_pb2.ROLE_USER) -> types_pb2.GenerationSpec:
    chat = {"messages": [{"role": role, "parts": list(parts)}]}
    return types_pb2.GenerationSpec(chat=chat, sampling={"max_tokens": 5})  # type: ignore[arg-type] # literals


def test_parts_keep_their_order_and_images_count_as_tokens() -> None:
    image = {"image": {"data": b"a", "media_type": "image/png"}}
    made = generation(asked({"text": "one"}, image, {"text": "two"}, {"image": {"url": URL}}), 0, ON)
    work = made.work
    assert isinstance(work, Generate) and isinstance(work.prompt, ChatPrompt)
    (message,) = work.prompt.messages
    assert (message.content, message.parts) == ("one\ntwo", ("one", None, "two", None))
    assert work.images == (
        ImageFile("chat.messages[0].parts[1].image", b"a", "image/png"),
        ImageFile("chat.messages[0].parts[3].image", url=URL),
    )
    text = generation(asked({"text": "one"}, {"text": "two"}), 0, ON)
    assert isinstance(text.work, Generate) and isinstance(text.work.prompt, ChatPrompt)
    assert text.work.prompt.messages[0].parts == () and made.reserve == text.reserve + 2 * 40


@pytest.mark.parametrize(
    ("image", "field", "says"),
    [
        ({}, "", "is empty; send one of data, url, digest"),
        ({"data": b"a", "url": URL}, "", "has data and url; send one"),
        ({"data": bytes((8 << 20) + 1)}, ".data", "has 8388609 bytes; at most 8388608"),
        ({"digest": b"short"}, ".digest", "has 5 bytes; a SHA-256 has 32"),
        ({"url": "https://169.254.169.254/"}, ".url", "does not fetch from (--media-from)"),
        ({"data": b"a", "media_type": "t" * 65}, ".media_type", "has 65 bytes"),
    ],
)
def test_a_bad_image_is_refused_by_name(image: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ServiceError) as caught:
        generation(asked({"text": "a"}, {"image": image}), 0, ON)
    assert (caught.value.code, caught.value.field) == (
        Code.INVALID_ARGUMENT,
        f"chat.messages[0].parts[1].image{field}",
    )
    assert says in caught.value.message


def test_images_are_refused_where_none_are_taken_and_the_reason_is_told() -> None:
    limits = dataclasses.replace(settings().limits, why_no_images="it was started with --no-images")
    with pytest.raises(ServiceError, match=r"because it was started with --no-images: send text") as caught:
        generation(asked({"image": {"data": b"a"}}), 0, settings(limits=limits))
    assert (caught.value.code, caught.value.field) == (Code.UNIMPLEMENTED, "chat.messages.parts.image")


def test_urls_are_refused_where_none_are_fetched() -> None:
    with pytest.raises(ServiceError, match="--media-from") as caught:
        generation(asked({"image": {"url": URL}}), 0, dataclasses.replace(ON, media_hosts=frozenset()))
    assert caught.value.code is Code.UNIMPLEMENTED


def test_images_in_a_system_turn_and_too_many_are_refused() -> None:
    image = {"image": {"data": b"a"}}
    with pytest.raises(ServiceError, match="is for messages of the role user only"):
        generation(asked(image, role=types_pb2.ROLE_SYSTEM), 0, ON)
    with pytest.raises(ServiceError, match="are 3; at most 2 are allowed"):
        generation(asked(*[image] * 3), 0, ON)


def test_tokenize_refuses_images_by_name() -> None:
    chat = asked({"image": {"data": b"a"}}).chat
    with pytest.raises(ServiceError, match="is for generations") as caught:
        tokenization(inference_pb2.TokenizeRequest(chat=chat), ON)
    assert caught.value.code is Code.UNIMPLEMENTED
