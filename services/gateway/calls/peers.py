"""The other gateways of this service; forwards calls to the gateway that owns a generation.

A generation's id names its gateway. Gateways reach each other by gRPC over Unix sockets beside their inboxes, in the
private directory of the service. A shared secret proves that a gateway forwards the call, and for which tenant.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import NoReturn

import grpc
from sluice.v1 import inference_pb2, inference_pb2_grpc

from sluice_server.services.gateway.access.metadata import Context
from sluice_server.services.gateway.contract.errors import not_found

PEER_KEY = "x-sluice-peer"
TENANT_KEY = "x-sluice-tenant"
CANCEL_TIMEOUT_S = 5.0
_GONE = "its gateway no longer has it, or is gone: resume with the effective spec and the ids received"


class PeerGateways:
    """Channels to the other gateways, opened on first use."""

    def __init__(self, own_id: str, addresses: Mapping[str, str], secret: str) -> None:
        """`addresses`: gRPC targets by gateway id."""
        self._own_id = own_id
        self._addresses = addresses
        self._secret = secret
        self._channels: dict[str, grpc.aio.Channel] = {}

    def is_other(self, owner: str) -> bool:
        """Whether `owner` is another gateway that this one can reach."""
        return owner != self._own_id and owner in self._addresses and bool(self._secret)

    def split(self, generation_id: str) -> tuple[str, str]:
        """Splits a public id into request id and gateway id. Without the id of a known gateway it returns the whole id
        and "", which matches no request: a bare request id is not a public id."""
        request_id, _, owner = generation_id.partition(".")
        return (request_id, owner) if owner == self._own_id or self.is_other(owner) else (generation_id, "")

    async def cancel(
        self, owner: str, tenant: str, request: inference_pb2.CancelGenerationRequest, context: Context
    ) -> inference_pb2.CancelGenerationResponse:
        """Forwards a cancel; ends this call with the owner's status. Raises ServiceError GENERATION_NOT_FOUND when the
        owner is gone or does not have the generation."""
        async with self._handed_on(request.generation_id, context):
            answer: inference_pb2.CancelGenerationResponse = await self._stub(owner).CancelGeneration(
                request, metadata=self._metadata(tenant), timeout=CANCEL_TIMEOUT_S
            )
            return answer
        raise AssertionError("unreachable")

    async def resume(
        self, owner: str, tenant: str, request: inference_pb2.ResumeGenerateRequest, context: Context
    ) -> None:
        """Forwards a resume and its events; ends this call with the owner's status. Raises ServiceError
        GENERATION_NOT_FOUND when the owner is gone or does not have the generation."""
        left_s = context.time_remaining()
        call = self._stub(owner).ResumeGenerate(request, metadata=self._metadata(tenant), timeout=left_s)
        try:
            async with self._handed_on(request.spec.resume.generation_id, context):
                async for event in call:
                    await context.write(event)
        finally:
            call.cancel()

    async def close(self) -> None:
        """Closes the channels."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    @contextlib.asynccontextmanager
    async def _handed_on(self, generation_id: str, context: Context) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            is_unreachable = error.code() is grpc.StatusCode.UNAVAILABLE and not _has_details(error)
            if is_unreachable or error.code() is grpc.StatusCode.NOT_FOUND:
                raise not_found("generation", generation_id, _GONE) from None
            await _end_alike(error, context)

    def _stub(self, owner: str) -> "inference_pb2_grpc.InferenceServiceAsyncStub":
        if owner not in self._channels:
            options = (("grpc.use_local_subchannel_pool", 1), ("grpc.default_authority", "localhost"))
            self._channels[owner] = grpc.aio.insecure_channel(self._addresses[owner], options=options)
        return inference_pb2_grpc.InferenceServiceStub(self._channels[owner])

    def _metadata(self, tenant: str) -> tuple[tuple[str, str], ...]:
        return ((PEER_KEY, self._secret), (TENANT_KEY, tenant))


def _has_details(error: grpc.aio.AioRpcError) -> bool:
    """Whether the status came from the other gateway, not from the transport."""
    return any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())


async def _end_alike(error: grpc.aio.AioRpcError, context: Context) -> NoReturn:
    trailers = tuple((key, value) for key, value in error.trailing_metadata() or ())
    await context.abort(error.code(), error.details() or "", trailers)
    raise AssertionError("abort raises")
