"""Loading and unloading of adapters over HTTP, by vLLM's routes."""

import grpc
import msgspec
from sluice.v1 import control_pb2, control_pb2_grpc
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from sluice_server.services.edge.errors import naming
from sluice_server.services.edge.names import FieldNames
from sluice_server.services.edge.requests import metadata_of, read_body
from sluice_server.services.edge.wire import decode

NAMES = FieldNames({"adapter": "lora_name", "path": "lora_path", "base_model": "base_model_name"})


class LoadAdapterBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of /v1/load_lora_adapter. `lora_path` is below the server's folder of adapters. A name that is taken
    goes to the new adapter, with `load_inplace` or without."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False


class UnloadAdapterBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of /v1/unload_lora_adapter. `lora_int_id` is a number of vLLM's own, which means nothing here."""

    lora_name: str
    lora_int_id: int | None = None


class AdapterRoutes:
    """The handlers of both routes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._control: control_pb2_grpc.ControlServiceAsyncStub = control_pb2_grpc.ControlServiceStub(channel)

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter."""
        asked = decode(await read_body(request), LoadAdapterBody)
        wanted = control_pb2.LoadAdapterRequest(
            adapter=asked.lora_name, path=asked.lora_path, base_model=asked.base_model_name
        )
        with naming(NAMES):
            await self._control.LoadAdapter(wanted, metadata=metadata_of(request))
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter."""
        asked = decode(await read_body(request), UnloadAdapterBody)
        with naming(NAMES):
            wanted = control_pb2.UnloadAdapterRequest(adapter=asked.lora_name)
            await self._control.UnloadAdapter(wanted, metadata=metadata_of(request))
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")
