"""Tiny random checkpoints of models whose images have any size, their images, and the references that read them."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from sluice_server.engine.images import Grid, PromptImage
from sluice_server.engine.request import EngineRequest
from tests.oracle.image_checkpoints import TEXT
from tests.oracle.vision_checkpoints import TEMPLATE, WORDS_IMAGE_ID, write_words

IMAGE_ID, OTHER_ID = 110, 109
BREAKS = 108, 107
PATCH, MERGED = 4, 2
_QWEN: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "depth": 4, "out_hidden_size": 64},
    **{"patch_size": PATCH, "spatial_merge_size": MERGED, "temporal_patch_size": 2},
}
_IDS: dict[str, Any] = {"image_token_id": IMAGE_ID, "video_token_id": OTHER_ID}
_SECTIONS: dict[str, Any] = {"mrope_section": [2, 3, 3]}


@dataclasses.dataclass(frozen=True)
class Picture:
    """An image as the model takes it: flat float32 numbers, and rows and columns of its tokens."""

    numbers: torch.Tensor
    grid: Grid


Parts = Sequence[int | Picture]  # of a prompt: ids and images


@dataclasses.dataclass(frozen=True)
class Family:
    """A model's reference class with its configuration, its pictures, and what the reference is given for them.

    Attributes:
        breaks: ids behind each row of an image's tokens but the last, and behind that.
        types: name under which the reference is told which tokens are of images; "" where it is not.
        words: of its tokenizer, behind the word for an image.
    """

    name: str
    config: Callable[[], Any]
    kind: Any
    picture: Callable[[int, Grid], Picture]
    given: Callable[[Sequence[Picture]], dict[str, Any]]
    preprocessor: dict[str, Any]
    breaks: tuple[int, int] | None = None
    types: str = "mm_token_type_ids"
    words: tuple[str, ...] = ("[IMG_BREAK]", "[IMG_END]")
    template: str = TEMPLATE

    def ids(self, grid: Grid) -> list[int]:
        """The ids of an image in a prompt."""
        rows, columns = grid
        if self.breaks is None:
            return [IMAGE_ID] * (rows * columns)
        lines = [[*[IMAGE_ID] * columns, self.breaks[row == rows - 1]] for row in range(rows)]
        return [one for line in lines for one in line]

    def make(self, path: Path, *, as_published: bool = False, config: Any = None) -> Any:  # noqa: ANN401 # untyped
        """Writes a random float32 checkpoint, with another `config` if one is given; returns its reference."""
        torch.manual_seed(0)
        model: Any = self.kind(config or self.config())
        model.float().eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name or "ln_q" in name:
                is_weight = name.endswith("weight")
                torch.nn.init.normal_(parameter, mean=1.0 if is_weight else 0.0, std=0.2)
            elif "visual" in name or "vision" in name or "projector" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(path, save_original_format=as_published)
        names = {"[IMG_BREAK]": BREAKS[0], "[IMG_END]": BREAKS[1]}
        added = {str(token): {"content": name} for name, token in names.items()}
        (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
        return model

    def make_served(self, path: Path) -> Any:  # noqa: ANN401 # untyped
        """Writes one with tokenizer, chat template and preprocessor, as a directory that can be served."""
        config = self.config()
        config.text_config.vocab_size, config.text_config.max_position_embeddings = WORDS_IMAGE_ID + 4, 1024
        config.image_token_id, config.video_token_id = WORDS_IMAGE_ID, WORDS_IMAGE_ID + 3
        config.boi_token_index, config.eoi_token_index = WORDS_IMAGE_ID + 1, WORDS_IMAGE_ID + 2
        model = self.make(path, config=config)
        write_words(path, *self.words, template=self.template)
        added = {str(WORDS_IMAGE_ID + at): {"content": one} for at, one in enumerate(self.words, 1)}
        (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
        (path / "preprocessor_config.json").write_text(json.dumps(self.preprocessor))
        return model

    def request(self, name: str, parts: Parts, **fields: Any) -> EngineRequest:  # noqa: ANN401 # of EngineRequest
        """A request with these parts in its prompt."""
        ids: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                continue
            own = self.ids(part.grid)
            images.append(PromptImage.at(len(ids), len(own), part.grid, part.numbers.numpy().tobytes()))
            ids += own
        return EngineRequest(name, tuple(ids), fields.pop("params"), images=tuple(images), **fields)

    @torch.inference_mode()
    def logits(self, reference: Any, ids: Sequence[int], parts: Parts) -> torch.Tensor:  # noqa: ANN401 # untyped
        """The reference's logits [ids, vocab] behind a prompt of these parts and what follows it."""
        pictures = [one for one in parts if isinstance(one, Picture)]
        given = self.given(pictures) if pictures else {}
        whole = torch.tensor([[*ids]])
        if pictures and self.types:
            given[self.types] = (whole == IMAGE_ID).int()
        if hasattr(reference.model, "rope_deltas"):
            reference.model.rope_deltas = None  # it keeps those of the call before
        found = reference(whole, **given).logits[0]
        assert isinstance(found, torch.Tensor)
        return found

    def greedy(self, reference: Any, parts: Parts, tokens: Sequence[int]) -> list[int]:  # noqa: ANN401 # untyped
        """The reference's choice before each of the tokens that follow a prompt of these parts, none of which stands
        for an image: the same tokens, if each of them was chosen so."""
        ids = [*self.request("", parts, params=None).prompt_ids]
        found = self.logits(reference, [*ids, *tokens[:-1]], parts)[len(ids) - 1 :, :OTHER_ID].argmax(-1)
        return [int(one) for one in found]


def _patches(seed: int, grid: Grid) -> Picture:
    num = grid[0] * grid[1] * MERGED**2
    made = torch.randn(num, 3 * PATCH * PATCH, generator=torch.Generator().manual_seed(seed))
    return Picture(made.flatten(), grid)


def _qwen_given(pictures: Sequence[Picture]) -> dict[str, Any]:
    """Each patch twice in time, and grids of patches."""
    pairs = [one.numbers.view(-1, 3, 1, PATCH * PATCH).expand(-1, 3, 2, PATCH * PATCH).flatten(1) for one in pictures]
    grids = [[1, MERGED * one.grid[0], MERGED * one.grid[1]] for one in pictures]
    return {"pixel_values": torch.cat(pairs), "image_grid_thw": torch.tensor(grids)}


def _qwen2_5() -> Any:  # noqa: ANN401 # a class of the reference
    return transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_scaling": {"type": "mrope", **_SECTIONS}},
        vision_config={**_QWEN, "window_size": 16, "fullatt_block_indexes": [1, 3]},
        **_IDS,
    )


_CELLS: dict[str, Any] = {
    **{"image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": MERGED},
    **{"min_pixels": 256, "max_pixels": 1600},
}
_OF_2_5 = transformers.Qwen2_5_VLForConditionalGeneration
QWEN2_5 = Family("qwen2_5_vl", _qwen2_5, _OF_2_5, _patches, _qwen_given, _CELLS)


def _qwen3() -> Any:  # noqa: ANN401 # a class of the reference
    rope = {"rope_type": "default", "mrope_interleaved": True, **_SECTIONS}
    deep = {"num_position_embeddings": 25, "deepstack_visual_indexes": [2, 0]}
    return transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_scaling": rope}, vision_config={**_QWEN, **deep}, **_IDS
    )


QWEN3 = Family("qwen3_vl", _qwen3, transformers.Qwen3VLForConditionalGeneration, _patches, _qwen_given, _CELLS)


def _mistral3_given(pictures: Sequence[Picture]) -> dict[str, Any]:
    """Whole pictures, and their sizes."""
    sizes = [[PATCH * MERGED * side for side in one.grid] for one in pictures]
    whole = torch.zeros(len(sizes), 3, max(size[0] for size in sizes), max(size[1] for size in sizes))
    for picture, (height, width), at in zip(pictures, sizes, whole, strict=True):
        parts = picture.numbers.view(*picture.grid, MERGED, MERGED, 3, PATCH, PATCH)
        at[:, :height, :width] = parts.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, height, width)
    return {"pixel_values": whole, "image_sizes": torch.tensor(sizes)}


def _mistral3() -> Any:  # noqa: ANN401 # a class of the reference
    vision: dict[str, Any] = {
        **{"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 2, "num_hidden_layers": 3},
        **{"patch_size": PATCH, "image_size": 64},
    }
    text: Any = transformers.MistralConfig(**{**TEXT, "sliding_window": None, "tie_word_embeddings": False})
    return transformers.Mistral3Config(
        text_config=text,
        vision_config=transformers.PixtralVisionConfig(**vision),
        image_token_index=IMAGE_ID,
        spatial_merge_size=MERGED,
        tie_word_embeddings=False,
    )


_WITHIN = {"image_processor_type": "PixtralImageProcessor", "patch_size": PATCH, "size": {"longest_edge": 40}}
MISTRAL3 = Family(
    *("mistral3", _mistral3, transformers.Mistral3ForConditionalGeneration, _patches, _mistral3_given, _WITHIN),
    breaks=BREAKS,
    types="",
)


def _flat(seed: int, grid: Grid) -> Picture:
    """Colour by colour; all have the same shape."""
    made = torch.randn(3 * (PATCH * MERGED) ** 2 * grid[0] * grid[1], generator=torch.Generator().manual_seed(seed))
    return Picture(made, grid)


def _gemma3_given(pictures: Sequence[Picture]) -> dict[str, Any]:
    side = PATCH * MERGED * GEMMA3_GRID[0]
    return {"pixel_values": torch.stack([one.numbers.view(3, side, side) for one in pictures])}


def _gemma3() -> Any:  # noqa: ANN401 # a class of the reference
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    vision: dict[str, Any] = {
        **{"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 2, "num_hidden_layers": 3},
        **{"patch_size": PATCH, "image_size": PATCH * MERGED * GEMMA3_GRID[0], "model_type": "siglip_vision_model"},
    }
    return transformers.Gemma3Config(
        text_config={**TEXT, "num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 17},
        vision_config=vision,
        mm_tokens_per_image=GEMMA3_GRID[0] ** 2,
        image_token_index=IMAGE_ID,
        boi_token_index=OTHER_ID,
        eoi_token_index=BREAKS[0],
    )


GEMMA3_GRID: Grid = (4, 4)
_SQUARE: dict[str, Any] = {"size": {"height": PATCH * MERGED * 4, "width": PATCH * MERGED * 4}}
GEMMA3 = Family(  # of one size, unlike the others
    *("gemma3", _gemma3, transformers.Gemma3ForConditionalGeneration, _flat, _gemma3_given),
    {"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": None, **_SQUARE},
    types="token_type_ids",
    words=("<start_of_image>", "<end_of_image>"),
    template=TEMPLATE.replace("<image>\n", "<start_of_image>"),
)
FAMILIES = {one.name: one for one in (QWEN2_5, QWEN3, MISTRAL3)}
