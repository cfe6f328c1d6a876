"""Images through real processes: tokens of `transformers`, losses in the middle, bad pictures and URLs.

One service serves all cases, so that each shows that the one before it has left it whole.
"""

import base64
import contextlib
import hashlib
import io
import json
import struct
import subprocess
import sys
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from sluice.v1 import control_pb2, inference_pb2, inference_pb2_grpc, types_pb2

from sluice_server.engine.models.vision.config import read_vision
from sluice_server.services.media.pixels import prepare
from sluice_server.services.media.processor import FILE_LIMITS, read_processor
from tests.oracle.vision_checkpoints import NUM_PATCHES, WORDS_IMAGE_ID, make_served_llava
from tests.system.service import Service, serve, wait_until

NUM = 24
TEXT = "what <image> is it?"  # the word for an image, typed: it stays text


def picture(seed: int, width: int = 60, height: int = 50, kind: str = "PNG", mode: str = "RGB", **how: Any) -> bytes:  # noqa: ANN401 # of Pillow
    """A random picture."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(values).convert(mode).save(out, kind, **how)
    return out.getvalue()


def asked(*parts: bytes | str | types_pb2.Image, num: int = NUM, **sampling: Any) -> types_pb2.GenerationSpec:  # noqa: ANN401 # of the field
    """A request with these texts and pictures."""
    made = [
        types_pb2.ContentPart(text=one)
        if isinstance(one, str)
        else types_pb2.ContentPart(image=types_pb2.Image(data=one) if isinstance(one, bytes) else one)
        for one in parts
    ]
    spec = types_pb2.GenerationSpec(
        sampling=types_pb2.SamplingParams(max_tokens=num, **{"temperature": 0.0, **sampling}),
        stop=types_pb2.StopConditions(ignore_eos=True),
    )
    spec.sampling.logit_bias[WORDS_IMAGE_ID] = -100.0
    spec.chat.messages.add(role=types_pb2.ROLE_USER).parts.extend(made)
    return spec


Stub = inference_pb2_grpc.InferenceServiceStub


def answered(stub: Stub, spec: types_pb2.GenerationSpec) -> inference_pb2.GenerateResponse:
    return stub.Generate(inference_pb2.GenerateRequest(spec=spec), timeout=60)


def once_serving(stub: Stub, spec: types_pb2.GenerationSpec) -> inference_pb2.GenerateResponse:
    """The answer as soon as the ring takes requests again."""
    found: list[inference_pb2.GenerateResponse] = []

    def is_answered() -> bool:
        with contextlib.suppress(grpc.RpcError):
            found.append(answered(stub, spec))
        return bool(found)

    wait_until(is_answered, 60.0, "the ring does not serve")
    return found[0]


def ids_of(response: inference_pb2.GenerateResponse) -> list[int]:
    return [token.id for token in response.outputs[0].tokens]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint and its reference."""
    path = tmp_path_factory.mktemp("llava")
    return path, make_served_llava(path)


@pytest.fixture(scope="module")
def service(made: tuple[Path, Any]) -> Iterator[Service]:
    options = ("--http", "127.0.0.1:0", "--dtype", "float32", "--max-num-batched-tokens", "64")
    with serve("--model", str(made[0]), *options, "--media-from", "pictures.invalid") as running:
        yield running


@pytest.fixture(scope="module")
def stub(service: Service) -> Iterator[Stub]:
    with service.stub() as opened:
        yield opened


@torch.inference_mode()
def oracle(made: tuple[Path, Any], text: str, *pictures: bytes) -> list[int]:
    """Greedy tokens of `transformers` for a turn of the user, whose pictures come first."""
    path, model = made
    processor = read_processor(path, read_vision(path).form)
    words = [3 + at for at in byte_ids(f"{text} ASSISTANT:")]
    ids = [3 + at for at in byte_ids("USER: ")]
    for _ in pictures:
        ids += [*[WORDS_IMAGE_ID] * NUM_PATCHES, *(3 + at for at in byte_ids("\n"))]
    ids += words
    pixels = [torch.from_numpy(prepare(one, processor, FILE_LIMITS).pixels) for one in pictures]
    given = {"pixel_values": torch.stack(pixels)} if pixels else {}
    for _ in range(NUM):
        ids.append(int(model(torch.tensor([ids]), **given).logits[0, -1, :WORDS_IMAGE_ID].argmax()))
    return ids[-NUM:]


def byte_ids(text: str) -> list[int]:
    """The places of a text's bytes in the checkpoint's alphabet."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    (written, _), *_ = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [alphabet.index(one) for one in written]


def test_tokens_are_those_of_transformers_and_pictures_are_kept(made: tuple[Path, Any], stub: Stub) -> None:
    one, two = picture(1), picture(2, 40, 90, "JPEG")
    for pictures in ((), (one,), (two, one), (one, one)):
        response = answered(stub, asked(*pictures, TEXT))
        assert ids_of(response) == oracle(made, TEXT, *pictures)
        assert response.usage.image_tokens == len(pictures) * NUM_PATCHES
    again = answered(stub, asked(one, TEXT))
    assert again.usage.cached_tokens == 32 and ids_of(again) == oracle(made, TEXT, one)
    named = types_pb2.Image(digest=hashlib.sha256(one).digest())
    assert ids_of(answered(stub, asked(named, TEXT))) == ids_of(again)
    with pytest.raises(grpc.RpcError, match="no image of this SHA-256") as caught:
        answered(stub, asked(types_pb2.Image(digest=bytes(32)), TEXT))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_the_server_tells_its_limits_of_images(service: Service) -> None:
    with service.control() as control:
        info = control.GetServerInfo(control_pb2.GetServerInfoRequest())
    limits = info.limits
    assert control_pb2.FEATURE_IMAGES in info.features
    found = limits.max_images, limits.max_image_bytes, limits.max_image_pixels, limits.max_image_tokens
    assert found == (16, 8 << 20, 16 << 20, NUM_PATCHES)


def media_children(service: Service) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(service.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "sluice_server.services.media.image_child" in child.cmdline():
                found.append(child)
    return found


@pytest.mark.parametrize("victim", ["engine-0", pytest.param("tokenizer-0", marks=pytest.mark.long), "media"])
def test_a_loss_in_the_middle_changes_no_token(service: Service, stub: Stub, victim: str) -> None:
    wanted = asked(picture(7), TEXT, picture(8), num=200, temperature=1.0, seed=5)
    whole = answered(stub, wanted).outputs[0].text
    wanted.chat.messages[0].parts[0].image.data = picture(7)
    text = ""
    for event in stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=wanted), timeout=120):
        if event.HasField("delta"):
            if not text:
                doomed = media_children(service) if victim == "media" else [service.children()[victim]]
                for one in doomed:
                    one.kill()
            text += event.delta.text
    assert text == whole
    assert ids_of(once_serving(stub, asked(picture(90 + len(victim)), TEXT)))
    assert media_children(service)


def test_a_loss_while_pictures_are_prepared_changes_no_token(
    made: tuple[Path, Any], service: Service, stub: Stub
) -> None:
    assert ids_of(answered(stub, asked(picture(30), TEXT, num=2)))
    for one in media_children(service):
        one.suspend()
    pictures = [picture(31 + at) for at in range(3)]
    wanted = [inference_pb2.GenerateRequest(spec=asked(one, TEXT)) for one in pictures]
    calls = [stub.Generate.future(one, timeout=60) for one in wanted]
    with service.control() as control:
        wait_until(lambda: control.GetLoad(control_pb2.GetLoadRequest()).load.open_requests == 3, 30.0, "not all came")
    service.children()["tokenizer-0"].kill()
    assert [ids_of(call.result()) for call in calls] == [oracle(made, TEXT, one) for one in pictures]


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of(width: int, height: int, *extra: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


BAD = {
    "a header of 65,535 by 65,535": (png_of(65535, 65535), "", "has"),
    "no pixels": (png_of(0, 0), "", ""),
    "a text bomb": (png_of(8, 8, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(64 << 20)))), "", "cannot be decoded"),
    "truncated": (picture(1, kind="JPEG")[:-300], "", "cannot be decoded"),
    "a strip": (picture(1, 30_000, 1), "", "is resized to"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "", "is no image in one of the formats"),
    "HTML": (b"<html></html>", "", "is no image in one of the formats"),
    "TIFF": (picture(1, kind="TIFF"), "", "is no image in one of the formats"),
    "nothing": (b"", "", "is empty"),
    "too many bytes": (bytes((8 << 20) + 1), "", "at most 8388608"),
}
GOOD = {
    "CMYK": picture(3, kind="JPEG", mode="CMYK"),
    "1 bit": picture(3, mode="1"),
    "palette and alpha": picture(3, mode="P", transparency=3),
    "animated": picture(3, kind="GIF", save_all=True, append_images=[Image.new("RGB", (60, 50))]),
    "WebP": picture(3, kind="WEBP"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_refused_by_name_and_the_next_is_served(service: Service, stub: Stub, name: str) -> None:
    data, _, says = BAD[name]
    before = {one: child.pid for one, child in service.children().items()}
    with pytest.raises(grpc.RpcError) as caught:
        answered(stub, asked(TEXT, data))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    told = str(caught.value.details())
    assert told.startswith("chat.messages[0].parts[1].image") and says in told
    assert ids_of(answered(stub, asked(picture(1), TEXT, num=2)))
    assert {one: child.pid for one, child in service.children().items()} == before


@pytest.mark.parametrize(
    "name", [one if one == "palette and alpha" else pytest.param(one, marks=pytest.mark.long) for one in GOOD]
)
def test_an_unusual_picture_is_served(made: tuple[Path, Any], stub: Stub, name: str) -> None:
    assert ids_of(answered(stub, asked(GOOD[name], TEXT))) == oracle(made, TEXT, GOOD[name])


def test_what_a_client_writes_in_place_of_a_picture_is_refused(stub: Stub) -> None:
    many = asked(*[picture(1)] * 17, TEXT)
    parts = asked(*["a"] * 257)
    system = asked(TEXT)
    system.chat.messages.add(role=types_pb2.ROLE_SYSTEM).parts.add(image=types_pb2.Image(data=picture(1)))
    lying = asked(types_pb2.Image(data=picture(1), media_type="image/jpeg"), TEXT)
    as_text = types_pb2.GenerationSpec(text="USER: <image>", sampling=types_pb2.SamplingParams(max_tokens=2))
    as_ids = types_pb2.GenerationSpec(token_ids=types_pb2.TokenIds(ids=[WORDS_IMAGE_ID, 5]))
    as_ids.sampling.max_tokens = 2
    cases = (
        (many, "are 17; at most 16"),
        (parts, "256 entries"),
        (system, "for messages of the role user only"),
        (lying, "is image/png, and its media type says 'image/jpeg'"),
        (as_text, "which stand for images; those sent take 0"),
        (as_ids, "which stand for images; those sent take 0"),
    )
    for spec, says in cases:
        with pytest.raises(grpc.RpcError, match=r".") as caught:
            answered(stub, spec)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, says
        assert says in str(caught.value.details())
    assert ids_of(answered(stub, asked(picture(1), TEXT, num=2)))


def test_openais_edge_takes_data_urls_and_judges_others(made: tuple[Path, Any], service: Service) -> None:
    def ask(url: str, **more: Any) -> tuple[int, dict[str, Any]]:  # noqa: ANN401 # of the field
        parts = [{"type": "image_url", "image_url": {"url": url, **more}}, {"type": "text", "text": TEXT}]
        body = {
            "messages": [{"role": "user", "content": parts}],
            **{"max_tokens": NUM, "temperature": 0, "ignore_eos": True, "return_token_ids": True},
            "logit_bias": {str(WORDS_IMAGE_ID): -100},
        }
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{service.http}/v1/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    data = picture(2)
    encoded = base64.b64encode(data).decode()
    status, found = ask(f"data:image/png;base64,{encoded}", detail="auto")
    assert status == 200 and found["choices"][0]["token_ids"] == oracle(made, TEXT, data)
    assert found["usage"]["prompt_tokens_details"]["image_tokens"] == NUM_PATCHES
    for url, says in {
        f"data:image/jpeg;base64,{encoded}": "is image/png",
        "data:image/png;base64,!": "not valid base64",
        "http://pictures.invalid/a.png": "https://",
        "file:///etc/passwd": "https://",
        "https://169.254.169.254/latest": "does not fetch from",
        "https://[::ffff:127.0.0.1]/": "does not fetch from",
        "https://pictures.invalid/a.png": "cannot be fetched",  # no such name, by its definition
    }.items():
        status, found = ask(url)
        assert status == 400 and says in found["error"]["message"], url
        assert found["error"]["param"].startswith("messages[0].content"), url
    status, found = ask(f"data:image/png;base64,{encoded}", detail="high")
    assert status == 400 and "detail" in found["error"]["message"]


def test_the_command_chat_shows_a_picture(service: Service, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(2))
    command = [sys.executable, "-m", "sluice_server", "chat", "--address", service.address, "--max-tokens", "4"]
    for name, status, says in (("a.png", 0, ""), ("none.png", 1, "--image: none.png: No such file or directory")):
        run = subprocess.run(
            [*command, "--image", name], cwd=tmp_path, input=TEXT.encode(), capture_output=True, timeout=60, check=False
        )
        assert bool(run.returncode) is bool(status) and says in run.stderr.decode(), run.stderr


@pytest.mark.long
def test_images_can_be_switched_off(made: tuple[Path, Any]) -> None:
    with serve("--model", str(made[0]), "--no-images") as service, service.stub() as stub:
        with pytest.raises(grpc.RpcError, match="started with --no-images") as caught:
            answered(stub, asked(picture(1), TEXT))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert ids_of(answered(stub, asked(TEXT)))
        wait_until(lambda: not media_children(service), 5.0, "a process decodes images")
