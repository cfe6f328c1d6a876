"""Makes the products that an adapter adds to a model's layers, from its matrices and how the model's were packed."""

from collections.abc import Callable, Iterator, Mapping

from sluice_server.engine.adapters.config import invalid_adapter
from sluice_server.engine.adapters.files import LowRank
from sluice_server.engine.adapters.folder import no_rest
from sluice_server.engine.adapters.folding import fold
from sluice_server.engine.models.layers.sides import LINEARS, AdapterProducts, Folding, LayerProducts
from sluice_server.kernels.formats.side_products import Side

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
    between linears, and between the copies of their matrices.

    Raises ServiceError ADAPTER_INVALID if a part of it would not be used.
    """
    found: list[dict[str, Side]] = [{} for _ in range(num_layers)]
    for index, linear, folding in linears_of(parts, foldings, num_layers, rest):
        shards = num_shards if linear in ROW_PARALLEL else 1
        side = fold(folding.parts, parts, norm=folding.norm, orders=folding.orders, num_shards=shards)
        if side is not None:
            found[index][linear] = side
    return AdapterProducts((LayerProducts(**sides) for sides in found), rest)


def linears_of(
    parts: Mapping[str, LowRank], foldings: Mapping[str, Folding], num_layers: int, rest: Callable[[], None]
) -> Iterator[tuple[int, str, Folding]]:
    """Yields the linears that adapters can change: layer, name and how it was packed; calls `rest` between them.

    Raises ServiceError ADAPTER_INVALID at the end if a part of the adapter belongs to none of them.
    """
    unused = set(parts)
    for index in range(num_layers):
        for linear, names in LINEARS.items():
            rest()
            keys = (f"model.layers.{index}.{name}" for name in names)
            folding = next((foldings[key] for key in keys if key in foldings), None)
            if folding is not None:
                unused.difference_update(name for name, _ in folding.parts)
                yield index, linear, folding
    if unused:
        raise invalid_adapter(f"{min(unused)} is no linear of this model that adapters can change")
