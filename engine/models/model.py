"""A loaded model: token ids and positions in, hidden states and logits out, over a paged cache.

`load_model` reads a checkpoint; `plan_model` builds the same on the meta device from shapes alone.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from sluice_server.engine.models.balanced import BalancedWeights, channel_pairs
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.fields import MENDING, invalid_model
from sluice_server.engine.models.layers.decoder import DecoderLayer, LayerLoader, Pack
from sluice_server.engine.models.layers.mlp_weights import make_mlp
from sluice_server.engine.models.observed import Observer, WeighingPack, observed_layers, random_ids
from sluice_server.engine.models.registry import traits_of
from sluice_server.engine.models.rope import rope_table
from sluice_server.engine.models.weights import Checkpoint, PlannedWeights, WeightSource
from sluice_server.kernels import gpu, ops
from sluice_server.kernels.cpu import memory
from sluice_server.kernels.formats.linear import gather
from sluice_server.kernels.layout.layout import new_layers
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.slots import GPU_ALIGN, SCALE_BYTES, slot_width

OBSERVED_BLOCK = 16  # tokens in a cache block while weights are observed
LAYERS = "model.layers."  # prefix of the tensor names of layers
HiddenStateHooks: TypeAlias = Mapping[
    int, Callable[[Tensor, Tensor, int], None]
]  # by layer: stores its hidden states by slot


def hooks_of(behind: tuple[int, ...], states: Tensor) -> HiddenStateHooks:
    """Returns hooks that store the hidden states behind these layers in `states`, side by side.

    `states`: bfloat16 [slots, len(behind) * hidden].
    """
    width = states.shape[1] // len(behind)
    return {num: ops.keeper(states, i * width, width) for i, num in enumerate(behind)}


class Model:
    """The weights of one model, packed for one device."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        num_positions: int,
        pack: Pack = ops.PLAIN,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.num_parameters = 0  # set by `load_model`
        self.layers_done = 0  # counts computed layers: tells a busy process from a stuck one
        self.on_layer: Callable[[], None] = _nothing  # called after each layer
        self.hidden_state_hooks: HiddenStateHooks = {}  # copy hidden states for an EAGLE-3 head
        self.is_fixed = False  # set by `fix`
        self.observed = ""  # names the observations by which weights were rounded; empty if there were none
        traits = traits_of(config)
        self.has_full_attention = None in traits.windows
        is_stored = config.stored is not None
        if pack.rounds and not is_stored:
            source = BalancedWeights(source, channel_pairs(config, traits))

        def loader_of(pack: Pack) -> LayerLoader:
            return LayerLoader(source, dtype, pack, is_stored=is_stored, norm_offset=traits.norm_offset)

        def make(index: int, loader: LayerLoader) -> DecoderLayer:
            return DecoderLayer(config, traits, index, loader, make_mlp(config, traits, index, loader))

        loader = loader_of(pack)
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embeddings = owned(source.get("model.embed_tokens.weight", (vocab, hidden)))
        self._scale = torch.tensor(hidden**0.5, dtype=dtype, device=device) if traits.scales_embeddings else None
        ropes = (config.rope,) if config.local_rope is None else (config.rope, config.local_rope)
        self._cis = [rope_table(config, num_positions, device, rope).unsqueeze(1) for rope in ropes]
        if pack.weighs and not is_stored and device.type == "cpu":
            observer, weighing = self._observer(num_positions), WeighingPack(pack)
            self._layers = [*observed_layers(make, loader_of, config.num_layers, observer, weighing)]
            self.observed = weighing.digest
        else:
            self._layers = [make(i, loader) for i in range(config.num_layers)]
        norm = loader.norm("model.norm", hidden)
        self._norm = loader.kept(norm)
        # A checkpoint may leave out a head that is tied.
        tied = config.tied_embeddings or not source.has("lm_head.weight")
        self._head = loader.head("model.embed_tokens" if tied else "lm_head", (vocab, hidden), norm)
        self._logit_cap = traits.logit_cap
        gather(linear for layer in self._layers for linear in layer.linears)
        self.kernel = self._head.kernel  # name of the kernel that multiplies
        self.notes = tuple(loader.notes)  # for the operator, about weight formats

    def _observer(self, num_positions: int) -> Observer:
        """Returns what computes random ids through layers as they are loaded."""
        ids = random_ids(self.config.vocab_size, num_positions).to(self.device)
        cache = self.new_cache(-(-len(ids) // OBSERVED_BLOCK), OBSERVED_BLOCK, torch.float32)[0]
        return Observer(self._embed(ids), [table[: len(ids)] for table in self._cis], cache, OBSERVED_BLOCK)

    def fix(self) -> None:
        """Makes the model batch-invariant: no bit of a row depends on the other rows. Slower where schedules change."""
        for layer in self._layers:
            layer.fix()
        self._head = self._head.fixed()
        self.is_fixed = True

    @property
    def slot_align(self) -> int:
        """The alignment of 8-bit slots; see `kernels.layout.slots`."""
        return GPU_ALIGN if gpu.takes(self.embeddings) else SCALE_BYTES

    def token_bytes(self, cache: torch.dtype) -> int:
        """Returns the bytes per token of a `new_cache` of that dtype."""
        return token_bytes(self.config, cache, self.slot_align)

    def new_cache(self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Returns one cache tensor per layer, all zero.

        Each is [num_blocks + 1, block_size, 2, kv_heads, slot_width(head_dim)] of `dtype` (None: the model's). Garbage
        could be NaN, and a masked NaN is still NaN. The last block is never written: it stands for blocks that were
        given back.
        """
        config, kept_as = self.config, dtype or self.dtype
        return new_layers(
            num_blocks + 1,
            config.num_layers,
            block_size,
            config.num_kv_heads,
            slot_width(config.head_dim, kept_as, self.slot_align),
            lambda shape: zeros(shape, kept_as, self.device),
            is_whole=gpu.takes(self.embeddings),
        )

    @torch.inference_mode()
    def forward(
        self, ids: Tensor, positions: Tensor, cache: list[Tensor], meta: AttentionMetadata, kept: Tensor | None = None
    ) -> Tensor:
        """Returns hidden states [T, hidden] (float32) of ids, positions int64 [T]; writes this step's keys and values.

        `kept`, int64 and ascending: indices of the only tokens whose hidden states are needed; the result is then
        [len(kept), hidden].
        """
        h = self._embed(ids)
        cis, hidden_state_hooks = [table[positions] for table in self._cis], self.hidden_state_hooks
        for num, (layer, layer_cache) in enumerate(zip(self._layers, cache, strict=True), 1):
            # A hook needs the hidden states of all tokens.
            is_last = num == len(self._layers) and num not in hidden_state_hooks
            layer.forward(h, cis[layer.rope], layer_cache, meta, kept if is_last else None)
            if num in hidden_state_hooks:
                hidden_state_hooks[num](h, meta.write_slots, meta.num_tokens)
            self.layers_done += 1
            self.on_layer()
        if kept is None:
            return h[: meta.num_tokens]
        return h[kept] if len(self._layers) in hidden_state_hooks else h[: len(kept)]

    def _embed(self, ids: Tensor) -> Tensor:
        """Returns embeddings [T, hidden] (float32) of ids, scaled in their dtype if the architecture does so."""
        found = ops.embedding(ids, self.embeddings)
        return (found if self._scale is None else found.mul_(self._scale)).float()

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits float32 [R, vocab] of hidden [R, hidden]."""
        logits = ops.linear_normed(hidden, self._norm, self.config.norm_eps, self._head).float()
        return ops.soft_cap_(logits, self._logit_cap) if self._logit_cap else logits


def owned(read: Tensor) -> Tensor:
    """Returns the tensor in its own memory, as one read from a file may be mapped and the file overwritten."""
    return read.clone() if read.device.type == "cpu" else read


def _nothing() -> None:
    """Does nothing: the default of `on_layer`."""


def token_bytes(config: ModelConfig, cache: torch.dtype, align: int) -> int:
    """Returns the bytes of one token's keys and values in a cache of that dtype; `align` is that of 8-bit slots."""
    return 2 * config.num_layers * config.num_kv_heads * slot_width(config.head_dim, cache, align) * cache.itemsize


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a zero tensor; on CPU from `kernels.cpu.memory`."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return memory.zeros(torch.Size(shape).numel(), dtype).view(shape)


def load_model(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int = 0,
    pack: Pack = ops.PLAIN,
) -> Model:
    """Loads a checkpoint.

    `num_positions` bounds the rotary table; 0 is the model's context. `pack` packs each weight. Raises ServiceError
    MODEL_INVALID naming file and tensor, or UNIMPLEMENTED for an architecture.
    """
    traits_of(config)  # raises before any weight is read
    source = Checkpoint(directory, dtype, device, config.stored)
    check_layers(directory, config, source)
    model = Model(config, source, dtype, device, num_positions or config.context_length, pack)
    model.num_parameters = source.num_parameters
    return model


def check_layers(directory: Path, config: ModelConfig, source: Checkpoint) -> None:
    """Raises ServiceError if the files hold more or fewer layers than config.json says; reads no tensor."""
    held, said = source.layers(LAYERS), config.num_layers
    missing = next((num for num in range(said) if num not in held), None)
    if held and (missing is not None or len(held) > said):
        what = f"no tensor of layer {missing}" if missing is not None else f"tensors of layer {max(held)}"
        text = f"num_hidden_layers is {said}, and the files hold {what}, counted from 0: {MENDING}"
        raise invalid_model(directory / "config.json", text)


def plan_model(config: ModelConfig, dtype: torch.dtype) -> PlannedWeights:
    """Returns names and shapes of all tensors that loading would read; allocates nothing."""
    plan = PlannedWeights(dtype)
    Model(config, plan, dtype, torch.device("meta"), num_positions=1)
    return plan
