"""Reads the fields of config.json on routed experts. Depends on the standard library only."""

import dataclasses

from sluice_server.engine.models.fields import MENDING, Fields

SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # constants of gpt-oss's gate, fixed in the kernels
COUNTS = ("num_experts", "num_local_experts")  # spellings of one field


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Routed experts of a model.

    Attributes:
        num: experts of a layer.
        per_token: experts that a token is routed to.
        intermediate_size: of one expert.
        renormalises: whether a token's expert weights are scaled to add up to 1, where the architecture leaves it open.
        layers: per layer, whether it has experts; the others are dense.
        shared_size: intermediate size of the expert that every token goes through, where the architecture has one; 0
            without.
    """

    num: int
    per_token: int
    intermediate_size: int
    renormalises: bool
    layers: tuple[bool, ...]
    shared_size: int = 0


def read_experts(raw: Fields, num_layers: int) -> ExpertsConfig | None:
    """Returns the experts, or None if there are none. Raises ServiceError MODEL_INVALID."""
    name = next((name for name in COUNTS if raw.values.get(name) not in (None, 0)), None)
    if name is None:
        return None
    num, per_token = raw.integer(name), raw.integer("num_experts_per_tok")
    if per_token > num:
        raise raw.wrong("num_experts_per_tok", f"is {per_token}; {name} is {num}: {MENDING}")
    for field, known in SWIGLU.items():
        if raw.number(field, known) != known:
            raise raw.wrong(field, f"is {raw.values[field]}; supported is {known}")
    return ExpertsConfig(
        num=num,
        per_token=per_token,
        intermediate_size=raw.integer("moe_intermediate_size", raw.integer("intermediate_size")),
        renormalises=raw.boolean("norm_topk_prob", False),
        layers=_layers(raw, num_layers),
        shared_size=int(raw.maybe("shared_expert_intermediate_size") or 0),
    )


def _layers(raw: Fields, num_layers: int) -> tuple[bool, ...]:
    """Returns which layers have experts: every `decoder_sparse_step`th, except those of `mlp_only_layers`."""
    step, dense = raw.integer("decoder_sparse_step", 1), raw.values.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(one) is int and 0 <= one < num_layers for one in dense):
        raise raw.must_be("mlp_only_layers", f"a list of layers from 0 to {num_layers - 1}")
    left = frozenset(dense)
    return tuple((layer + 1) % step == 0 and layer not in left for layer in range(num_layers))
