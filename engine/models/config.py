"""Parses a checkpoint's config.json and generation_config.json as data into one frozen value.

Depends on the standard library only, as processes without torch read it too. Nothing named in a file is imported or run
(auto_map and trust_remote_code have no effect). Errors name file, field and value.
"""

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from sluice_server.engine.checks import check_params
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.assumed import ASSUMED
from sluice_server.engine.models.bare import CLASSIFIERS, HEADLESS, check_causal
from sluice_server.engine.models.by_layer import RopeConfig, check_rotary, read_ropes, read_rotated, read_windows
from sluice_server.engine.models.encoders.config import EncoderConfig
from sluice_server.engine.models.expert_fields import ExpertsConfig, read_experts
from sluice_server.engine.models.fields import MENDING, Fields, Json, invalid_model, read_json, shown
from sluice_server.engine.models.labels import LabelsConfig, read_labels
from sluice_server.engine.models.not_built import check_built
from sluice_server.engine.models.stored_form import StoredForm, read_stored_form
from sluice_server.engine.models.text_model import text_fields
from sluice_server.engine.models.word_labels import read_words
from sluice_server.engine.parameter_kinds import Number
from sluice_server.engine.parameters import FROM_MODEL
from sluice_server.engine.request import Limits, SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a transformer: a decoder, or an encoder if `encoder` is set.

    Attributes:
        architecture: of the text model, in a checkpoint that also takes images.
        head_dim: may differ from hidden_size / num_heads.
        windows: per layer, the sliding window in tokens, or None for full attention.
        eos_ids: ids that end an output, of both files.
        defaults: sampling parameters of generation_config.json, else neutral ones; temperature 0 if it says do_sample:
            false.
        stored: the format of matrices of a quantised checkpoint; None if it has none.
        experts: of layers with routed experts; None if there are none.
        activation: of the MLP's gate: silu, gelu_tanh for GELU's tanh approximation, or an unsupported name as it is.
        local_rope: rotary embedding of layers with a window, if it differs from `rope`.
        query_scalar: attention scores are divided by its root; None if the file has none.
        score_cap, logit_cap: soft-caps of attention scores and of logits; 0 for none. These, the scalar and what
            follows are read from any file, and used where the architecture does.
        rotated: per layer, whether queries and keys are rotated.
        qkv_bias: whether query, key and value have biases, where attention_bias is not the field for it.
        embedding_multiplier, residual_multiplier, attention_multiplier, logits_scaling: factors of embeddings, of what
            joins the residual stream and of attention scores, and a divisor of logits.
        generates: whether the checkpoint is of a model with a head; else it is for vectors or classes only.
        labels: of the classification head, also one that is two rows of the head for logits; None without one.
        encoder: what an encoder has besides; None for a decoder. Its `windows` count the tokens on either side.
        calibration: ids that are observed when weights are rounded; random ones without.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    context_length: int
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_ids: tuple[int, ...]
    dtype: str
    defaults: SamplingParams
    stored: StoredForm | None = None
    experts: ExpertsConfig | None = None
    activation: str = "silu"
    local_rope: RopeConfig | None = None
    query_scalar: float | None = None
    score_cap: float = 0.0
    logit_cap: float = 0.0
    rotated: tuple[bool, ...] = ()
    qkv_bias: bool = True
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0
    generates: bool = True
    labels: LabelsConfig | None = None
    encoder: EncoderConfig | None = None
    calibration: tuple[int, ...] = ()

    @property
    def rotary_dim(self) -> int:
        """The numbers of a head that are rotated."""
        return int(self.head_dim * self.rope.partial)


@dataclasses.dataclass(frozen=True, slots=True)
class HeadConfig:
    """The configuration of an EAGLE-3 head.

    Attributes:
        layer: of its only layer; the vocabulary is the target's.
        draft_vocab_size: ids that it can propose.
        behind: layers of the target behind which it reads hidden states; empty: the default of published heads.
    """

    layer: ModelConfig
    draft_vocab_size: int
    behind: tuple[int, ...]


MAX_EOS_IDS = 1024
ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}  # name in files → name in `kernels.reference.elementwise`


def read_config(directory: Path, plugged: Collection[str] = ()) -> ModelConfig:
    """Reads a checkpoint directory; `plugged` are the architectures of plugins.

    Raises ServiceError MODEL_INVALID naming file, field and value.
    """
    whole = Fields(directory / "config.json", read_json(directory / "config.json"))
    named = named_architecture(whole)
    if named not in plugged:
        check_built(named)
    architecture, values = text_fields(HEADLESS.get(named, named), whole)
    raw = Fields(whole.path, {**ASSUMED.get(architecture, {}), **values})
    generation_path = directory / "generation_config.json"
    generation = Fields(generation_path, read_json(generation_path) if os.path.lexists(generation_path) else {})
    check_causal(raw)
    hidden, (heads, kv_heads) = raw.integer("hidden_size"), _heads(raw)
    layers, vocab = raw.integer("num_hidden_layers"), raw.integer("vocab_size")
    context = raw.integer("max_position_embeddings")
    rope, local_rope = read_ropes(raw)
    head_dim = raw.integer("head_dim", hidden // heads)
    for one in (rope, local_rope or rope):
        check_rotary(raw, one, head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=raw.integer("intermediate_size"),
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=read_windows(raw, layers, architecture),
        context_length=context,
        tied_embeddings=raw.boolean("tie_word_embeddings", False),
        attention_bias=raw.boolean("attention_bias", False),
        mlp_bias=raw.boolean("mlp_bias", False),
        eos_ids=_eos_ids(vocab, raw, generation),
        dtype=raw.string("dtype", raw.string("torch_dtype", "float32")),
        defaults=_defaults(generation, Limits(context, vocab)),
        stored=read_stored_form(raw),
        experts=read_experts(raw, layers),
        activation=_activation(raw, architecture),
        local_rope=local_rope,
        query_scalar=raw.maybe("query_pre_attn_scalar"),
        score_cap=raw.maybe("attn_logit_softcapping") or 0.0,
        logit_cap=raw.maybe("final_logit_softcapping") or 0.0,
        rotated=read_rotated(raw, layers),
        qkv_bias=raw.boolean("qkv_bias", True),
        embedding_multiplier=raw.number("embedding_multiplier", 1.0),
        residual_multiplier=raw.number("residual_multiplier", 1.0),
        attention_multiplier=raw.number("attention_multiplier", 1.0),
        logits_scaling=raw.number("logits_scaling", 1.0),
        generates=named not in HEADLESS,
        labels=read_labels(raw) if named in CLASSIFIERS else read_words(directory, vocab),
    )


def named_architecture(whole: Fields) -> str:
    """Returns the architecture that a config.json names. Raises ServiceError MODEL_INVALID if it names none."""
    found = whole.values.get("architectures")
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise whole.wrong("architectures", f"is missing; it names the model class: {MENDING}")
    return found[0]


def read_head_config(directory: Path) -> HeadConfig:
    """Reads the directory of an EAGLE-3 head. Raises ServiceError like `read_config`."""
    layer = read_config(directory)
    raw = Fields(directory / "config.json", read_json(directory / "config.json"))
    if layer.num_layers != 1:
        raise raw.wrong("num_hidden_layers", f"is {layer.num_layers}; an EAGLE-3 head has 1 layer")
    if layer.stored is not None:
        text = f"is {layer.stored.method!r}; an EAGLE-3 head must not be quantised"
        raise raw.wrong("quantization_config.quant_method", text)
    if layer.rope.partial != 1.0:
        raise raw.wrong("partial_rotary_factor", f"is {layer.rope.partial}; an EAGLE-3 head is supported with 1.0")
    if layer.activation not in ACTIVATIONS.values():
        raise raw.wrong("hidden_act", f"is {shown(layer.activation)}; supported are {', '.join(ACTIVATIONS)}")
    return HeadConfig(layer, raw.integer("draft_vocab_size", layer.vocab_size), _behind(raw))


def _activation(raw: Fields, architecture: str) -> str:
    """Returns the gate's activation, by the kernels' name if supported. `hidden_activation` is the newer field."""
    name = "hidden_act" if raw.values.get("hidden_activation") is None else "hidden_activation"
    value = raw.string(name, "silu")
    if architecture == "GemmaForCausalLM" and value == "gelu":  # this file means the tanh approximation
        return "gelu_tanh"
    return ACTIVATIONS.get(value, value)


def _heads(raw: Fields) -> tuple[int, int]:
    """Returns the number of query heads and of key/value heads; the second must divide the first."""
    heads = raw.integer("num_attention_heads")
    kv_heads = raw.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        text = f"is {kv_heads}, which does not divide num_attention_heads, {heads}: {MENDING}"
        raise raw.wrong("num_key_value_heads", text)
    return heads, kv_heads


def _behind(raw: Fields) -> tuple[int, ...]:
    """Returns the layers behind which hidden states are read; they are spelled in two ways.

    At the top level a number counts the layers before the hidden states; in eagle_config it is the index of the last of
    these layers, from 0.
    """
    nested = raw.values.get("eagle_config")
    fields, more = (nested, 1) if isinstance(nested, dict) else (raw.values, 0)
    found = fields.get("eagle_aux_hidden_state_layer_ids")
    if found is None:
        return ()
    if not isinstance(found, list) or not all(type(one) is int for one in found):
        text = f"is {shown(found)}; it must be a list of whole numbers: {MENDING}"
        raise raw.wrong("eagle_aux_hidden_state_layer_ids", text)
    return tuple(cast("int", one) + more for one in found)


def _eos_ids(vocab_size: int, *files: Fields) -> tuple[int, ...]:
    """Returns the ids of all files, each once. Raises ServiceError for an id outside the vocabulary."""
    ids = dict.fromkeys(token for file in files for token in _ids_of(file, vocab_size))
    if len(ids) > MAX_EOS_IDS:
        raise files[0].wrong("eos_token_id", f"names {len(ids)} ids; at most {MAX_EOS_IDS} are served: {MENDING}")
    return tuple(ids)


def _ids_of(file: Fields, vocab_size: int) -> Iterator[int]:
    value = file.values.get("eos_token_id")
    ids: list[Json] = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise file.must_be("eos_token_id", f"one or more ids from 0 to {vocab_size - 1}, below vocab_size")
        yield token


def _defaults(generation: Fields, limits: Limits) -> SamplingParams:
    """Returns the default sampling parameters, checked against the same limits as a client's."""
    found: dict[str, Any] = {row.name: value for row in FROM_MODEL if (value := _default(row, generation)) is not None}
    if generation.values.get("do_sample") is not None and not generation.boolean("do_sample", True):
        found["temperature"] = 0.0
    defaults = dataclasses.replace(SamplingParams(), **found)
    try:
        check_params(defaults, limits)
    except ServiceError as error:
        raise invalid_model(generation.path, f"{error.message}: {MENDING}") from None
    return defaults


def _default(row: Number, generation: Fields) -> float | None:
    """Returns the value of one parameter, or None if the file has none."""
    if generation.values.get(row.name) is None:
        return None
    if row.type is float:
        return generation.number(row.name, row.neutral)
    return max(0, generation.integer(row.name))  # -1 keeps all, as in other engines
