"""Chooses the model that answers a request."""

import secrets
from typing import TypeVar

from sluice.v1 import types_pb2

from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.contract.served import OfModel
from sluice_server.services.gateway.models.registry import Models, Served

_L = TypeVar("_L", bound=Served)


def chosen(models: Models[_L], call: CallMetadata, asked: OfModel) -> _L:
    """Returns the model that a request names, or the default. Of an alias for several, a tenant's requests with one
    idempotency key, or else with one session, get the same. Raises `ServiceError`."""
    name = asked.model if asked.HasField("model") else None
    revision = asked.revision if asked.HasField("revision") else ""
    key = asked.idempotency_key if isinstance(asked, types_pb2.GenerationSpec) else ""
    key = key or call.session or secrets.token_hex(8)
    tenant = call.caller.tenant
    return models.chosen_for(tenant, name, revision, f"{tenant}\0{key}")
