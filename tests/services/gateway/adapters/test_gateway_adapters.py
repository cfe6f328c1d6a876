"""A gateway whose requests name adapters, before a ring that the test plays."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from sluice.v1 import control_pb2, inference_pb2

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.request import AdapterRef
from sluice_server.services.gateway.access.identity import digest_of
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.messages.details import AdapterDropped, AdapterState, Load
from sluice_server.services.messages.messages import Result, Submit, failed
from sluice_server.services.messages.processes import Report
from sluice_server.services.messages.work import DropAdapter, Generate, LoadAdapter
from tests.services.gateway.fake_ring import SETTINGS, Rig, generation, running, settings, spec, unary_request

LIMITS = dataclasses.replace(SETTINGS.limits, max_adapters=2)
DIGEST = b"d" * 32


def of_name(name: str, path: str = "", digest: bytes = DIGEST) -> AdapterState:
    return AdapterState(name, path or name, digest, 8, ("q_proj",), 100)


class Engines:
    """Answers loads, and generations with the words `a b`."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.refuses: dict[str, ServiceError] = {}  # by name
        self.holds: set[str] = set()  # names whose loads are not answered
        self.digest = DIGEST
        rig.ring.script = self.answer

    def answer(self, submit: Submit) -> None:
        work, lane = submit.work, self.rig.lane
        if isinstance(work, LoadAdapter) and work.name in self.holds:
            return
        if isinstance(work, LoadAdapter) and work.name in self.refuses:
            lane.handle(failed(submit.envelope, self.refuses[work.name]))
        elif isinstance(work, LoadAdapter):
            lane.handle(Result(submit.envelope, of_name(work.name, work.path, self.digest)))
        elif isinstance(work, DropAdapter):
            lane.handle(Result(submit.envelope, AdapterDropped(0)))
        else:
            self.rig.ring.play(*generation(submit, ["a", "b"]))

    def works(self, kind: type) -> list[Any]:
        """The works of that kind that were submitted."""
        return [one.work for one in self.rig.ring.submits if isinstance(one.work, kind)]

    def generations(self) -> list[Submit]:
        return [one for one in self.rig.ring.submits if isinstance(one.work, Generate)]


@contextlib.asynccontextmanager
async def serving(chosen: GatewaySettings | None = None) -> AsyncIterator[tuple[Rig, Engines]]:
    async with running(chosen or settings(limits=LIMITS)) as rig:
        yield rig, Engines(rig)


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:  # noqa: ANN401 # any call of grpc
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_a_name_is_loaded_once_and_requests_carry_its_digest() -> None:
    async with serving() as (rig, engines):
        for model, adapter in ((None, "b"), ("b", None), ("toy:b", None), ("b", "b")):
            answer = await rig.stub.Generate(unary_request(model=model, adapter=adapter))
            assert (answer.adapter, answer.adapter_digest) == ("b", DIGEST.hex())
            assert answer.model == (model or "toy")
        assert engines.works(LoadAdapter) == [LoadAdapter("b", "b")]
        for one in engines.generations():
            assert isinstance(one.work, Generate)
            assert (one.work.adapter, one.envelope.adapter) == (AdapterRef(DIGEST, "b", 100), DIGEST.hex())
        await rig.stub.Generate(unary_request())
        assert engines.generations()[-1].envelope.adapter == ""
        status, text = await code_of(rig.stub.Generate(unary_request(model="c", adapter="b")))
        assert status is grpc.StatusCode.INVALID_ARGUMENT and "model names 'c'" in text


async def test_a_request_waits_for_its_load_and_is_never_sent_without() -> None:
    """It is changed and the ring is lost meanwhile; then it is sent with all of that, once."""
    async with serving() as (rig, engines):
        engines.holds.add("b")
        call = rig.stub.Converse()
        opened = inference_pb2.Open(spec=spec(adapter="b"), keep_input_open=True)
        await call.write(inference_pb2.ConverseRequest(tag=1, open=opened))
        await call.write(inference_pb2.ConverseRequest(tag=1, append=inference_pb2.Append(text="more")))
        await call.write(inference_pb2.ConverseRequest(tag=1, close_input=inference_pb2.CloseInput()))
        await rig.ring.until(lambda: engines.works(LoadAdapter))
        request = next(one for one in rig.lane.manager.requests if not one.is_own)
        await rig.ring.until(lambda: len(request.replay.changes) == 2)
        rig.ring.epochs["e0"] = 2  # a new engine
        await rig.ring.until(lambda: len(engines.works(LoadAdapter)) > 1)
        assert engines.generations() == []
        engines.holds.clear()
        engines.answer(rig.ring.submits[-1])
        accepted = await call.read()
        assert isinstance(accepted, inference_pb2.ConverseResponse)
        assert accepted.accepted.adapter_digest == DIGEST.hex()
        (sent,) = engines.generations()
        assert isinstance(sent.work, Generate) and len(sent.work.more) == 1 and not sent.work.scheduling.is_open
        call.cancel()


async def test_what_cannot_be_loaded_ends_its_requests_by_name() -> None:
    async with serving() as (rig, engines):
        text = "adapter 'b': adapter_config.json: use_dora is true"
        engines.refuses["b"] = ServiceError(Code.UNIMPLEMENTED, "FEATURE_UNSUPPORTED", text, field="adapter")
        assert await code_of(rig.stub.Generate(unary_request(adapter="b"))) == (grpc.StatusCode.UNIMPLEMENTED, text)
        engines.refuses["c"] = ServiceError(Code.NOT_FOUND, "ADAPTER_NOT_FOUND", "there is no folder")
        for name in ("c", "..", "/etc", "x/../y", "x" * 257):
            status, text = await code_of(rig.stub.Generate(unary_request(adapter=name)))
            assert status is grpc.StatusCode.NOT_FOUND and "which this server serves; see ListAdapters" in text
        assert engines.generations() == []
        assert (await rig.control.ListAdapters(control_pb2.ListAdaptersRequest())).adapters == []


async def test_one_engine_that_refuses_takes_the_name_away_again() -> None:
    both = settings(limits=LIMITS, stages=(("t0",), ("e0", "e1"), ("d0",)))
    async with serving(both) as (rig, engines):
        await rig.ring.until(lambda: len(rig.lane.manager.engines.serving) == 2)

        def answer(submit: Submit) -> None:
            if isinstance(submit.work, LoadAdapter) and submit.envelope.engine == "e1":
                error = ServiceError(Code.FAILED_PRECONDITION, "ADAPTER_INVALID", "of another base")
                rig.lane.handle(failed(submit.envelope, error))
            else:
                engines.answer(submit)

        rig.ring.script = answer
        status, _ = await code_of(rig.control.LoadAdapter(control_pb2.LoadAdapterRequest(adapter="b")))
        assert status is grpc.StatusCode.FAILED_PRECONDITION
        await rig.ring.until(lambda: len(engines.works(DropAdapter)) == 2)
        assert (await rig.control.ListAdapters(control_pb2.ListAdaptersRequest())).adapters == []


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"adapter": ""}, "has 0 bytes"),
        ({"adapter": "x" * 10_240}, "has 10240 bytes"),
        ({"adapter": "a:b"}, "has a colon"),
        ({"adapter": "a\nb"}, "cannot be printed"),
        ({"adapter": "toy"}, "is the name of the model"),
        ({"adapter": "b", "path": "x" * 1025}, "has 1025 bytes"),
        ({"adapter": "b", "base_model": "other"}, "this server serves 'toy'"),
        ({"adapter": "b", "expected_digest": "12"}, "is not 64 hex digits"),
        ({"adapter": "b", "expected_digest": "z" * 64}, "is not 64 hex digits"),
    ],
)
async def test_bad_loads_are_refused_before_the_ring(fields: dict[str, str], part: str) -> None:
    async with serving() as (rig, engines):
        wanted = control_pb2.LoadAdapterRequest(**fields)  # type: ignore[arg-type] # mixed
        status, text = await code_of(rig.control.LoadAdapter(wanted))
        assert status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION) and part in text
        assert engines.works(LoadAdapter) == []


async def test_a_name_that_is_dropped_while_it_is_loaded_stays_dropped() -> None:
    async with serving() as (rig, engines):
        engines.holds.add("b")
        loading = rig.control.LoadAdapter(control_pb2.LoadAdapterRequest(adapter="b"))
        await rig.ring.until(lambda: engines.works(LoadAdapter))
        held = rig.ring.submits[-1]
        await rig.control.UnloadAdapter(control_pb2.UnloadAdapterRequest(adapter="b"))
        engines.holds.clear()
        engines.answer(held)
        status, text = await code_of(loading)
        assert status is grpc.StatusCode.ABORTED and "while it was being loaded" in text
        assert (await rig.control.ListAdapters(control_pb2.ListAdaptersRequest())).adapters == []


async def test_a_name_that_is_being_dropped_is_not_learned_again_from_an_earlier_report() -> None:
    async with serving() as (rig, engines):
        await rig.control.LoadAdapter(control_pb2.LoadAdapterRequest(adapter="a"))

        def report_first(submit: Submit) -> None:
            rig.lane.handle(Report("e0", 1, Load(), served_token=True, adapters=(of_name("a"), of_name("b"))))
            engines.answer(submit)

        rig.ring.script = report_first
        await rig.control.UnloadAdapter(control_pb2.UnloadAdapterRequest(adapter="a"))
        listed = await rig.control.ListAdapters(control_pb2.ListAdaptersRequest())
        assert [one.name for one in listed.adapters] == ["b"]


async def test_adapters_are_listed_in_pages_and_those_of_a_new_engine_are_loaded_again() -> None:
    async with serving() as (rig, engines):
        for name in "abc":
            await rig.control.LoadAdapter(control_pb2.LoadAdapterRequest(adapter=name, path=f"of/{name}"))
        first = await rig.control.ListAdapters(control_pb2.ListAdaptersRequest(page_size=2))
        rest = await rig.control.ListAdapters(
            control_pb2.ListAdaptersRequest(page_size=2, page_token=first.next_page_token)
        )
        assert [one.name for one in (*first.adapters, *rest.adapters)] == ["a", "b", "c"]
        assert (rest.next_page_token, rest.adapters[0].path, rest.adapters[0].base_model) == ("", "of/c", "toy")
        for epoch in (1, 2):
            states = tuple(of_name(name, f"of/{name}") for name in "abc") if epoch == 1 else ()
            rig.lane.handle(Report("e0", epoch, Load(), served_token=True, adapters=states))
        await rig.ring.until(lambda: len(engines.works(LoadAdapter)) == 6)
        assert engines.works(LoadAdapter)[3:] == [LoadAdapter(name, f"of/{name}", DIGEST) for name in "abc"]


async def test_a_tenant_has_its_own_adapters_and_learns_of_no_others(tmp_path: Path) -> None:
    keys = {tenant: f"sluice_{tenant}" for tenant in ("acme", "other", "admin")}
    lines = ['[tenants.acme]\nadapters = ["acme-*", "shared"]\n']
    for tenant, key in keys.items():
        scopes = '["admin"]' if tenant == "admin" else '["generate"]'
        lines.append(f'[[keys]]\nsha256 = "{digest_of(key).hex()}"\ntenant = "{tenant}"\nscopes = {scopes}\n')
    file = tmp_path / "access.toml"
    file.write_text("".join(lines))
    async with serving(settings(limits=LIMITS, access_file=file)) as (rig, engines):

        def of(tenant: str) -> tuple[tuple[str, str], ...]:
            return (("authorization", f"Bearer {keys[tenant]}"),)

        for name in ("acme-1", "shared", "secret"):
            wanted = control_pb2.LoadAdapterRequest(adapter=name)
            await rig.control.LoadAdapter(wanted, metadata=of("admin"))
            status, _ = await code_of(rig.control.LoadAdapter(wanted, metadata=of("acme")))
            assert status is grpc.StatusCode.PERMISSION_DENIED
        listed = await rig.control.ListAdapters(control_pb2.ListAdaptersRequest(), metadata=of("acme"))
        assert [one.name for one in listed.adapters] == ["acme-1", "shared"]
        models = await rig.control.ListModels(control_pb2.ListModelsRequest(), metadata=of("acme"))
        assert list(models.models[0].adapters) == ["acme-1", "shared"]
        await rig.stub.Generate(unary_request(adapter="acme-1"), metadata=of("acme"))
        await rig.stub.Generate(unary_request(adapter="secret"), metadata=of("other"))
        engines.refuses["nothing"] = ServiceError(Code.NOT_FOUND, "ADAPTER_NOT_FOUND", "there is no folder")
        hidden = await code_of(rig.stub.Generate(unary_request(adapter="secret"), metadata=of("acme")))
        absent = await code_of(rig.stub.Generate(unary_request(adapter="nothing"), metadata=of("other")))
        assert hidden[0] is absent[0] is grpc.StatusCode.NOT_FOUND
        assert hidden[1].replace("secret", "nothing") == absent[1]


async def test_a_generation_is_continued_with_the_adapter_that_it_began_with() -> None:
    async with serving() as (rig, engines):
        wanted = spec(adapter="b", revision="r1", resume={"generation_id": "0" * 32, "after_seq": 1})
        wanted.sampling.seed = 3

        async def resumed() -> inference_pb2.ResumeGenerateResponse:
            call = rig.stub.ResumeGenerate(inference_pb2.ResumeGenerateRequest(spec=wanted))
            events = [event async for event in call]
            return events[0]

        status, text = await code_of(resumed())
        assert status is grpc.StatusCode.INVALID_ARGUMENT and "adapter_digest" in text
        wanted.resume.adapter_digest = DIGEST.hex()
        assert (await resumed()).accepted.adapter_digest == DIGEST.hex()
        engines.digest = b"x" * 32
        await rig.control.LoadAdapter(control_pb2.LoadAdapterRequest(adapter="b"))
        num = len(engines.generations())
        status, text = await code_of(resumed())
        assert status is grpc.StatusCode.FAILED_PRECONDITION and "start it again" in text
        assert len(engines.generations()) == num
