"""Keeps the weights of offloaded layers in pinned memory of the host, and copies them to a CUDA device ahead of use.

Two buffers on the device take the weights of layers in turn, so that a layer's weights always are at the same place:
steps can be recorded. On a stream of its own, a layer is copied while the one before it is computed. The copies of a
step begin with it and are waited for within it; two streams wait for one another, and the host for neither.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from sluice_server.engine.models.layers.decoder import DecoderLayer
from sluice_server.engine.models.layers.runs import RunLayer
from sluice_server.engine.models.offload.choice import WINDOW, unusable
from sluice_server.engine.models.offload.store import ArrivingLayer, OffloadFigures
from sluice_server.engine.worker import device

ALIGN = 256  # bytes; what kernels of a device read at once lies within
PIECE = 64 << 20  # bytes of one allocation: torch takes pinned memory in powers of two


class HostStore:
    """Keeps some layers' weights in memory of the host; see `LayerStore`."""

    def __init__(self, on: torch.device, layers: Collection[int]) -> None:
        self._device, self._layers = on, layers
        self._stream = torch.cuda.Stream(on)
        self._parts: list[tuple[Tensor, ...]] = []  # of each layer, pieces of its bytes on the host
        self._weights: list[list[tuple[Tensor, int, torch.dtype, torch.Size]]] = []  # of each layer, with their places
        self._buffers: tuple[Tensor, ...] = ()
        self._figures = OffloadFigures("host")
        self.figures: OffloadFigures | None = self._figures

    def keep(self, index: int, layer: DecoderLayer) -> RunLayer:
        """Implements `LayerStore.keep`."""
        number = len(self._parts)
        if index in self._layers:
            self._take([one.weight for one in layer.matrices])
        elif index > 0:
            return layer

        def arrive() -> None:
            if index == 0:
                self._copy(0)
            if index in self._layers:
                self.reach(number)

        return ArrivingLayer(layer, arrive)

    def finish(self) -> tuple[str, ...]:
        """Implements `LayerStore.finish`: the weights get their places in the buffers."""
        sizes = [sum(map(len, one)) for one in self._parts]
        self._buffers = tuple(torch.empty(max(sizes), dtype=torch.uint8, device=self._device) for _ in range(WINDOW))
        for number, weights in enumerate(self._weights):
            for weight, first, dtype, shape in weights:
                size = shape.numel() * dtype.itemsize
                weight.data = self._buffer(number)[first : first + size].view(dtype).view(shape)
        what = f"the weights of {len(sizes)} layers, {sum(sizes) >> 20} MiB, are copied at each step from memory of the"
        return (f"--weights-offload-bytes: {what} host, through {WINDOW * max(sizes) >> 20} MiB of the device",)

    def close(self) -> None:
        """Implements `LayerStore.close`."""

    def reach(self, number: int) -> None:
        """Makes the work that follows wait for the layer that was kept as `number`, and begins to copy the next one of
        the step, behind all work on the layer whose buffer it takes."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if number + 1 < len(self._parts):
            self._copy(number + 1)

    def _copy(self, number: int) -> None:
        """Copies a layer, behind all work that was begun before."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        target, first = self._buffer(number), 0
        with torch.cuda.stream(self._stream):
            for piece in self._parts[number]:
                target[first : first + len(piece)].copy_(piece, non_blocking=True)
                first += len(piece)

    def _buffer(self, number: int) -> Tensor:
        return self._buffers[number % WINDOW]

    def _take(self, weights: Sequence[Tensor]) -> None:
        """Moves the weights of a layer to the host, and gives their memory on the device back."""
        whole = [one for one in weights if one.nbytes == one.untyped_storage().nbytes() and one.is_contiguous()]
        if len(whole) < len(weights):
            raise unusable("weights of this form share memory of the device with others: leave it out")
        firsts, size = list[int](), 0
        for one in whole:
            firsts.append(size)
            size += -(-one.nbytes // ALIGN) * ALIGN
        together = torch.empty(size, dtype=torch.uint8, device=self._device)
        for one, first in zip(whole, firsts, strict=True):
            together[first : first + one.nbytes].copy_(one.view(-1).view(torch.uint8))
        pieces = tuple(device.pinned(len(one), torch.uint8) for one in together.split(PIECE))
        for piece, one in zip(pieces, together.split(PIECE), strict=True):
            piece.copy_(one)
        self._parts.append(pieces)
        self._figures.num_bytes += sum(one.nbytes for one in whole)
        self._weights.append([(one, first, one.dtype, one.shape) for one, first in zip(whole, firsts, strict=True)])
        for one in whole:
            one.untyped_storage().resize_(0)  # views of a weight would keep it
