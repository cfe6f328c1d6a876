"""The families of encoders as data: their classes, and the names of their tensors and fields of config.json.

Depends on the standard library only.
"""

import dataclasses
from collections.abc import Iterator, Mapping

CLASSIFIER = "ForSequenceClassification"
_KINDS = ("Model", "ForMaskedLM", CLASSIFIER)


@dataclasses.dataclass(frozen=True, slots=True)
class HeadNames:
    """Names of a classification head: a dense layer, then the classes.

    Attributes:
        is_inside: whether the dense layer has the prefix of the encoder's tensors.
        norm: of the norm between both; "" for none.
    """

    dense: str
    classes: str
    norm: str = ""
    is_inside: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One family: where its tensors are, and how its files call what others call differently.

    Attributes:
        stems: of the names of its classes.
        prefix: of the encoder's tensors in a checkpoint of a model with a head.
        layers: prefix of its layers, before their number.
        qkv: queries, keys and values: three projections, or one of all.
        attention_norm, mlp_norm: behind attention and MLP, or before them in a family that `is_pre_normed`.
        final_norm: behind the last layer; "" for none.
        fields: names of fields in its config.json, by their names here.
        eps: of norms, where the file names none.
        is_gated: whether the MLP has a gate.
    """

    stems: tuple[str, ...]
    prefix: str
    head: HeadNames
    words: str = "embeddings.word_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    layers: str = "encoder.layer."
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    final_norm: str = ""
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    eps: float = 1e-12
    is_pre_normed: bool = False
    is_gated: bool = False

    @property
    def classes(self) -> Iterator[str]:
        """The names of its classes in config.json."""
        return (stem + kind for stem in self.stems for kind in _KINDS)


POSITIONS = "embeddings.position_embeddings"
TYPES = "embeddings.token_type_embeddings"
BIASES = "encoder.relative_attention_bias"
FAMILIES: Mapping[str, Family] = {
    "bert": Family(("Bert",), "bert.", HeadNames("pooler.dense", "classifier", is_inside=True)),
    "roberta": Family(
        ("Roberta", "XLMRoberta", "Camembert"), "roberta.", HeadNames("classifier.dense", "classifier.out_proj")
    ),
    "mpnet": Family(
        ("MPNet",),
        "mpnet.",
        HeadNames("classifier.dense", "classifier.out_proj"),
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        output="attention.attn.o",
        attention_norm="attention.LayerNorm",
    ),
    "distilbert": Family(
        ("DistilBert",),
        "distilbert.",
        HeadNames("pre_classifier", "classifier"),
        layers="transformer.layer.",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        output="attention.out_lin",
        attention_norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        mlp_norm="output_layer_norm",
        fields={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
    ),
    "modernbert": Family(
        ("ModernBert",),
        "model.",
        HeadNames("head.dense", "classifier", norm="head.norm"),
        words="embeddings.tok_embeddings",
        embedding_norm="embeddings.norm",
        layers="layers.",
        qkv=("attn.Wqkv",),
        output="attn.Wo",
        attention_norm="attn_norm",
        up="mlp.Wi",
        down="mlp.Wo",
        mlp_norm="mlp_norm",
        final_norm="final_norm",
        fields={"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"},
        eps=1e-5,
        is_pre_normed=True,
        is_gated=True,
    ),
}
ENCODERS: Mapping[str, str] = {  # by the name of a class in config.json
    name: key for key, family in FAMILIES.items() for name in family.classes
}
