"""What Triton's extensions say about the model: its configuration and the index of models. Pure."""

from collections.abc import Mapping

from sluice_server.services.gateway.oip.contract import open_inference_pb2 as oip
from sluice_server.services.gateway.oip.translate import INPUTS, OUTPUTS, TEXT, VERSION

TYPES = {"BYTES": oip.TYPE_STRING, "BOOL": oip.TYPE_BOOL, "UINT32": oip.TYPE_UINT32}


def config(model: str) -> oip.ModelConfig:
    """Returns the configuration: tensors of one element, no batches, and any number of responses to a request."""
    return oip.ModelConfig(
        name=model,
        platform="sluice",
        backend="sluice",
        max_batch_size=0,  # batches are made across requests
        input=[
            oip.ModelInput(name=one.name, data_type=TYPES[one.datatype], dims=[1], optional=one is not TEXT)
            for one in INPUTS.values()
        ],
        output=[oip.ModelOutput(name=one.name, data_type=TYPES[one.datatype], dims=[1]) for one in OUTPUTS.values()],
        model_transaction_policy=oip.ModelTransactionPolicy(decoupled=True),
    )


def index(models: Mapping[str, str], *, only_ready: bool) -> oip.RepositoryIndexResponse:
    """Returns the models; the value of each says why it takes no requests, "" if it does."""
    return oip.RepositoryIndexResponse(
        models=[
            oip.RepositoryIndexResponse.ModelIndex(
                name=model, version=VERSION, state="UNAVAILABLE" if why else "READY", reason=why
            )
            for model, why in models.items()
            if not (why and only_ready)
        ]
    )
