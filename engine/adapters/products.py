"""Makes the products that an adapter adds to a model's layers, from its matrices and how the model's were packed."""

from collections.abc import Callable, Mapping

from sluice_server.engine.adapters.config import invalid_adapter
from sluice_server.engine.adapters.files import LowRank, no_rest
from sluice_server.engine.adapters.folding import fold
from sluice_server.engine.models.layers.sides import AdapterProducts, Folding, LayerProducts
from sluice_server.kernels.formats.side_products import Side

# The first projection of each linear of a layer, with projections of their own or fused.
FIRST = {
    "qkv": ("self_attn.q_proj", "self_attn.qkv_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.gate_up_proj"),
    "down": ("mlp.down_proj",),
}


ROW_PARALLEL = ("output", "down")  # linears whose inputs ranks share out


def products_of(
    parts: Mapping[str, LowRank],
    foldings: Mapping[str, Folding],
    num_layers: int,
    num_shards: int = 1,
    rest: Callable[[], None] = no_rest,
) -> AdapterProducts:
    """Returns what the parts of an adapter add. `foldings`: of the model's linears, by their first projections.
    `num_shards`: partial products that this rank computes of a linear whose inputs ranks share out. `rest` is called
    between linears.

    Raises ServiceError ADAPTER_INVALID if a part of it would not be used.
    """
    unused = set(parts)
    layers = []
    for index in range(num_layers):
        found: dict[str, Side] = {}
        for linear, names in FIRST.items():
            rest()
            folding = next(
                (foldings[key] for name in names if (key := f"model.layers.{index}.{name}") in foldings), None
            )
            if folding is None:
                continue
            unused.difference_update(name for name, _ in folding.parts)
            shards = num_shards if linear in ROW_PARALLEL else 1
            side = fold(folding.parts, parts, norm=folding.norm, orders=folding.orders, num_shards=shards)
            if side is not None:
                found[linear] = side
        layers.append(LayerProducts(**found))
    if unused:
        raise invalid_adapter(f"{min(unused)} is no linear of this model that adapters can change")
    return AdapterProducts(layers)
