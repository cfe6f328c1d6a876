"""GGUF headers: what a good one holds, and that a damaged or hostile one is refused in one line, in bounded memory."""

import contextlib
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.gguf import reader
from sluice_server.engine.models.gguf.checkpoint import GgufCheckpoint
from sluice_server.engine.models.gguf.reader import read_header
from sluice_server.engine.models.gguf.tensor_types import REFUSED, TYPES
from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.gguf_files import write_gguf

U32, F32, STRING, ARRAY, U64 = 4, 6, 8, 9, 10
HUGE = 1 << 60


def text(value: bytes | str) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name: bytes | str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    sizes = b"".join(struct.pack("<Q", one) for one in dims)
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def file_of(  # noqa: PLR0913 # every part of a file
    path: Path,
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: int = 4096,
) -> Path:
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    head = magic + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(keys) + b"".join(tensors)
    path.write_bytes(head + b"\0" * (-len(head) % 32 + data))
    return path


ARCH = key("general.architecture", STRING, text("llama"))


def test_a_header_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape("llama", hidden=64, intermediate=96))
    path = write_gguf(tmp_path, tmp_path / "x.gguf", "Q4_0")
    found, want = read_header(path), gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in want.fields.items() if not name.startswith("GGUF.")}
    assert dict(found.metadata) == keys
    placed = {
        one.name: (one.tensor_type.name, tuple(map(int, one.shape[::-1])), one.data_offset, one.n_bytes)
        for one in want.tensors
    }
    assert {name: (one.type.name, one.shape, one.start, one.size) for name, one in found.tensors.items()} == placed


def test_types_are_those_of_the_package() -> None:
    for number, kind in TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.block, kind.size)
    known = {int(one): one.name for one in gguf.GGMLQuantizationType if int(one) not in TYPES}
    assert {number: name for number, name in REFUSED.items() if number in known} == known


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


REFUSALS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "empty": (lambda p: (p, p.write_bytes(b""))[0], "is empty: correct the file"),
    "other magic": (lambda p: file_of(p, magic=b"GGML"), "does not begin with GGUF"),
    "cut in the magic": (lambda p: (p, p.write_bytes(b"GG"))[0], "the magic number has 4 bytes from byte 0"),
    "version 1": (lambda p: file_of(p, version=1), "has version 1; supported are versions 2 and 3"),
    "big-endian": (lambda p: file_of(p, version=3 << 24), "is big-endian"),
    "2^60 keys": (lambda p: file_of(p, counts=(0, HUGE)), f"kv_count is {HUGE}; at most 65536"),
    "2^60 tensors": (lambda p: file_of(p, counts=(HUGE, 0)), f"tensor_count is {HUGE}; at most 131072"),
    "more keys than there are": (lambda p: file_of(p, counts=(0, 1), data=0), "cut short"),
    "a key of 2^60": (lambda p: file_of(p, (struct.pack("<Q", HUGE),)), f"key 0: length is {HUGE}; at most 1024"),
    "a key beyond the end": (
        lambda p: file_of(p, (struct.pack("<Q", 1000),), data=0),
        "beyond the .* that can be read",
    ),
    "a key not UTF-8": (lambda p: file_of(p, (key(b"\xff", U32, b"\1\0\0\0"),)), "key 0 is not UTF-8"),
    "a key twice": (lambda p: file_of(p, (ARCH, ARCH)), "has the key 'general.architecture' twice"),
    "a type of 13": (lambda p: file_of(p, (key("a", 13, b"\0" * 8),)), "'a' has the metadata type 13"),
    "a string of 2^60": (lambda p: file_of(p, (key("a", STRING, struct.pack("<Q", HUGE)),)), "'a': length is 115"),
    "an array of 2^60": (
        lambda p: file_of(p, (key("a", ARRAY, array(U32, HUGE)),)),
        "arrays may have 2097152 elements",
    ),
    "an array beyond the end": (lambda p: file_of(p, (key("a", ARRAY, array(U64, 1 << 20)),)), "'a' has 8388608 bytes"),
    "many arrays": (
        lambda p: file_of(p, tuple(key(f"a{i}", ARRAY, array(0, 1 << 20, bytes(1 << 20))) for i in range(3))),
        "'a2': length is 1048576; at most 0 are read",
    ),
    "an array of arrays": (
        lambda p: file_of(p, (key("a", ARRAY, array(ARRAY, 1, array(ARRAY, 1, array(U32, 1)))),)),
        "'a' is an array of arrays",
    ),
    "an array of what is no type": (lambda p: file_of(p, (key("a", ARRAY, array(99, 1)),)), "metadata type 99"),
    "a string of an array of 2^60": (
        lambda p: file_of(p, (key("a", ARRAY, array(STRING, 2, text("x") + struct.pack("<Q", HUGE))),)),
        "'a', element 1 has",
    ),
    "a string of an array not UTF-8": (
        lambda p: file_of(p, (key("a", ARRAY, array(STRING, 1, text(b"\xc3\x28"))),)),
        "'a', element 0, is not UTF-8",
    ),
    **{
        f"alignment {one}": (
            lambda p, one=one: file_of(p, (key("general.alignment", U32, struct.pack("<I", one)),)),  # type: ignore[misc]
            f"general.alignment is {one}; it must be a power of two from 8 to 1048576",
        )
        for one in (0, 1, 33, 1 << 31)
    },
    "alignment of another type": (
        lambda p: file_of(p, (key("general.alignment", STRING, text("32")),)),
        "general.alignment is '32'",
    ),
    "no dimensions": (lambda p: file_of(p, (), (tensor("t", ()),)), "'t' has 0 dimensions"),
    "five dimensions": (lambda p: file_of(p, (), (tensor("t", (1,) * 5),)), "'t' has 5 dimensions"),
    "2^32 - 1 dimensions": (
        lambda p: file_of(p, (), (text("t") + b"\xff" * 4,)),
        "'t' has 4294967295 dimensions",
    ),
    "a dimension of 0": (lambda p: file_of(p, (), (tensor("t", (32, 0)),)), r"shape \[32, 0\]; it must have 1 to"),
    "a product beyond 2^64": (
        lambda p: file_of(p, (), (tensor("t", (1 << 33, 1 << 33)),)),
        r"shape \[8589934592, 8589934592\]; it must have 1 to 1099511627776 numbers",
    ),
    "a product that wraps to 32": (lambda p: file_of(p, (), (tensor("t", (32, (1 << 64) - 1)),)), "it must have 1 to"),
    "an unknown type": (
        lambda p: file_of(p, (), (tensor("t", kind=77),)),
        "'t' has the type number 77; supported are F32",
    ),
    "IQ4_XS": (lambda p: file_of(p, (), (tensor("t", (256,), 23),)), "'t' has the type IQ4_XS; supported are F32"),
    "half a block": (lambda p: file_of(p, (), (tensor("t", (48,), 2),)), "rows of 48 numbers; Q4_0 has blocks of 32"),
    "a tensor twice": (
        lambda p: file_of(p, (), (tensor("t"), tensor("t", offset=128))),
        "has the tensor 't' twice",
    ),
    "overlapping tensors": (
        lambda p: file_of(p, (), (tensor("t"), tensor("u", offset=96))),
        "'u' at offset 96 overlaps tensor 't'",
    ),
    "an odd offset": (lambda p: file_of(p, (), (tensor("t", offset=4),)), "offset 4; it must be a multiple of 32"),
    "an offset beyond the end": (
        lambda p: file_of(p, (), (tensor("t", offset=1 << 62),)),
        "ends at byte .*, and the file has .*: it is cut short",
    ),
    "cut in the tensors": (lambda p: file_of(p, (), (tensor("t", (1 << 20,)),)), "it is cut short; download it again"),
}


@pytest.mark.parametrize("name", list(REFUSALS))
def test_a_hostile_header_is_refused(name: str, tmp_path: Path) -> None:
    write, message = REFUSALS[name]
    path = write(tmp_path / "x.gguf")
    with pytest.raises(ServiceError, match=message) as caught:
        read_header(path)
    assert caught.value.reason == "MODEL_INVALID"
    assert caught.value.message.startswith(f"{path}: ") and "\n" not in caught.value.message
    assert len(caught.value.message) < 600


def test_a_directory_and_a_dangling_link_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(tmp_path / "nothing")
    for path in (tmp_path, tmp_path / "link.gguf", Path("/dev/zero")):
        with pytest.raises(ServiceError, match="is no file, or a link to none"):
            read_header(path)


def test_a_header_is_bounded_whatever_the_file_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", 200)
    with pytest.raises(ServiceError, match=r"'b' .*a header may have 200 bytes"):
        read_header(file_of(tmp_path / "x.gguf", (ARCH, key("b", STRING, text("x" * 300)))))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("whole")
    make_checkpoint(directory, Shape("llama", vocab=64, hidden=32, intermediate=32, layers=1, head_dim=8))
    return write_gguf(directory, directory / "x.gguf", "Q8_0").read_bytes()


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """A file with some bytes changed, cut, doubled or made large, most of them in its header."""
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(rng.choice((24, 2000, len(data))))
        match rng.randrange(5):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                data[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 1 << 31, 1 << 32, 1 << 60, (1 << 64) - 1)))
            case 2:
                del data[at : at + rng.randrange(1, 64)]
            case 3:
                data[at:at] = data[at : at + rng.randrange(1, 64)]
            case _:
                del data[max(at, 1) :]
        if not data:
            return b"G"
    return bytes(data)


def test_no_damage_is_more_than_an_error(whole: bytes, tmp_path: Path) -> None:
    """Thousands of damaged files: read as a whole or refused in one line, never with another exception."""
    path, rng, refused = tmp_path / "x.gguf", random.Random(0), 0
    for _ in range(4000):
        path.write_bytes(damaged(whole, rng))
        try:
            source = GgufCheckpoint([path], torch.float32, torch.device("cpu"))
            source.get("model.embed_tokens.weight", (64, 32))
            source.get("model.layers.0.self_attn.q_proj.weight", (32, 32))
            source.get("model.norm.weight", (32,))
        except ServiceError as error:
            refused += 1
            assert error.reason in ("MODEL_INVALID", "FEATURE_UNSUPPORTED") and "\n" not in error.message
    assert 1000 < refused < 4000


def test_no_damage_takes_much_memory(whole: bytes, tmp_path: Path) -> None:
    path, rng = tmp_path / "x.gguf", random.Random(1)
    tracemalloc.start()
    try:
        for _ in range(300):
            path.write_bytes(damaged(whole, rng))
            with contextlib.suppress(ServiceError):
                read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_numbers_that_are_none_are_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(whole)
    info = read_header(path).tensors["blk.0.attn_q.weight"]
    for scale in (b"\x00\x7e", b"\x00\x7c"):  # NaN, infinity
        data = bytearray(whole)
        data[info.start + 34 : info.start + 36] = scale
        path.write_bytes(data)
        source = GgufCheckpoint([path], torch.float32, torch.device("cpu"))
        with pytest.raises(ServiceError, match=r"tensor blk\.0\.attn_q\.weight holds NaN or infinity"):
            source.get("model.layers.0.self_attn.q_proj.weight", (32, 32))
