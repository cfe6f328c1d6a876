"""Every op against its plain reference, and the claims of batch invariance bit by bit."""

import contextlib
import random
import types
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sluice_server.kernels import gpu, ops
from sluice_server.kernels.contract import is_batch_invariant
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats import weight_formats
from sluice_server.kernels.layout.layout import new_layers
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.prefixes import PrefixGroups
from sluice_server.kernels.layout.slots import slot_width
from sluice_server.kernels.reference import definitions
from sluice_server.kernels.reference.elementwise import HeadNorms
from tests.kernels.cpu.native import kernels_of

CPU = torch.device("cpu")
BATCHES = {
    "decode": [(1, 1), (1, 17), (1, 40)],
    "long and short decode": [(1, 3), (1, 600)],
    "prefill": [(33, 33), (5, 5)],
    "chunks": [(7, 40), (16, 17)],
    "mixed": [(1, 9), (1, 64), (2, 2), (13, 50)],
}


def make(
    batch: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Queries, a cache whose unowned blocks are NaN, and the layout."""
    rng = random.Random(1)
    torch.manual_seed(1)
    widths = [-(-context // block) for _, context in batch]
    blocks = rng.sample(range(1, 2 * sum(widths) + 2), sum(widths))
    tables = np.zeros((len(batch), max(widths) + 40 // block + 1), dtype=np.int32)
    sizes = (2 * sum(widths) + 2, 1, block, kv_heads, dim)
    cache = new_layers(*sizes, lambda shape: torch.full(shape, float("nan")), is_whole=False)[0]
    cache[0] = 0.0  # what a table's empty entries point at: never uninitialised in a runner
    for row, width in enumerate(widths):
        tables[row, :width] = [blocks.pop() for _ in range(width)]
        cache[tables[row, :width]] = torch.randn(width, block, 2, kv_heads, dim)
    lens, contexts = [num for num, _ in batch], [context for _, context in batch]
    meta = AttentionMetadata.build(lens, contexts, tables, block, CPU)
    return torch.randn(sum(lens), heads, dim), cache, meta


@pytest.fixture(params=[*builds.KNOWN, "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs every test with our kernels of each instruction set of this machine, and without."""
    name: str = request.param
    module = None if name == "torch" else kernels_of(name)
    monkeypatch.setattr(builds, "MODULE", module)
    return name


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"), [(4, 2, 64, 16), (8, 1, 80, 5), (5, 5, 96, 32), (4, 4, 128, 1)]
)
@pytest.mark.parametrize("name", list(BATCHES))
def test_paged_attention_equals_its_reference(
    name: str, heads: int, kv_heads: int, dim: int, block: int, window: int | None
) -> None:
    q, cache, meta = make(BATCHES[name], heads, kv_heads, dim, block)
    got = ops.paged_attention(q, cache, meta, dim**-0.5, window)
    want = definitions.paged_attention(q, cache, meta, dim**-0.5, window)
    assert torch.allclose(got, want, atol=2e-5)


@pytest.mark.parametrize(("window", "cap"), [(None, 1.5), (6, 4.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 256), (5, 1, 80)])
@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_scores_are_capped(name: str, heads: int, kv_heads: int, dim: int, window: int | None, cap: float) -> None:
    """Scores far beyond the cap, and small ones."""
    q, cache, meta = make(BATCHES[name], heads, kv_heads, dim, 16)
    q[:, ::2] *= 5.0
    got = ops.paged_attention(q, cache, meta, dim**-0.5, window, cap)
    assert torch.allclose(got, definitions.paged_attention(q, cache, meta, dim**-0.5, window, cap), atol=2e-5)
    assert not torch.allclose(got, ops.paged_attention(q, cache, meta, dim**-0.5, window), atol=1e-2)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (5, 1, 80)])
@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_sinks_take_their_part(name: str, heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    """Heads that attend to the sink only, to keys only, and to both."""
    q, cache, meta = make(BATCHES[name], heads, kv_heads, dim, 16)
    sinks = torch.linspace(-1.0, 3.0, heads)
    sinks[0], sinks[1] = 200.0, float("-inf")
    plain = ops.paged_attention(q, cache, meta, dim**-0.5, window)
    for cap in (0.0, 1.5):
        got = ops.paged_attention(q, cache, meta, dim**-0.5, window, cap, sinks)
        want = definitions.paged_attention(q, cache, meta, dim**-0.5, window, cap, sinks)
        assert torch.allclose(got, want, atol=2e-5)
        assert got[:, :dim].abs().max() < 1e-20
        assert cap or torch.allclose(got[:, dim : 2 * dim], plain[:, dim : 2 * dim], atol=2e-5)


@pytest.mark.parametrize("name", list(BATCHES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_order_of_the_caches_bytes_changes_no_bit(dtype: torch.dtype, name: str) -> None:
    """Head by head, as the cache is kept, and token by token; written and read."""
    q, shape, meta = make(BATCHES[name], 4, 2, 64, 16)
    by_head = new_layers(
        len(shape), 1, 16, 2, slot_width(64, dtype), lambda sizes: torch.zeros(sizes, dtype=dtype), is_whole=False
    )[0]
    by_token = torch.zeros(by_head.shape, dtype=dtype)
    assert by_token.is_contiguous() and not by_head.is_contiguous()
    heads, cis = torch.randn(meta.num_tokens, 8, 64), torch.randn(meta.num_tokens, 1, 32, dtype=torch.complex64)
    for cache in (by_head, by_token):
        ops.rotate_and_write(heads.clone(), cis, cache, meta)
    assert torch.equal(by_head, by_token) and by_head.any()
    got, want = (ops.paged_attention(q, cache, meta, 0.125, None) for cache in (by_head, by_token))
    assert torch.equal(got, want)


def test_padding_rows_are_zero() -> None:
    q, cache, meta = make(BATCHES["decode"], 4, 2, 64, 16)
    padded = torch.cat([q, torch.full((1, 4, 64), float("nan"))])
    got = ops.paged_attention(padded, cache, meta, 0.125, None)
    assert torch.equal(got[-1], torch.zeros(256))
    assert torch.allclose(got[:-1], definitions.paged_attention(q, cache, meta, 0.125, None), atol=2e-5)


def test_keys_and_values_go_to_their_slots_only() -> None:
    _, cache, meta = make(BATCHES["mixed"], 4, 2, 64, 16)
    before = cache.clone()
    heads = torch.randn(meta.num_tokens + 2, 8, 64)  # two padding rows
    cis = torch.polar(torch.ones(len(heads), 1, 32), torch.randn(len(heads), 1, 32))
    want = heads.clone()
    definitions.rope_(want[:, :6], cis)
    ops.rotate_and_write(heads, cis, cache, meta)
    assert torch.allclose(heads[: meta.num_tokens], want[: meta.num_tokens], atol=1e-5)
    slots = cache.flatten(0, 1)
    assert torch.equal(slots[meta.write_slots], heads[: meta.num_tokens, 4:].view(-1, 2, 2, 64))
    others = torch.ones(len(slots), dtype=torch.bool)
    others[meta.write_slots] = False
    assert torch.equal(slots[others].nan_to_num(7.0), before.flatten(0, 1)[others].nan_to_num(7.0))


def test_heads_are_normed_before_they_are_written_or_by_what_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _, cache, meta = make(BATCHES["mixed"], 4, 2, 64, 16)
    heads = torch.randn(meta.num_tokens, 8, 64)
    cis = torch.ones(len(heads), 1, 32, dtype=torch.complex64)
    norms = HeadNorms(torch.rand(6, 64), 1e-3)
    want = torch.cat([definitions.rms_norm(heads[:, :6], norms.weights, norms.eps), heads[:, 6:]], 1)
    given = heads.clone()
    ops.rotate_and_write(given, cis, cache, meta, norms)
    assert torch.allclose(given[:, :4], want[:, :4], atol=1e-5)
    assert torch.allclose(cache.flatten(0, 1)[meta.write_slots], want[:, 4:].view(-1, 2, 2, 64), atol=1e-5)

    seen: list[tuple[torch.Tensor, HeadNorms]] = []
    write = types.SimpleNamespace(rotate_and_write=lambda *given: seen.append((given[0].clone(), given[-1])))
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    monkeypatch.setattr(gpu, "family", lambda name: {"kv_write": write}[name])
    ops.rotate_and_write(heads, cis, cache, meta, norms)
    ((unchanged, given_norms),) = seen
    assert torch.equal(unchanged, heads) and given_norms is norms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_states_go_to_their_rows_and_columns_only(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    states, table = torch.randn(rows + 3, 40) * 100, torch.randn(200, 120).to(dtype)  # three padding rows
    states[0, :3] = torch.tensor([float("nan"), float("inf"), 1e-42])
    want, slots = table.clone(), torch.randperm(200)[:rows]
    want[slots, 40:80] = states[:rows].to(dtype)
    ops.keeper(table, 40, 40)(states, slots, rows)
    assert torch.equal(table.nan_to_num(7.0), want.nan_to_num(7.0))


def test_a_step_in_bfloat16_equals_its_reference() -> None:
    q, cache, meta = make(BATCHES["mixed"], 4, 2, 64, 16)
    heads = torch.randn(meta.num_tokens, 8, 64).bfloat16()
    cis = torch.polar(torch.ones(len(heads), 1, 32), torch.randn(len(heads), 1, 32))
    want, narrow = heads.clone(), cache.bfloat16()
    definitions.rope_(want[:, :6], cis)
    ops.rotate_and_write(heads, cis, narrow, meta)
    assert torch.allclose(heads.float(), want.float(), atol=0.05)
    got = ops.paged_attention(q.bfloat16(), narrow, meta, 0.125, None)
    assert torch.allclose(got.float(), definitions.paged_attention(q, narrow.float(), meta, 0.125, None), atol=0.05)


def test_elementwise_ops_equal_their_reference() -> None:
    x, weight = torch.randn(9, 96) * 3, torch.randn(96)
    assert torch.allclose(ops.rms_norm(x, weight, 1e-5), definitions.rms_norm(x, weight, 1e-5), atol=1e-5)
    assert torch.allclose(ops.rms_norm(x, None, 1e-5), definitions.rms_norm(x, None, 1e-5), atol=1e-5)


@pytest.mark.parametrize("num", [1, 37, 9001])
def test_soft_caps_equal_their_reference(num: int) -> None:
    """On both sides of the point where the approximation changes; infinities become the cap, and a NaN stays NaN."""
    torch.manual_seed(6)
    x = torch.randn(3, num) * torch.logspace(-6, 4, 3)[:, None]
    x[2, 0], x[1, -1], x[0, 0] = float("inf"), float("nan"), -18.75  # 0.625 caps
    want = definitions.soft_cap_(x.clone(), 30.0)
    assert torch.allclose(ops.soft_cap_(x.clone(), 30.0), want, rtol=5e-7, atol=0.0, equal_nan=True)
    assert want[2, 0] == 30.0 and want[1, -1].isnan()


@pytest.mark.parametrize("rows", [1, 3, 6, 7, 33, 100])
@pytest.mark.parametrize(("features", "inputs"), [(2, 5), (96, 48), (130, 1030)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_fused_linears_equal_their_parts(rows: int, features: int, inputs: int, has_bias: bool) -> None:
    torch.manual_seed(3)
    x, weight, norm = torch.randn(rows, inputs) * 2, torch.randn(features, inputs) * 0.2, torch.rand(inputs) + 0.5
    bias = torch.randn(features) if has_bias else None
    for scale in (None, norm):
        plain = F.linear(definitions.rms_norm(x, scale, 1e-5), weight, bias)
        normed = ops.linear_normed(x, scale, 1e-5, weight_formats.pack(weight, bias))
        assert torch.allclose(normed, plain, atol=1e-3)
        packed = weight_formats.pack(weight, bias, gated=True)
        assert torch.allclose(ops.linear_gated(x, scale, 1e-5, packed), definitions.silu_mul(plain), atol=1e-2)
        gelu = ops.linear_gated(x, scale, 1e-5, packed, "gelu_tanh")
        assert torch.allclose(gelu, definitions.gelu_tanh_mul(plain), atol=1e-2)
        clamped = ops.linear_gated(x, scale, 1e-5, packed, "clamped")
        assert torch.allclose(clamped, definitions.clamped_mul(plain), atol=1e-2)


def test_large_and_broken_numbers_stay_what_they_are() -> None:
    """Large activations of both signs, infinities and NaN: as in the reference, row by row."""
    rows = [[200.0, 1.0], [-200.0, 1.0], [88.0, 3.0], [float("inf"), 1.0], [float("nan"), 1.0]]
    packed = weight_formats.pack(torch.eye(2), gated=True)
    normed = definitions.rms_norm(torch.tensor(rows), None, 1e-30)
    for name, reference in (
        ("silu", definitions.silu_mul),
        ("gelu_tanh", definitions.gelu_tanh_mul),
        ("clamped", definitions.clamped_mul),
    ):
        got = ops.linear_gated(torch.tensor(rows), torch.ones(2), 1e-30, packed, name)
        assert torch.allclose(got, reference(normed), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_and_its_in_place_form(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(5, 48), torch.randn(33, 48).to(dtype), torch.randn(33).to(dtype)
    want = x @ weight.float().t()
    error = 1e-4 if dtype is torch.float32 else 0.2
    assert torch.allclose(ops.linear(x, weight_formats.pack(weight)).float(), want, atol=error)
    assert torch.allclose(ops.linear(x, weight_formats.pack(weight, bias)).float(), want + bias.float(), atol=error)
    residual = torch.randn(5, 33)
    assert torch.allclose(
        ops.linear_add_(residual.clone(), x, weight_formats.pack(weight)), residual + want, atol=error
    )
    norm = torch.randn(33)
    normed = ops.linear_add_(residual.clone(), x, weight_formats.pack(weight), norm, 1e-6)
    assert torch.allclose(normed, residual + definitions.rms_norm(want, norm, 1e-6), atol=error)


@pytest.mark.parametrize(("features", "inputs"), [(704, 2050), (34, 37), (130, 300)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_row_bits_do_not_depend_on_company(threads: int, features: int, inputs: int) -> None:
    """Every op that claims it: few or many rows equal, to the bit, the same rows of a batch that several threads
    share."""
    torch.manual_seed(2)
    most = 20_000 // features + 60
    x, weight, table = torch.randn(most, inputs), torch.randn(inputs), torch.randn(most, 256)
    packed, gated = (weight_formats.pack(torch.randn(features, inputs), gated=is_gated) for is_gated in (False, True))
    narrow = weight_formats.pack(torch.randn(features, inputs).bfloat16())
    ids = torch.arange(most)
    claims: dict[str, Callable[[slice], torch.Tensor]] = {
        "linear": lambda rows: ops.linear(x[rows], packed),
        "linear, bfloat16": lambda rows: ops.linear(x[rows], narrow),
        "linear_normed": lambda rows: ops.linear_normed(x[rows], None, 1e-5, packed),
        "linear_gated": lambda rows: ops.linear_gated(x[rows], None, 1e-5, gated),
        "linear_gated, clamped": lambda rows: ops.linear_gated(x[rows], None, 1e-5, gated, "clamped"),
        "linear_gated, GELU": lambda rows: ops.linear_gated(x[rows], None, 1e-5, gated, "gelu_tanh"),
        "rms_norm": lambda rows: ops.rms_norm(x[rows], weight, 1e-5),
        "route": lambda rows: torch.cat(ops.route(x[rows, :60].round(decimals=1), 8, renormalises=True), dim=1),
        "soft_cap": lambda rows: ops.soft_cap_(x[rows].clone(), 2.0),
        "embedding": lambda rows: ops.embedding(ids[rows], table),
    }
    claimed = {name for name, claim in is_batch_invariant(CPU, 64).items() if claim}
    claims = {name: op for name, op in claims.items() if name.partition(",")[0] in claimed}
    # The others have tests of their own.
    assert {*claims} >= claimed - {"rotate_and_write", "paged_attention", "sample"}
    with threads_of(2):
        whole = {name: op(slice(0, most)) for name, op in claims.items()}
    some = [slice(0, rows) for rows in (1, 5, 8, 16, 33, 64)] + [slice(3, 4), slice(9, most - 1)]
    with threads_of(threads):
        for name, op in claims.items():
            for rows in some:
                assert torch.equal(op(rows), whole[name][rows]), (name, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "cap"), [(None, 0.0), (6, 0.0), (None, 1.5), (6, 1.5)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (8, 1), (3, 3)])
def test_attention_bits_depend_neither_on_chunks_nor_on_company(
    heads: int, kv_heads: int, window: int | None, cap: float, dtype: torch.dtype, kernels: str
) -> None:
    """A sequence of 70 tokens: at once, in chunks, and token by token beside a stranger."""
    if not is_batch_invariant(CPU, 64)["paged_attention"]:
        assert kernels == "torch"
        return
    torch.manual_seed(4)
    dim, block, num = 64, 16, 70
    cache = torch.randn(12, block, 2, kv_heads, dim).to(dtype)
    sinks = torch.randn(heads) if cap else None
    q, stranger = torch.randn(num, heads, dim), torch.randn(1, heads, dim)
    tables = np.array([[1, 3, 5, 7, 9], [2, 4, 0, 0, 0]], dtype=np.int32)

    def attend(queries: torch.Tensor, lens: list[int], contexts: list[int]) -> torch.Tensor:
        meta = AttentionMetadata.build(lens, contexts, tables[: len(lens)], block, CPU)
        return ops.paged_attention(queries, cache, meta, 0.125, window, cap, sinks)

    with threads_of(1):
        whole = attend(q, [num], [num])
    with threads_of(2):
        for size in (7, 33):
            pieces = [
                attend(q[i : i + size], [len(q[i : i + size])], [min(num, i + size)]) for i in range(0, num, size)
            ]
            assert torch.equal(torch.cat(pieces), whole)
        for i in range(num):
            pair = torch.cat([q[i : i + 1], stranger])
            assert torch.equal(attend(pair, [1, 1], [i + 1, 20])[0], whole[i]), i


@contextlib.contextmanager
def threads_of(num: int) -> Iterator[None]:
    """Computes with `num` threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    builds.set_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        builds.set_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 2), (3, 3), (16, 1)])
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_bits_do_not_depend_on_shared_prefixes(
    threads: int, heads: int, kv_heads: int, dtype: torch.dtype, kernels: str
) -> None:
    """Nine rows share 48 keys, two others 64; one shares nothing, one is a prompt. With a window nothing is shared."""
    torch.manual_seed(5)
    dim, block, width = 64, 16, 8
    tables = np.array([np.arange(width) + width * row for row in range(13)], dtype=np.int32)
    sharing, pair, alone = [0, 1, 3, 4, 5, 7, 8, 9, 11], [2, 6], 10
    tables[sharing, :3], tables[pair, :4] = tables[0, :3], tables[2, :4]
    contexts = [50 + 3 * row for row in range(9)] + [49, 120, 100, 90]
    lens = [1] * 12 + [40]
    groups = PrefixGroups([*sharing, *pair, alone], [len(sharing), len(pair)], [48, 64])
    slot = slot_width(dim, dtype)
    cache = new_layers(
        width * 13, 1, block, kv_heads, slot, lambda shape: torch.zeros(shape, dtype=dtype), is_whole=False
    )[0]
    every = AttentionMetadata.build([width * block] * 13, [width * block] * 13, tables, block, CPU)
    keys, cis = torch.randn(every.num_tokens, heads + 2 * kv_heads, dim), torch.ones(every.num_tokens, 1, dim // 2) + 0j
    ops.rotate_and_write(keys, cis, cache, every)
    q, sinks = torch.randn(sum(lens), heads, dim), torch.randn(heads)
    plain, shared = (
        AttentionMetadata.build(lens, contexts, tables, block, CPU, prefixes=one) for one in (None, groups)
    )
    with threads_of(threads):
        for window, cap in ((None, 0.0), (None, 1.5), (20, 0.0)):
            got, want = (ops.paged_attention(q, cache, meta, 0.125, window, cap, sinks) for meta in (shared, plain))
            assert got.isfinite().all() and torch.equal(got, want), (window, cap)
