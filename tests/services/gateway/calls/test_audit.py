"""The audit log: each operator's call has a line, with who, what and the end, and nothing that is private."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from sluice.v1 import control_pb2

from sluice_server.services.gateway.access.identity import digest_of
from sluice_server.services.gateway.calls import audit, server
from sluice_server.services.gateway.calls.guard import ADMIN, SCOPES
from sluice_server.services.gateway.gateway import Gateway
from sluice_server.services.gateway.vllm.service import SERVICE as VLLM
from tests.services.gateway.fake_ring import running, settings, unary_request

HIDDEN = {"settings"}  # of a model: a later one may be a secret
PARENT = ("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01")


def bearer(key: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {key}")


def access(directory: Path) -> Path:
    file = directory / "access.toml"
    keys = (("admin", "ops", "admin"), ("user", "acme", "generate"))
    lines = [
        f'[[keys]]\nsha256 = "{digest_of(key).hex()}"\ntenant = "{tenant}"\nscopes = ["{scope}"]\n'
        for key, tenant, scope in keys
    ]
    file.write_text("".join(lines))
    return file


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def until(path: Path, num: int) -> list[dict[str, Any]]:
    """The lines, once there are so many: a refused call's is written when its client knows."""
    async with asyncio.timeout(10):
        while len(lines_of(path)) < num:
            await asyncio.sleep(0)
    return lines_of(path)


async def code_of(call: Any) -> grpc.StatusCode:  # noqa: ANN401 # of any method
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if hasattr(call, "read") else call)
    return caught.value.code()


@pytest.mark.parametrize("service", [server.CONTROL, VLLM], ids=lambda one: str(one.name))
def test_every_field_that_an_operator_sends_is_shown_or_known_to_be_hidden(service: ServiceDescriptor) -> None:
    named = {
        field.name
        for method in service.methods
        if SCOPES.get(f"/{service.full_name}/{method.name}", ADMIN) == ADMIN
        for field in method.input_type.fields
    }
    assert not audit.SHOWN & HIDDEN
    assert named - audit.SHOWN <= HIDDEN


async def test_each_call_has_a_line_whether_answered_or_refused(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    async with running(settings(access_file=access(tmp_path), audit_log=str(log))) as rig:
        clear = control_pb2.ClearCacheRequest(process="e9", tenant="acme")
        assert await code_of(rig.control.ClearCache(clear, metadata=(bearer("admin"), PARENT))) == (
            grpc.StatusCode.NOT_FOUND
        )
        alias = control_pb2.SetAliasRequest(alias="a")
        assert await code_of(rig.control.SetAlias(alias, metadata=(bearer("user"),))) == (
            grpc.StatusCode.PERMISSION_DENIED
        )
        assert await code_of(rig.control.Drain(control_pb2.DrainRequest())) == grpc.StatusCode.UNAUTHENTICATED
        async for _ in rig.control.Drain(control_pb2.DrainRequest(), metadata=(bearer("admin"),)):
            pass
        await until(log, 4)
    assert log.stat().st_mode & 0o777 == 0o600
    cleared, aliased, stranger, drained = lines_of(log)
    about = {name: cleared[name] for name in ("process", "method", "tenant", "trace_id", "request", "code", "reason")}
    assert about == {
        "process": "g0",
        "method": "sluice.v1.ControlService/ClearCache",
        "tenant": "ops",
        "trace_id": "ab" * 16,
        "request": {"process": "e9", "tenant": "acme"},
        "code": "NOT_FOUND",
        "reason": "PROCESS_NOT_FOUND",
    }
    assert cleared["peer"].startswith("ipv4:127.0.0.1:") and cleared["duration_s"] >= 0.0
    assert (aliased["tenant"], aliased["code"], aliased["reason"]) == ("", "PERMISSION_DENIED", "NOT_ALLOWED")
    assert (stranger["tenant"], stranger["reason"]) == ("", "CREDENTIALS_INVALID")
    assert (drained["tenant"], drained["code"], drained["reason"]) == ("ops", "OK", "")


async def test_what_clients_ask_for_has_none_and_keys_and_settings_do_not_appear(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    async with running(settings(access_file=access(tmp_path), audit_log=str(log))) as rig:
        await code_of(rig.stub.Generate(unary_request(text="secret"), metadata=(bearer("admin"),)))
        await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest(), metadata=(bearer("admin"),))
        assert lines_of(log) == []
        load = control_pb2.LoadModelRequest(model="m", settings={"api_key": "secret"})
        await code_of(rig.control.LoadModel(load, metadata=(bearer("admin"),)))
        (line,) = await until(log, 1)
    assert line["request"] == {"model": "m"}
    assert not any(word in log.read_text() for word in ("secret", "Bearer", "api_key"))


async def test_long_fields_are_cut(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    async with running(settings(audit_log=str(log))) as rig:
        await code_of(rig.control.SetAlias(control_pb2.SetAliasRequest(alias="a" * 5000)))
        (line,) = await until(log, 1)
    assert len(line["request"]) == audit.MAX_CHARS


async def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    async with running(settings(audit_log=str(log))) as rig:
        for name in ("old.jsonl", "older.jsonl"):
            await code_of(rig.control.SetAlias(control_pb2.SetAliasRequest(alias=name)))
            assert [one["request"]["alias"] for one in await until(log, 1)] == [name]
            log.rename(tmp_path / name)


async def test_strangers_do_not_fill_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "STRANGERS_PER_S", 2)
    path, now_s = tmp_path / "audit.jsonl", [0.0]
    log = audit.AuditLog(str(path), "g0", lambda: now_s[0])

    def prepare(gateway: Gateway) -> None:
        gateway._guard = audit.Audited(gateway._guard, log)

    async with running(settings(access_file=access(tmp_path)), prepare=prepare) as rig:
        for _ in range(5):
            await code_of(rig.control.Drain(control_pb2.DrainRequest()))
        async with asyncio.timeout(10):
            while log.num_left_out < 3:
                await asyncio.sleep(0)
        now_s[0] += 1.0
        await code_of(rig.control.Drain(control_pb2.DrainRequest()))
        assert [line.get("left_out") for line in await until(path, 3)] == [None, None, 3]


async def test_a_line_that_cannot_be_written_is_told_and_the_call_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        async with running(settings(audit_log=str(tmp_path / "gone" / "audit.jsonl"))) as rig:
            async for _ in rig.control.Drain(control_pb2.DrainRequest()):
                pass
            async with asyncio.timeout(10):
                while not caplog.records:
                    await asyncio.sleep(0)
    assert "audit.jsonl gets no line about this call: No such file" in caplog.text
