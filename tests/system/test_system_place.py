"""The files of a service's sockets: a second service takes none of them, and removed ones are created again."""

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from sluice.v1 import inference_pb2, inference_pb2_grpc

from tests.system.roles import sluice
from tests.system.service import generate, serve, spec, wait_until

NUM_TOKENS = 400


def serves(stub: inference_pb2_grpc.InferenceServiceStub) -> bool:
    """Whether a request gets its answer."""
    try:
        return bool(generate(stub, spec("a", 2)).text)
    except grpc.RpcError:
        return False


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of this test alone. Its path is short, unlike `tmp_path`: a socket's path has a limit."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.mark.long
def test_a_service_keeps_its_place(folder: Path) -> None:
    tmp, door = folder / "tmp", folder / "door"
    tmp.mkdir()
    listen = ("--listen", f"unix:{door}")
    place = {"TMPDIR": str(tmp), "XDG_RUNTIME_DIR": ""}
    with serve(*listen, environment=place) as first:
        refused = sluice("serve", *listen)
        assert refused.returncode == 2 and "another server is there" in refused.stderr
        (run,) = tmp.glob("sluice-run-*")
        names = {path.name for path in run.iterdir()}
        with first.stub() as before:
            alone = generate(before, spec([5, 6], NUM_TOKENS))
            request = inference_pb2.StreamGenerateRequest(spec=spec([5, 6], NUM_TOKENS))
            events = iter(before.StreamGenerate(request, timeout=60))
            assert next(events).HasField("accepted")
            shutil.rmtree(run)
            door.unlink()
            wait_until(lambda: run.exists() and {path.name for path in run.iterdir()} >= names, 60, "not mended")
            wait_until(door.exists, 60, "the door is not back")
            with first.stub() as after:
                large = inference_pb2.TokenizeRequest(text="a b " * 150_000)
                assert len(after.Tokenize(large, timeout=60).tokens) > 1000
                first.children()["tokenizer-0"].kill()
                assert "".join(event.delta.text for event in events) == alone.text
                wait_until(lambda: serves(after), 60, "it does not serve again")
            children = first.children().values()
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        assert door.exists()
        wait_until(lambda: not any(child.is_running() for child in children), 60, "children outlive it")
    with serve(*listen, environment=place) as second, second.stub() as stub:
        assert generate(stub, spec("a", 2)).text
    assert sorted(path.name for path in folder.iterdir()) == ["tmp"] and not list(tmp.iterdir())
