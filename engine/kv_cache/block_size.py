"""Chooses how many tokens a block of the KV cache has, from what each size would have cost in the run before. Pure.

Small blocks find more of a prompt that begins as an earlier one, as only whole blocks are found, and leave fewer slots
of the last block unused. Large blocks are fewer to name, to place and to write to disk. Kernels take about as long with
each of these sizes.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from sluice_server.engine.config import DEFAULTS

SIZES = (16, 32, 64, 128)  # that every kernel and every library for attention takes
GRAIN = SIZES[0]  # tokens in which shared beginnings are counted
NUM_ENDS = SIZES[-1] // GRAIN
USUAL = DEFAULTS.block_size
LEAST_REQUESTS = 64  # of a run that says something
LEAST_GAIN = 0.01  # share of the tokens of a run that another size must save
LEAST_BYTES = 16 << 10  # of a block: the smallest one takes about as long to move
BLOCK_S = 5e-6  # to name and place a block
FILE_S = 2e-4  # to write it to a directory, and to find it there


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """What engines saw of their requests in a run.

    Attributes:
        block_size, block_bytes: of that run.
        num_requests, num_tokens: generations, and the tokens of their prompts and outputs.
        ends: of the prompts whose beginning had been seen, as many whole grains as were seen, modulo NUM_ENDS.
        unused: mean share of the cache's slots that were behind the last token of a sequence, in blocks in use.
        num_hits, num_recomputed: prompt tokens that were found, and tokens that were computed twice.
        num_evicted: cached blocks that were overwritten.
        token_s: seconds of a step for each token.
    """

    block_size: int
    block_bytes: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    ends: tuple[int, ...] = (0,) * NUM_ENDS
    unused: float = 0.0
    num_hits: int = 0
    num_recomputed: int = 0
    num_evicted: int = 0
    token_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """Blocks in a directory that a run before has left, and a start with the same size finds."""

    num_tokens: int = 0
    directory: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSize:
    """The size that was chosen, and why."""

    size: int
    because: str


def merged(traffics: Iterable[Traffic]) -> Traffic | None:
    """Returns the traffic of all engines together, of which the first says the size of blocks: others of another size
    are of an earlier run. None without any."""
    found = list(traffics)
    same = [one for one in found if one.block_size == found[0].block_size]
    if not same:
        return None
    weight = max(1, sum(one.num_tokens for one in same))
    return Traffic(
        same[0].block_size,
        same[0].block_bytes,
        sum(one.num_requests for one in same),
        sum(one.num_tokens for one in same),
        tuple(map(sum, zip(*(one.ends for one in same), strict=True))),
        sum(one.unused * one.num_tokens for one in same) / weight,
        sum(one.num_hits for one in same),
        sum(one.num_recomputed for one in same),
        sum(one.num_evicted for one in same),
        sum(one.token_s * one.num_tokens for one in same) / weight,
    )


def cost(traffic: Traffic, size: int, *, has_files: bool) -> float:
    """Returns what blocks of that size would have cost in the run: tokens that would be computed for want of a whole
    block, or of room, and the time for blocks counted in tokens. `has_files`: blocks go to a directory."""
    grains = size // GRAIN
    lost = GRAIN * sum(num * (end % grains) for end, num in enumerate(traffic.ends))
    room = 0.0
    if traffic.num_evicted or traffic.num_recomputed:  # slots that hold nothing would hold as much as others do
        room = traffic.unused * size / traffic.block_size * (traffic.num_hits + traffic.num_recomputed)
    seconds = traffic.num_tokens / size * (BLOCK_S + (FILE_S if has_files else 0.0))
    return lost + room + (seconds / traffic.token_s if traffic.token_s else 0.0)


def allowed_sizes(cache_tokens: int, token_bytes: int) -> tuple[int, ...]:
    """Returns the sizes that divide a cache of so many tokens (0: of any size), without those whose blocks have fewer
    than LEAST_BYTES while larger ones are left. `token_bytes`: keys and values of a token."""
    dividing = [size for size in SIZES if not cache_tokens % size]
    return tuple(size for size in dividing if size * token_bytes >= LEAST_BYTES) or tuple(dividing[-1:])


def choose(traffic: Traffic | None, allowed: Sequence[int], saved: Saved, *, has_files: bool) -> BlockSize:
    """Returns one of the allowed sizes: that of the run before, unless another would have saved LEAST_GAIN of its
    tokens, and more than it would lose of what is saved. `traffic`: of the run before; None if nothing is known."""
    if traffic is None:
        return BlockSize(_nearest(USUAL, allowed), "no run of this model was measured")
    now = _nearest(traffic.block_size, allowed)
    if traffic.block_size != now:
        return BlockSize(now, f"the last run's {traffic.block_size} cannot be taken")
    if traffic.num_requests < LEAST_REQUESTS:
        return BlockSize(now, f"as in the last run, whose {traffic.num_requests} requests say little")
    costs = {size: cost(traffic, size, has_files=has_files) for size in allowed}
    best = min(allowed, key=lambda size: (costs[size], size != now))
    gain = costs[now] - costs[best]
    share = f"{100 * gain / max(1, traffic.num_tokens):.1f} % of the last run's {traffic.num_tokens} tokens"
    if gain < LEAST_GAIN * traffic.num_tokens or best == now:
        return BlockSize(now, f"as in the last run: no other size would have saved a hundredth of its {_told(traffic)}")
    if gain <= saved.num_tokens:
        kept = f"{saved.directory} keeps {saved.num_tokens} tokens in blocks of this size"
        return BlockSize(now, f"{kept}; {best} would have saved {share}: clear it to change")
    left = f"; what {saved.directory} keeps in blocks of {now} is not found" if saved.num_tokens else ""
    return BlockSize(best, f"it would have saved {share}, over {now}{left}")


def _nearest(size: int, allowed: Sequence[int]) -> int:
    return min(allowed, key=lambda one: (abs(one - size), one))


def _told(traffic: Traffic) -> str:
    return f"{traffic.num_tokens} tokens in {traffic.num_requests} requests"
