"""A loaded model: token ids and positions in, hidden states and logits out, over a paged cache.

`engine.models.loading` builds it from a checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TypeAlias

import torch
from torch import Tensor

from sluice_server.engine.models.attention import PagedAttention
from sluice_server.engine.models.by_layer import ORIGINAL
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.given import GivenRows, GivenStates
from sluice_server.engine.models.head import ModelHead
from sluice_server.engine.models.layers.decoder import DecoderLayer
from sluice_server.engine.models.layers.loader import LayerLoader, Pack
from sluice_server.engine.models.layers.mlp_weights import make_mlp
from sluice_server.engine.models.layers.runs import LayerRuns
from sluice_server.engine.models.layers.sides import Folding, StepSides
from sluice_server.engine.models.observed import DIGEST_BYTES, InputObserver, WeighingPack, observed_layers, random_ids
from sluice_server.engine.models.offload.store import IN_MEMORY, LayerStore
from sluice_server.engine.models.registry import traits_of
from sluice_server.engine.models.rope import Rotations, uses_long_factors
from sluice_server.engine.models.traits import ArchitectureTraits
from sluice_server.engine.models.vocabulary import vocabulary_of
from sluice_server.engine.models.weights import WeightSource
from sluice_server.engine.parallel.joined import joined_digest
from sluice_server.engine.parallel.part import ModelPart, part_of
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.worker.host.allocator import give_back
from sluice_server.kernels import gpu, ops
from sluice_server.kernels.cpu import memory
from sluice_server.kernels.formats.linear import gather
from sluice_server.kernels.formats.packer import PLAIN
from sluice_server.kernels.layout.layout import new_layers
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.slots import GPU_ALIGN, SCALE_BYTES, slot_width
from sluice_server.kernels.reference.adjust import TokenMask

OBSERVED_BLOCK = 16  # tokens in a cache block while weights are observed
LONG_FACTORS = (
    "longrope: the factors for long contexts serve all requests, as {} positions are served and the model was first "
    "trained with {}; --max-model-len of that number takes the others"
)
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

    records_prompts = True  # whether steps with prompts of any size can be recorded; set by `attend_by`
    passed_on: tuple[int, ...] = ()  # layers of earlier stages behind which the last one needs hidden states

    def __init__(  # noqa: PLR0913 # all that a model is made of
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        num_positions: int,
        pack: Pack = PLAIN,
        traits: ArchitectureTraits | None = None,
        ranks: Ranks | None = None,
        store: LayerStore = IN_MEMORY,
    ) -> None:
        """`traits`: of a plugin's architecture; None looks them up.

        `config`, `source` and `traits` are of the whole model; with `ranks`, a rank's part of it is loaded.
        `store` takes the layers.
        """
        whole, is_stored = source, config.stored is not None
        given = ModelPart(config, traits or traits_of(config), source)
        self.traits, self.windows = given.traits, given.traits.windows  # of all layers of the whole model
        self.num_layers = config.num_layers  # of the whole model
        self.layers = range(config.num_layers) if ranks is None else ranks.shape.layers(config.num_layers)
        self._stages = None if ranks is None else ranks.stages
        self._is_first, self.is_last = ranks is None or ranks.shape.is_first, ranks is None or ranks.shape.is_last
        config, traits, source = part_of(given, ranks, balances=pack.rounds and not is_stored)
        self.config = config  # of the part
        self._vocabulary = vocabulary_of(config.vocab_size, ranks)
        self.dtype, self.device = dtype, device
        # Set by `load_model`; counts computed layers, which tells a busy process from a stuck one:
        self.num_parameters = self.layers_done = 0
        self.on_layer: Callable[[], None] = _nothing  # called after layers
        self.hidden_state_hooks: HiddenStateHooks = {}  # copy hidden states for an EAGLE-3 head
        self.is_fixed = False  # set by `fix`
        self.observed = ""  # names the observations by which weights were rounded; empty if there were none
        self.has_full_attention = None in traits.windows

        self.foldings: dict[str, Folding] = {}  # how linears were packed, for adapters

        def loader_of(pack: Pack) -> LayerLoader:
            adding, own = None if ranks is None else ranks.adding, (source, dtype, pack, self.foldings)
            return LayerLoader(*own, is_stored=is_stored, norm_offset=traits.norm_offset, ranks=adding)

        loader = loader_of(pack)
        table = self._vocabulary.num_rows, config.hidden_size
        if self._is_first:
            self.embeddings = owned(source.get("model.embed_tokens.weight", table))
        else:
            self.embeddings = torch.empty(0, config.hidden_size, dtype=dtype, device=device)
        scale = traits.embedding_scale
        self.embedding_scale = scale / traits.residual_scale
        self._scale = torch.tensor(scale, dtype=dtype, device=device) if scale != 1.0 else None
        self._stream_scale = 1.0 / traits.residual_scale
        self._rotations = Rotations(config, traits, num_positions, device)
        weighing = WeighingPack(pack) if pack.weighs and not is_stored and device.type != "meta" else None
        self._layers = LayerRuns(
            [store.keep(*one) for one in enumerate(self._load_layers(traits, loader_of, weighing, loader))],
            None if loader.ranks is None else loader.ranks.sums,
        )
        self._head = ModelHead(config, traits, loader, source, whole, self._vocabulary) if self.is_last else None
        gather(linear for layer in self._layers for linear in layer.linears)
        self.kernel = self._head.kernel if self._head is not None else ""  # name of the kernel that multiplies
        # for the operator, about weight formats and rotary factors; and what is counted of weights that are elsewhere
        self.notes, self.offloaded = (*loader.notes, *store.finish()), store.figures
        if uses_long_factors(config, num_positions):
            self.notes += (LONG_FACTORS.format(num_positions, int(config.rope.get(ORIGINAL))),)

    def _load_layers(
        self,
        traits: ArchitectureTraits,
        loader_of: Callable[[Pack], LayerLoader],
        weighing: WeighingPack | None,
        loader: LayerLoader,
    ) -> Iterator[DecoderLayer]:
        """Loads the layers one by one, each behind an observation of its inputs if `weighing` is to round its weights
        by that."""
        config = self.config

        def make(index: int, loader: LayerLoader) -> DecoderLayer:
            layer = DecoderLayer(config, traits, index, loader, make_mlp(config, traits, index, loader))
            give_back()  # what was read and joined: else the C library keeps as much for each layer
            return layer

        if weighing is None:
            yield from (make(i, loader) for i in range(config.num_layers))
            return
        observer = self._observer()
        if self._stages is not None and not self._is_first:
            weighing.follow(bytes(map(int, self._stages.receive(1, DIGEST_BYTES, self._advanced)[0].tolist())))
        yield from observed_layers(make, loader_of, config.num_layers, observer, weighing)
        self.observed, ranks = weighing.digest, loader.ranks
        if ranks is not None:  # each observes the inputs of its own columns
            self.observed = joined_digest(bytes.fromhex(self.observed), config.hidden_size, ranks.sums)
        if self._stages is not None and not self.is_last:
            self._stages.send(observer.hidden, self._advanced)
            self._stages.send(torch.tensor([list(bytes.fromhex(weighing.digest))]).float(), self._advanced)

    def _observer(self) -> InputObserver:
        """Returns what computes ids through layers as they are loaded, from where earlier stages end: those of a
        calibration, or random ones."""
        num = self._rotations.num_positions
        chosen = torch.tensor(self.config.calibration[:num])
        ids = (chosen if len(chosen) else random_ids(self.config.vocab_size, num)).to(self.device)
        cache = self.new_cache(-(-len(ids) // OBSERVED_BLOCK), OBSERVED_BLOCK)[0]
        cis = self._rotations.of(torch.arange(len(ids), device=self.device))
        return InputObserver(self._entry(ids)[0], cis, cache, OBSERVED_BLOCK)

    def fix(self) -> None:
        """Makes the model batch-invariant: no bit of a row depends on the other rows. Slower where schedules change."""
        self._layers.fix()
        if self._head is not None:
            self._head.fix()
        self.is_fixed = True

    def attend_by(self, attention: PagedAttention, *, records_prompts: bool) -> None:
        """Has attention of all layers computed in another way than by the kernels' own operation.

        `records_prompts`: whether steps with prompts of any size can be recorded."""
        for layer in self._layers:
            layer.attend_by(attention)
        self.records_prompts = records_prompts

    @property
    def is_turned(self) -> bool:
        """Whether positions may have three directions, for tokens of images."""
        return self._rotations.axes is not None

    @property
    def num_logits(self) -> int:
        """The number of logits of a row: of all ids, or, on another rank than 0, of its own."""
        return self._vocabulary.num_logits

    @property
    def slot_align(self) -> int:
        """The alignment of 8-bit slots; see `kernels.layout.slots`."""
        return GPU_ALIGN if gpu.takes(self.embeddings) else SCALE_BYTES

    def token_bytes(self, cache: torch.dtype) -> int:
        """Returns the bytes per token of a `new_cache` of that dtype."""
        return token_bytes(self.config, cache, self.slot_align)

    def new_cache(
        self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None, num_layers: int = 0
    ) -> list[Tensor]:
        """Returns one cache tensor per layer (0: of the model), all zero.

        Each is [num_blocks + 1, block_size, 2, kv_heads, slot_width(head_dim)] of `dtype` (None: the model's). Garbage
        could be NaN, and a masked NaN is still NaN. The last block is never written: it stands for blocks that were
        given back.
        """
        config, kept_as = self.config, dtype or self.dtype
        return new_layers(
            num_blocks + 1,
            num_layers or config.num_layers,
            block_size,
            config.num_kv_heads,
            slot_width(config.head_dim, kept_as, self.slot_align),
            lambda shape: zeros(shape, kept_as, self.device),
            is_whole=gpu.takes(self.embeddings),
        )

    @torch.inference_mode()
    def forward(  # noqa: PLR0913 # all that a step is made of
        self,
        ids: Tensor,
        positions: Tensor,
        cache: list[Tensor],
        meta: AttentionMetadata,
        kept: Tensor | None = None,
        given: Sequence[GivenRows] = (),
        turned: Sequence[GivenRows] = (),
        sides: StepSides | None = None,
    ) -> Tensor:
        """Returns hidden states [T, hidden] (float32) of ids, positions int64 [T]; writes this step's keys and values.

        `kept`, int64 and ascending: indices of the only tokens whose hidden states are needed; the result is then
        [len(kept), hidden]. Of a stage before the last it is of no use: it was sent to the next stage.
        `given`: rows in the place of embeddings; see `GivenStates`. `turned`: positions int64 [3, N], in time, rows and
        columns, that turn these tokens in the place of `positions`; see `is_turned`. `sides`: products of adapters, for
        the rows with one. They are not computed layer by layer in one call, so bits of the other rows may differ from
        those without.
        """
        h, passed = self._entry(ids)
        states = GivenStates(given, self.config.hidden_size)
        if self._is_first:  # later stages have hidden states
            states.enter(h)
        cis, hidden_state_hooks = self._rotations.of(positions, turned), self.hidden_state_hooks
        whole = hidden_state_hooks.keys() | states.layers  # behind these layers all tokens are needed
        for num in passed.keys() & hidden_state_hooks.keys():
            hidden_state_hooks[num](passed[num], meta.write_slots, meta.num_tokens)
        for span in self._layers.spans(self._stops(whole), cache, meta):
            num = self.layers.start + span.stop
            is_last = num == self.num_layers and num not in whole
            self._layers.forward(span, h, cis, cache, meta, kept if is_last else None, sides)
            states.follow(num, h)
            if num in hidden_state_hooks:
                hidden_state_hooks[num](h, meta.write_slots, meta.num_tokens)
            if num in self.passed_on:
                passed[num] = h.clone()
            if self._stages is not None:
                self._stages.note_progress()
            self._advanced(len(span))
        if self._stages is not None and not self.is_last:
            told = torch.cat((h, *passed.values()), 1) if passed else h
            self._stages.send(told[: meta.num_tokens], self._advanced)
            return h if kept is None else h[kept]
        if kept is None:
            return h[: meta.num_tokens]
        return h[kept] if self.num_layers in whole else h[: len(kept)]

    def _stops(self, whole: Set[int]) -> Set[int]:
        """Returns how many layers of this part are computed when something is done: behind `whole` and others."""
        if self._stages is not None:
            return set(range(len(self._layers)))  # each layer is a sign of life
        return {num - self.layers.start for num in (*whole, *self.passed_on)}

    def _advanced(self, num: int = 1) -> None:
        """Counts layers that were computed, here or by a stage that this one waits for."""
        self.layers_done += num
        self.on_layer()

    def _entry(self, ids: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Returns what the first layer here takes: embeddings, or the hidden states of the stage before. Beside it, by
        number of the layer, those of earlier stages that the last stage needs."""
        if self._is_first:
            return self._embed(ids), {}
        assert self._stages is not None, "a model that does not begin with embeddings is a stage"
        before = [num for num in self.passed_on if num <= self.layers.start]
        width = self.config.hidden_size
        given = self._stages.receive(len(ids), (1 + len(before)) * width, self._advanced)
        if not before:
            return given, {}
        h, *others = (one.contiguous() for one in given.split(width, 1))
        return h, dict(zip(before, others, strict=True))

    def _embed(self, ids: Tensor) -> Tensor:
        """Returns embeddings [T, hidden] (float32) of ids, scaled in their dtype if the architecture does so."""
        found = self._vocabulary.embedding(ids, self.embeddings)
        wide = self._vocabulary.joined((found if self._scale is None else found.mul_(self._scale)).float())
        return wide if self._stream_scale == 1.0 else wide.mul_(self._stream_scale)

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        """Returns the final norm of hidden [R, hidden], in float32: what the head sees, unscaled."""
        return self._top.normed(hidden)

    @torch.inference_mode()
    def classes(self, normed: Tensor) -> Tensor:
        """Returns what the classification head makes of normed [R, hidden]: [R, classes], float32."""
        return self._top.classes(normed)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits float32 [R, vocab] of hidden [R, hidden]; on other ranks than 0 those of its own ids."""
        return self._top.logits(hidden)

    @torch.inference_mode()
    def wanted_logits(self, hidden: Tensor, wanted: TokenMask | None) -> Tensor:
        """Returns `logits`; of the rows that `wanted` lists, those of its ids, and others may be anything. A plugin's
        model with logits of its own computes all of them."""
        if wanted is None or type(self).logits is not Model.logits:
            return self.logits(hidden)
        return self._top.logits(hidden, wanted=wanted)

    @torch.inference_mode()
    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        """Writes the logits of hidden into `out`, without a copy unless a plugin's model has logits of its own."""
        if type(self).logits is Model.logits:
            self._top.logits(hidden, out)
        else:
            out.copy_(self.logits(hidden))

    @property
    def _top(self) -> ModelHead:
        assert self._head is not None, "only the last stage has the head"
        return self._head


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
