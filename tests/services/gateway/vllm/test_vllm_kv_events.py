import dataclasses

import grpc
from sluice.v1 import control_pb2

from sluice_server.services.gateway.vllm.contract import common_pb2 as common
from sluice_server.services.gateway.vllm.kv_events import KvEventStream, chains, hash_of
from sluice_server.services.messages.details import CachedBlock, Load
from sluice_server.services.messages.processes import CacheChanges, Report
from sluice_server.services.messages.work import pack_ids
from tests.services.gateway.vllm.test_vllm_engine import HERE, VllmClient, serving

WITH_EVENTS = dataclasses.replace(HERE, kv_events=True)


def block(name: str, parent: str = "", tenant: str = "smg") -> CachedBlock:
    ids = pack_ids([ord(letter) for letter in name])
    return CachedBlock(name.encode().ljust(32), parent.encode().ljust(32) if parent else b"", tenant, ids)


def subscribe(client: VllmClient, start: int = 0) -> "grpc.aio.UnaryStreamCall[object, common.KvEventBatch]":
    asked = common.SubscribeKvEventsRequest(start_sequence_number=start)
    return client.stream("SubscribeKvEvents", asked, common.KvEventBatch)


async def test_a_subscriber_follows_the_blocks_of_its_tenant() -> None:
    ab, cd, other = block("ab"), block("cd", "ab"), block("xy", tenant="other")
    async with serving(WITH_EVENTS) as (rig, client):
        load = Load(num_running=2, num_blocks=10, num_free_blocks=5, block_size=2)
        rig.lane.handle(Report("e0", 1, load, served_token=True))
        rig.lane.handle(CacheChanges("e0", 1, 0, True, (), (ab, cd, other)))
        call = subscribe(client)
        first = await call.read()
        assert isinstance(first, common.KvEventBatch)
        assert (first.snapshot.index, first.snapshot.count) == (0, 1)
        assert [event.WhichOneof("data") for event in first.events] == ["cleared", "stored"]
        stored = first.events[1].stored
        assert not stored.HasField("parent_block_hash")
        assert [(one.block_hash, list(one.token_ids), one.block_size) for one in stored.blocks] == [
            (hash_of(ab.name), [97, 98], 2),
            (hash_of(cd.name), [99, 100], 2),
        ]
        assert (first.load.running_requests, first.load.token_usage, first.load.load_only) == (2, 0.5, False)
        rig.lane.handle(CacheChanges("e0", 1, 1, False, (other.name,), ()))
        rig.lane.handle(CacheChanges("e0", 1, 2, False, (cd.name,), (block("ef", "ab"),)))
        second, third = await call.read(), await call.read()
        assert isinstance(second, common.KvEventBatch) and isinstance(third, common.KvEventBatch)
        assert (second.sequence_number, len(second.events)) == (first.sequence_number + 1, 0)
        assert third.sequence_number == second.sequence_number + 1
        removed, stored = third.events[0].removed, third.events[1].stored
        assert list(removed.block_hashes) == [hash_of(cd.name)]
        assert stored.parent_block_hash == hash_of(ab.name)
        assert [event.event_id for event in third.events] == [1, 2]
        call.cancel()


async def test_several_engines_are_one_worker_that_holds_what_any_holds() -> None:
    ab, cd = block("ab"), block("cd", "ab")
    chosen = dataclasses.replace(WITH_EVENTS, stages=(("t0",), ("e0", "e1"), ("d0",)))
    async with serving(chosen) as (rig, client):
        rig.lane.handle(CacheChanges("e0", 1, 0, True, (), (ab,)))
        rig.lane.handle(CacheChanges("e1", 1, 0, True, (), (ab, cd)))
        call = subscribe(client)
        parts = [await call.read() for _ in range(2)]
        rig.lane.handle(CacheChanges("e0", 1, 1, False, (ab.name,), ()))
        rig.lane.lost({"e1"})
        batches = [*parts, await call.read(), await call.read()]
        found = []
        for batch in batches:
            assert isinstance(batch, common.KvEventBatch) and batch.dp_rank == 0
            found.append([event.WhichOneof("data") for event in batch.events])
        assert found == [["cleared", "stored"], ["stored"], [], ["cleared"]]
        call.cancel()


async def test_without_events_there_are_none() -> None:
    async with serving(HERE) as (_, client):
        call = subscribe(client)
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "--kv-events" in str(await call.details())


def test_heartbeats_repeat_the_last_number_and_wait_for_a_first_batch() -> None:
    load = control_pb2.Load()
    late = KvEventStream("t", common.SubscribeKvEventsRequest())
    assert late.heartbeat(load, 1.0) is None
    early = KvEventStream("t", common.SubscribeKvEventsRequest(load_records_before_first_batch=True))
    beats = [early.heartbeat(load, 1.0) for _ in range(2)]
    assert [(beat.sequence_number, beat.load.sample, beat.load.load_only) for beat in beats if beat is not None] == [
        (0, 1, True),
        (0, 2, True),
    ]


def test_blocks_that_follow_each_other_are_one_event() -> None:
    ab, cd, ef = block("ab"), block("cd", "ab"), block("ef", "ab")
    assert chains([ab, cd, ef]) == [[ab, cd], [ef]]
