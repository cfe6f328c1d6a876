"""Sums of one tensor from each rank, where every rank has a part of the numbers and zeros elsewhere."""

import hashlib

import torch
from torch import Tensor

from sluice_server.engine.parallel.sums import RankSums


def joined(values: Tensor, sums: RankSums) -> Tensor:
    """Returns the sum of all ranks' values [T, H] (float32), on the device of `sums`; exact where all but one of a
    place are zero."""
    partials = sums.room(*values.shape)
    for part in partials:
        part.zero_()
    partials[0].copy_(values)
    total = partials[0].new_zeros(values.shape)
    sums.add(total, partials, is_exact=True)
    return total


def joined_vector(values: Tensor, width: int, sums: RankSums) -> Tensor:
    """Returns `joined` of values [N] (float32), in rows of `width`."""
    rows = -(-len(values) // width)
    padded = values.new_zeros(rows * width)
    padded[: len(values)] = values
    return joined(padded.view(rows, width), sums).view(-1)[: len(values)]


def joined_digest(digest: bytes, width: int, sums: RankSums) -> str:
    """Returns a digest of the digests of all ranks, equally long and in their order; the same on every rank."""
    own = torch.zeros(sums.size, len(digest))
    own[sums.rank] = torch.tensor(list(digest), dtype=torch.float32)
    found = bytes(map(int, joined_vector(own.flatten(), width, sums).tolist()))
    return hashlib.blake2b(found, digest_size=len(digest)).hexdigest()
