"""The protocol over real sockets, before a ring that the test plays."""

import contextlib
import dataclasses
import hashlib
import inspect
import io
import json
import zipfile
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import FinishReason
from sluice_server.services.gateway.access.identity import digest_of
from sluice_server.services.gateway.calls import guard
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.gateway.tokenizer_files import TokenizerFiles
from sluice_server.services.gateway.vllm.contract import common_pb2 as common
from sluice_server.services.gateway.vllm.contract import vllm_engine_pb2 as vllm
from sluice_server.services.gateway.vllm.service import SERVICE, VllmEngine
from sluice_server.services.messages.details import Embedded, Load, Timings, TokenLogprobs, TokenRecord
from sluice_server.services.messages.messages import Result, Submit, Text
from sluice_server.services.messages.processes import Report
from sluice_server.services.messages.work import Embed, Generate, TokenPrompt, ints
from tests.services.certificates import Authority, written
from tests.services.gateway.fake_ring import MODEL, Rig, generation, running, settings, text_of

LOCAL = (("grpc.use_local_subchannel_pool", 1),)
HERE = settings(vllm_listen="127.0.0.1:0", vllm_tenant="smg")


class VllmClient:
    """Calls of the protocol over one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def stream(self, method: str, request: Any, answer: Any) -> "grpc.aio.UnaryStreamCall[Any, Any]":  # noqa: ANN401
        call: grpc.aio.UnaryStreamMultiCallable[Any, Any] = self._channel.unary_stream(
            f"/{SERVICE.full_name}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return call(request)

    def generate(self, **fields: Any) -> "grpc.aio.UnaryStreamCall[Any, vllm.GenerateResponse]":  # noqa: ANN401
        return self.stream("Generate", request(**fields), vllm.GenerateResponse)

    async def ask(self, method: str, request: Any, answer: Any) -> Any:  # noqa: ANN401 # any message
        call: grpc.aio.UnaryUnaryMultiCallable[Any, Any] = self._channel.unary_unary(
            f"/{SERVICE.full_name}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return await call(request)


def request(ids: tuple[int, ...] = (5, 6, 7), **fields: Any) -> vllm.GenerateRequest:  # noqa: ANN401
    return vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=ids), **{"request_id": "r", **fields})


@contextlib.asynccontextmanager
async def serving(chosen: GatewaySettings = HERE) -> AsyncIterator[tuple[Rig, VllmClient]]:
    async with (
        running(chosen) as rig,
        grpc.aio.insecure_channel(f"127.0.0.1:{rig.gateway.vllm_port}", options=LOCAL) as channel,
    ):
        yield rig, VllmClient(channel)


def scored(submit: Submit) -> list[Text]:
    """Two tokens with log probabilities, the first of which was drafted."""
    first, last = generation(submit, ["a", "b"])
    scores = TokenLogprobs(-0.5, 1, (4, 9), (-0.5, -1.5))
    records = [(TokenRecord(at, b"x", scores, (b"x", b"y")),) for at in range(2)]
    return [
        msgspec.structs.replace(first, tokens=records[0], drafts=((3, 1),)),
        msgspec.structs.replace(last, tokens=records[1]),
    ]


async def test_a_stream_has_chunks_and_an_end_and_is_the_listeners_tenants() -> None:
    async with serving() as (rig, client):
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a", "b", "c"]))
        sampling = vllm.SamplingParams(temperature=0, max_tokens=3)
        answers = [one async for one in client.generate(stream=True, sampling_params=sampling)]
        chunks = [one.chunk for one in answers if one.HasField("chunk")]
        assert [token for one in chunks for token in one.token_ids] == [0, 1, 2]
        assert {(one.prompt_tokens, one.cached_tokens) for one in chunks} == {(3, 1)}
        assert sum(one.completion_tokens for one in chunks) == 3
        (end,) = [one.complete for one in answers if one.HasField("complete")]
        assert (end.finish_reason, list(end.output_ids), end.completion_tokens, end.cached_tokens) == (
            "length",
            [],
            3,
            1,
        )
        submit = rig.ring.submits[-1]
        assert submit.envelope.tenant == "smg" and isinstance(submit.work, Generate)
        assert isinstance(submit.work.prompt, TokenPrompt) and list(ints(submit.work.prompt.ids)) == [5, 6, 7]
        assert (submit.work.params.temperature, submit.work.params.max_tokens) == (0.0, 3)


async def test_without_a_stream_each_output_is_one_answer_with_log_probabilities_and_drafts() -> None:
    async with serving() as (rig, client):
        rig.ring.script = lambda submit: rig.ring.play(*scored(submit))
        (answer,) = [one async for one in client.generate(sampling_params=vllm.SamplingParams(logprobs=2))]
        end = answer.complete
        assert (list(end.output_ids), end.spec_draft_tokens, end.spec_accepted_tokens) == ([0, 1], 3, 1)
        assert list(end.output_logprobs.token_logprobs) == [-0.5, -0.5]
        assert [list(one.token_ids) for one in end.output_logprobs.top_logprobs] == [[4, 9], [4, 9]]


def ended(submit: Submit, reason: FinishReason, **fields: Any) -> Text:  # noqa: ANN401 # any field
    return msgspec.structs.replace(text_of(submit, 0, "a", first=True, last=True), finish=reason, **fields)


@pytest.mark.parametrize(
    ("reason", "fields", "told"),
    [
        (FinishReason.EOS, {}, ("stop", None)),
        (FinishReason.STOP_TOKEN, {}, ("stop", "matched_token_id")),
        (FinishReason.STOP_STRING, {"stop_match": "a"}, ("stop", "matched_stop_str")),
        (FinishReason.CANCELLED, {}, ("abort", None)),
    ],
)
async def test_an_end_says_what_matched(reason: FinishReason, fields: Any, told: tuple[str, str | None]) -> None:  # noqa: ANN401
    async with serving() as (rig, client):
        rig.ring.script = lambda submit: rig.ring.play(ended(submit, reason, **fields))
        (answer,) = [one async for one in client.generate()]
        assert (answer.complete.finish_reason, answer.complete.WhichOneof("matched_stop")) == told


async def test_abort_ends_the_generations_of_an_id_and_no_others() -> None:
    async with serving() as (rig, client):
        rig.ring.script = lambda submit: rig.ring.play(text_of(submit, 0, "a", first=True))
        calls = [client.generate(stream=True, request_id=name) for name in ("x", "x", "y")]
        for call in calls:
            await call.read()
        asked = vllm.AbortRequest(request_ids=["x", "unknown"])
        await client.ask("Abort", asked, vllm.AbortResponse)
        assert [await call.code() for call in calls[:2]] == [grpc.StatusCode.CANCELLED] * 2
        assert len(rig.lane.manager.requests) == 1
        calls[2].cancel()
        await rig.ring.until(lambda: len(rig.ring.cancels) == 3)


async def test_what_cannot_be_done_is_refused_by_name() -> None:
    async with serving() as (_, client):
        call = client.generate(sampling_params=vllm.SamplingParams(structural_tag="{}"))
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (await call.details()).startswith("sampling_params.structural_tag: ")
        with pytest.raises(grpc.aio.AioRpcError, match="tokenized: is missing"):
            await client.ask("Embed", vllm.EmbedRequest(), vllm.EmbedResponse)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.ask("FlushCache", common.FlushCacheRequest(), common.FlushCacheResponse)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        loads = client.ask("GetLoads", vllm.GetLoadsRequest(dp_rank=1), vllm.GetLoadsResponse)
        with pytest.raises(grpc.aio.AioRpcError, match="dp_rank"):
            await loads


async def test_a_vector_of_a_prompt() -> None:
    async with serving() as (rig, client):
        vector = array("f", [0.5, -1.0]).tobytes()
        found = Embedded((vector,), (3,), 0, Timings())
        rig.ring.script = lambda submit: rig.lane.handle(Result(submit.envelope, found))
        asked = vllm.EmbedRequest(request_id="r", tokenized=vllm.TokenizedInput(input_ids=[5, 6, 7]))
        answer = await client.ask("Embed", asked, vllm.EmbedResponse)
        assert (list(answer.embedding), answer.prompt_tokens, answer.embedding_dim) == ([0.5, -1.0], 3, 2)
        work = rig.ring.submits[-1].work
        assert isinstance(work, Embed) and rig.ring.submits[-1].envelope.tenant == "smg"


async def test_health_says_why_not() -> None:
    async with serving() as (rig, client):
        health = await client.ask("HealthCheck", vllm.HealthCheckRequest(), vllm.HealthCheckResponse)
        assert (health.healthy, health.message) == (True, "")
        rig.gateway.leave()
        health = await client.ask("HealthCheck", vllm.HealthCheckRequest(), vllm.HealthCheckResponse)
        assert not health.healthy and "shutting down" in health.message


async def test_model_server_and_load_are_described() -> None:
    async with serving() as (rig, client):
        load = Load(num_waiting=1, num_running=2, num_blocks=10, num_free_blocks=4, block_size=16, tokens_per_s=5.0)
        rig.lane.handle(Report("e0", 1, load, served_token=True))
        model = await client.ask("GetModelInfo", vllm.GetModelInfoRequest(), vllm.GetModelInfoResponse)
        assert (model.served_model_name, model.max_context_length, list(model.eos_token_ids)) == ("toy", 1000, [2])
        assert json.loads(model.default_sampling_params_json)["top_p"] == 1.0
        info = await client.ask("GetServerInfo", vllm.GetServerInfoRequest(), vllm.GetServerInfoResponse)
        assert (info.block_size, info.data_parallel_size, info.constrained_decoding_start) == (16, 1, "first_token")
        (one,) = (await client.ask("GetLoads", vllm.GetLoadsRequest(), vllm.GetLoadsResponse)).loads
        assert (one.num_running_reqs, one.num_waiting_reqs, one.num_used_tokens) == (2, 1, 96)
        assert (one.max_total_num_tokens, one.token_usage, one.gen_throughput) == (160, 0.6, 5.0)


async def test_the_tokenizer_comes_whole_with_its_digest(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"t" * 100_000)
    (tmp_path / "config.json").write_text("{}")
    model = dataclasses.replace(MODEL, tokenizer=TokenizerFiles.of(tmp_path))
    chosen = settings(vllm_listen="127.0.0.1:0", model=model)
    async with serving(chosen) as (_, client):
        chunks = [
            one async for one in client.stream("GetTokenizer", common.GetTokenizerRequest(), common.GetTokenizerChunk)
        ]
        data = b"".join(one.data for one in chunks)
        assert [one.sha256 for one in chunks] == ["", hashlib.sha256(data).hexdigest()]
        assert zipfile.ZipFile(io.BytesIO(data)).namelist() == ["tokenizer.json", "config.json"]
        (tmp_path / "config.json").write_text("{ }")
        call = client.stream("GetTokenizer", common.GetTokenizerRequest(), common.GetTokenizerChunk)
        assert await call.code() == grpc.StatusCode.UNAVAILABLE


async def test_every_method_is_a_coroutine_and_has_its_scope() -> None:
    async with running(wait=False) as rig:
        table = VllmEngine(rig.gateway.service, rig.lane, lambda: 0.0).table()
        assert all(inspect.iscoroutinefunction(handler) for handler in table.values())
        names = {f"/{SERVICE.full_name}/{method.name}" for method in SERVICE.methods}
        assert names >= {f"/{SERVICE.full_name}/{name}" for name in table}
        assert names == {name for name in guard.SCOPES if name.startswith("/vllm.")}


def written_access(folder: Path) -> Path:
    """An access file of one key and one certificate."""
    file = folder / "access.toml"
    key = f'[[keys]]\nsha256 = "{digest_of("k").hex()}"\ntenant = "acme"\nscopes = ["generate"]\n'
    file.write_text(f'{key}[[certificates]]\nname = "front"\ntenant = "front"\nscopes = ["generate"]\n')
    return file


async def test_this_host_needs_no_key_although_the_contracts_callers_do(tmp_path: Path) -> None:
    chosen = dataclasses.replace(HERE, access_file=written_access(tmp_path), tls=written(tmp_path, Authority()))
    async with running(chosen, wait=False) as rig:
        await rig.ring.until(lambda: rig.gateway.is_serving)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.gateway.vllm_port}", options=LOCAL) as channel:
            rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a"]))
            answers = [one async for one in VllmClient(channel).generate()]
        assert len(answers) == 1 and rig.ring.submits[-1].envelope.tenant == "smg"


async def reached(port: int, authority: Authority, name: str) -> grpc.StatusCode:
    """The status of a generation whose caller shows a certificate."""
    pair = authority.issue(name)
    credentials = grpc.ssl_channel_credentials(authority.pem, pair.key, pair.certificate)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=LOCAL) as channel:
        call = VllmClient(channel).generate()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.read()
            await call.read()
        return await call.code()


async def test_elsewhere_a_certificate_is_the_callers_identity(tmp_path: Path) -> None:
    authority = Authority()
    tls = written(tmp_path, authority, mutual=True)
    chosen = settings(vllm_listen="0.0.0.0:0", tls=tls, access_file=written_access(tmp_path))
    async with running(chosen, wait=False) as rig:
        await rig.ring.until(lambda: rig.gateway.is_serving)
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a"]))
        assert await reached(rig.gateway.vllm_port, authority, "front") is grpc.StatusCode.OK
        assert rig.ring.submits[-1].envelope.tenant == "front"
        assert await reached(rig.gateway.vllm_port, authority, "other") is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("mutual", [None, False])
async def test_an_address_for_others_without_certificates_is_refused(tmp_path: Path, mutual: bool | None) -> None:
    tls = None if mutual is None else written(tmp_path, Authority(), mutual=mutual)
    with pytest.raises(ServiceError, match=r"--vllm-listen: .* bring no key"):
        async with running(settings(vllm_listen="0.0.0.0:7", tls=tls, insecure=True), wait=False):
            raise AssertionError("it listens")
