"""Translates the images of a chat: which are allowed, and where each one's file comes from."""

from collections.abc import Iterator

from sluice.v1 import types_pb2

from sluice_server.engine.checks import check_num_images
from sluice_server.engine.errors import invalid, unsupported
from sluice_server.engine.images import DIGEST_BYTES
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.media.processor import FILE_LIMITS
from sluice_server.services.media.urls import read_url
from sluice_server.services.messages.work import ImageFile

ALL = "chat.messages.parts.image"  # of errors about all images of a chat
MAX_TYPE_BYTES = 64
_SOURCES = ("data", "url", "digest")


def chat_images(chat: types_pb2.Chat, settings: GatewaySettings) -> tuple[ImageFile, ...]:
    """Returns the images of a chat, in their order. Raises `ServiceError` naming the first one that is refused."""
    found = list(_images(chat))
    if not found:
        return ()
    check_num_images(len(found), settings.limits, ALL)
    for field, message, _ in found:
        if message.role != types_pb2.ROLE_USER:
            raise invalid(field, "is for messages of the role user only")
    return tuple(_file(field, image, settings) for field, _, image in found)


def _images(chat: types_pb2.Chat) -> Iterator[tuple[str, types_pb2.ChatMessage, types_pb2.Image]]:
    """Yields each image with its field and its message."""
    for at, message in enumerate(chat.messages):
        for index, part in enumerate(message.parts):
            if part.WhichOneof("part") == "image":
                yield f"chat.messages[{at}].parts[{index}].image", message, part.image


def _file(field: str, image: types_pb2.Image, settings: GatewaySettings) -> ImageFile:
    given = [name for name in _SOURCES if getattr(image, name)]
    if len(given) != 1:
        what = f"has {' and '.join(given)}" if given else "is empty"
        raise invalid(field, f"{what}; send one of {', '.join(_SOURCES)}")
    media_type = image.media_type
    if len(media_type.encode()) > MAX_TYPE_BYTES:
        text = f"has {len(media_type.encode())} bytes; at most {MAX_TYPE_BYTES}"
        raise invalid(f"{field}.media_type", text, limit=MAX_TYPE_BYTES)
    data = image.data  # read once: protobuf copies it at each access
    if len(data) > FILE_LIMITS.max_bytes:
        text = f"has {len(data)} bytes; at most {FILE_LIMITS.max_bytes} are allowed"
        raise invalid(f"{field}.data", text, limit=FILE_LIMITS.max_bytes, actual=len(data))
    if image.digest and len(image.digest) != DIGEST_BYTES:
        text = f"has {len(image.digest)} bytes; a SHA-256 has {DIGEST_BYTES}"
        raise invalid(f"{field}.digest", text, limit=DIGEST_BYTES, actual=len(image.digest))
    if image.url:
        _check_url(f"{field}.url", image.url, settings)
    return ImageFile(field, data, media_type, image.url, image.digest)


def _check_url(field: str, url: str, settings: GatewaySettings) -> None:
    if not settings.media_hosts:
        raise unsupported(field, f"{field}: this server fetches no images by URL (--media-from): send the data")
    try:
        read_url(url, settings.media_hosts)
    except ValueError as error:
        raise invalid(field, str(error)) from None
