"""Reads the config.json of an encoder. Depends on the standard library only; errors name file, field and value."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sluice_server.engine.errors import unsupported
from sluice_server.engine.models.by_layer import FULL, WINDOWED, RopeConfig
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.encoders.config import EncoderConfig
from sluice_server.engine.models.encoders.families import CLASSIFIER, ENCODERS, FAMILIES, Family
from sluice_server.engine.models.fields import MENDING, Fields, read_json, shown
from sluice_server.engine.models.labels import read_labels
from sluice_server.engine.request import Pooling, SamplingParams

SENTENCES = "sentence_bert_config.json"  # sentence-transformers' settings of the encoder
ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "tanh": "tanh",
}  # name in files → name in `kernels.reference.encoders`
# What changes the computation and is not built: the only supported values of these fields.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "quantization_config": (None,),
    "auto_map": (None,),
    "rope_scaling": (None,),
    "embedding_size": (None,),
}
_POOLED = {"cls": Pooling.FIRST, "mean": Pooling.MEAN}
BUCKETS = 32  # of distances between tokens, in the only form that is published
_FIRST_PAD = 1  # of MPNet, whatever its file says


def read_encoder(directory: Path, architecture: str) -> ModelConfig:
    """Reads a checkpoint directory of a class in `ENCODERS`. Raises ServiceError MODEL_INVALID or UNIMPLEMENTED."""
    path = directory / "config.json"
    key = ENCODERS[architecture]
    family = FAMILIES[key]
    raw = _spelled(Fields(path, read_json(path)), family)
    for name, allowed in _PLAIN.items():
        if raw.values.get(name) not in allowed:
            text = f"{name} is {shown(raw.values[name])}; {architecture} is supported without it"
            raise unsupported(name, text)
    hidden, heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    if hidden % heads:
        text = f"is {heads}, which does not divide hidden_size, {hidden}: {MENDING}"
        raise raw.wrong("num_attention_heads", text)
    layers, eps = raw.integer("num_hidden_layers"), raw.number("layer_norm_eps", family.eps)
    encoder = _READERS[key](raw, key)
    context = raw.integer("max_position_embeddings") - encoder.first_position
    rotation = _read_rotation(raw, layers) if family.is_pre_normed else _unrotated(layers)
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=raw.integer("intermediate_size"),
        norm_eps=1e-12 if key == "distilbert" else eps,
        context_length=max(1, min(context, _most_tokens(directory, context))),
        tied_embeddings=True,
        attention_bias=raw.boolean("attention_bias", not family.is_pre_normed),
        mlp_bias=raw.boolean("mlp_bias", not family.is_pre_normed),
        eos_ids=(),
        dtype=raw.string("dtype", raw.string("torch_dtype", "float32")),
        defaults=SamplingParams(),
        activation=_activation(raw, "hidden_act", "gelu"),
        generates=False,
        labels=read_labels(raw) if architecture.endswith(CLASSIFIER) else None,
        encoder=encoder,
        **rotation,
    )


def _spelled(whole: Fields, family: Family) -> Fields:
    """Returns the fields by the names that they have here."""
    found = {name: whole.values[spelled] for name, spelled in family.fields.items() if spelled in whole.values}
    return Fields(whole.path, {**whole.values, **found})


def _most_tokens(directory: Path, context: int) -> int:
    """Returns the tokens of an input that sentence-transformers keeps, and that the model was therefore trained for."""
    path = directory / SENTENCES
    if not os.path.lexists(path):
        return context
    return Fields(path, read_json(path)).integer("max_seq_length", context)


def _activation(raw: Fields, name: str, default: str) -> str:
    value = raw.string(name, default)
    if value not in ACTIVATIONS:
        text = f"{name} {shown(value)} is not supported; supported are {', '.join(ACTIVATIONS)}"
        raise unsupported(name, text)
    return ACTIVATIONS[value]


def _bert(raw: Fields, key: str) -> EncoderConfig:
    return EncoderConfig(
        key, num_positions=raw.integer("max_position_embeddings"), num_types=raw.integer("type_vocab_size", 2)
    )


def _roberta(raw: Fields, key: str) -> EncoderConfig:
    pad = raw.integer("pad_token_id", 1)
    return _counted(raw, key, pad, num_types=raw.integer("type_vocab_size", 2))


def _mpnet(raw: Fields, key: str) -> EncoderConfig:
    buckets = raw.integer("relative_attention_num_buckets", BUCKETS)
    if buckets != BUCKETS:
        raise unsupported("relative_attention_num_buckets", f"{buckets} buckets of distances; supported are {BUCKETS}")
    return _counted(raw, key, _FIRST_PAD, num_buckets=buckets)


def _counted(raw: Fields, key: str, pad: int, num_types: int = 0, num_buckets: int = 0) -> EncoderConfig:
    """Returns the configuration of a family that counts the tokens which are no padding, behind the row of padding."""
    positions = raw.integer("max_position_embeddings")
    if positions <= pad + 1:
        text = f"is {positions}; the first position of this model is {pad + 1}: {MENDING}"
        raise raw.wrong("max_position_embeddings", text)
    return EncoderConfig(
        key,
        num_positions=positions,
        first_position=pad + 1,
        pad_id=pad,
        num_types=num_types,
        num_buckets=num_buckets,
    )


def _distilbert(raw: Fields, key: str) -> EncoderConfig:
    return EncoderConfig(key, num_positions=raw.integer("max_position_embeddings"), head_activation="relu")


def _modernbert(raw: Fields, key: str) -> EncoderConfig:
    pooled = raw.string("classifier_pooling", "cls")
    if pooled not in _POOLED:
        raise raw.must_be("classifier_pooling", f"one of {', '.join(_POOLED)}")
    return EncoderConfig(
        key,
        norm_bias=raw.boolean("norm_bias", False),
        head_activation=_activation(raw, "classifier_activation", "gelu"),
        head_bias=raw.boolean("classifier_bias", False),
        head_pooling=_POOLED[pooled],
    )


def _unrotated(layers: int) -> dict[str, Any]:
    """Returns windows and rotary embedding of a model without either."""
    return {"windows": (None,) * layers, "rope": RopeConfig()}


def _read_rotation(raw: Fields, layers: int) -> dict[str, Any]:
    """Returns windows and rotary embeddings; a window counts the tokens on either side."""
    newer = raw.within("rope_parameters") if raw.values.get("rope_parameters") is not None else None
    every, side = raw.integer("global_attn_every_n_layers", 3), raw.integer("local_attention", 128) // 2
    kinds = raw.values.get("layer_types")
    if kinds is None:
        kinds = [WINDOWED if num % every else FULL for num in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, WINDOWED) for kind in kinds):
        raise raw.must_be("layer_types", f"a list of {FULL} and {WINDOWED} for {layers} layers")
    return {
        "windows": tuple(side if kind == WINDOWED else None for kind in kinds),
        "rope": RopeConfig(_theta(raw, newer, FULL, "global_rope_theta", 160_000.0)),
        "local_rope": RopeConfig(_theta(raw, newer, WINDOWED, "local_rope_theta", 10_000.0)),
    }


def _theta(raw: Fields, newer: Fields | None, kind: str, older: str, default: float) -> float:
    if newer is None or newer.values.get(kind) is None:
        return raw.number(older, default)
    own = newer.within(kind)
    if own.string("rope_type", "default") != "default":
        raise unsupported("rope_type", f"rope_type {shown(own.values['rope_type'])} of an encoder is not supported")
    return own.number("rope_theta", raw.number(older, default))


_READERS: Mapping[str, Callable[[Fields, str], EncoderConfig]] = {
    "bert": _bert,
    "roberta": _roberta,
    "mpnet": _mpnet,
    "distilbert": _distilbert,
    "modernbert": _modernbert,
}
