"""The modules of a base that an adapter may change: names, inputs and outputs of the linears of its layers."""

import dataclasses
from collections.abc import Mapping

from sluice_server.engine.errors import unsupported
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.traits import ArchitectureTraits


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A linear of a layer, as a checkpoint has it: inputs, outputs, and which layer's and projection it is."""

    layer: int
    projection: str
    inputs: int
    outputs: int


def modules_of(config: ModelConfig, traits: ArchitectureTraits) -> Mapping[str, Module]:
    """Returns the modules of a base by their names in a checkpoint. Raises ServiceError for a base that has none.

    A layer with experts has those of its attention alone.
    """
    if config.encoder is not None:
        raise unsupported("adapter", f"adapters of {config.architecture} are not supported: it is an encoder")
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
    mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner)}
    if traits.is_fused:
        attention, mlp = {"qkv_proj": (hidden, queries + 2 * keys)}, {"gate_up_proj": (hidden, 2 * inner)}
    attention["o_proj"], mlp["down_proj"] = (queries, hidden), (inner, hidden)
    found = {}
    for layer in range(config.num_layers):
        has_experts = config.experts is not None and config.experts.layers[layer]
        parts = {"self_attn": attention} if has_experts else {"self_attn": attention, "mlp": mlp}
        for part, sizes in parts.items():
            for projection, (inputs, outputs) in sizes.items():
                name = f"model.layers.{layer}.{part}.{projection}"
                found[name] = Module(layer, projection, inputs, outputs)
    return found
