import dataclasses
import hashlib
import io
import zipfile
from pathlib import Path

import grpc
import pytest
from sluice.v1 import control_pb2

from sluice_server.services.gateway.calls.guard import ADMIN, ANY, SCOPES
from sluice_server.services.gateway.tokenizer_files import TokenizerFiles
from sluice_server.services.messages.details import CachedBlock
from sluice_server.services.messages.processes import CacheChanges
from sluice_server.services.messages.work import pack_ids
from tests.services.gateway.fake_ring import MODEL, generation, running, settings, stream_request


async def test_the_tokenizers_files_come_with_their_digest(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"t" * 100_000)
    (tmp_path / "model.safetensors").write_bytes(b"w")
    model = dataclasses.replace(MODEL, tokenizer=TokenizerFiles.of(tmp_path))
    async with running(settings(model=model)) as rig:
        chunks = [one async for one in rig.control.GetTokenizer(control_pb2.GetTokenizerRequest(model="toy"))]
        data = b"".join(one.data for one in chunks)
        assert [one.sha256 for one in chunks] == ["", hashlib.sha256(data).hexdigest()]
        assert zipfile.ZipFile(io.BytesIO(data)).namelist() == ["tokenizer.json"]
        call = rig.control.GetTokenizer(control_pb2.GetTokenizerRequest(model="other"))
        assert await call.code() is grpc.StatusCode.NOT_FOUND


async def test_cache_events_of_all_tenants() -> None:
    first = CachedBlock(b"a" * 32, b"", "t", pack_ids([1, 2]))
    second = CachedBlock(b"b" * 32, b"a" * 32, "u", pack_ids([3, 4]))
    async with running(settings(kv_events=True)) as rig:
        rig.lane.handle(CacheChanges("e0", 1, 0, True, (), (first,)))
        call = rig.control.SubscribeKvEvents(control_pb2.SubscribeKvEventsRequest())
        snapshot = await call.read()
        rig.lane.handle(CacheChanges("e0", 1, 1, False, (first.name,), (second,)))
        change = await call.read()
        assert isinstance(snapshot, control_pb2.SubscribeKvEventsResponse)
        assert isinstance(change, control_pb2.SubscribeKvEventsResponse)
        block = control_pb2.KvBlock(name=first.name, tenant="t", token_ids=[1, 2])
        assert snapshot == control_pb2.SubscribeKvEventsResponse(
            sequence_number=snapshot.sequence_number,
            engine_id="e0",
            cleared=True,
            added=[block],
            snapshot=control_pb2.KvSnapshotPart(index=0, count=1, blocks=1),
        )
        assert change == control_pb2.SubscribeKvEventsResponse(
            sequence_number=snapshot.sequence_number + 1,
            engine_id="e0",
            removed=[first.name],
            added=[control_pb2.KvBlock(name=second.name, parent=first.name, tenant="u", token_ids=[3, 4])],
        )
        call.cancel()


async def test_without_the_setting_there_are_no_events() -> None:
    async with running() as rig:
        call = rig.control.SubscribeKvEvents(control_pb2.SubscribeKvEventsRequest())
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "--kv-events" in str(await call.details())


@pytest.mark.parametrize(("method", "scopes"), [("GetTokenizer", ANY), ("SubscribeKvEvents", ADMIN)])
def test_who_may(method: str, scopes: object) -> None:
    assert SCOPES[f"/sluice.v1.ControlService/{method}"] == scopes


async def test_a_stream_says_at_once_how_much_of_its_prompt_was_cached() -> None:
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a"]))
        answers = [one async for one in rig.stub.StreamGenerate(stream_request())]
        assert (answers[0].accepted.prompt_tokens, answers[0].accepted.cached_tokens) == (3, 1)
