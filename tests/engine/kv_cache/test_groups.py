"""Groups of layers: every layer has a place of its own, and what a long context holds is what its windows leave."""

import pytest

from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.groups import MAX_WASTE, LayerGroups, layer_groups, one_group
from sluice_server.engine.kv_cache.identity import UNNAMED
from sluice_server.engine.kv_cache.prefix import root
from sluice_server.engine.kv_cache.sizes import Window
from sluice_server.engine.kv_cache.table import BlockTable

GEMMA3 = ((512,) * 5 + (None,)) * 4 + (512, 512)
ALTERNATING = (4096, None) * 13
MIXED = (512, None, 1024, None, 512, 1024, 1024)
SIZE = 32


GEMMA3_LARGE = ((4,) * 5 + (None,)) * 10 + (4, 4)


@pytest.mark.parametrize("windows", [GEMMA3, GEMMA3_LARGE, ALTERNATING, MIXED, (None,) * 5, (7,) * 3])
def test_each_layer_has_a_place_of_its_own_among_layers_of_its_window(windows: tuple[int | None, ...]) -> None:
    groups = layer_groups(windows)
    places = list(zip(groups.group_of, groups.place_of, strict=True))
    assert len(set(places)) == len(windows)
    assert all(groups.windows[group] == window for group, window in zip(groups.group_of, windows, strict=True))
    assert max(groups.place_of) < groups.size
    assert groups.num * groups.size * (1 - MAX_WASTE) <= len(windows)
    assert list(groups.windows) == sorted(groups.windows, key=lambda size: size or 0)  # full attention first


@pytest.mark.parametrize("windows", [GEMMA3, ALTERNATING, MIXED, (None,) * 5])
@pytest.mark.parametrize("is_one", [False, True])
def test_layers_of_a_stage_have_the_block_tables_of_all(windows: tuple[int | None, ...], is_one: bool) -> None:
    whole = one_group(windows) if is_one else layer_groups(windows)
    cut = len(windows) // 2
    assert whole.of_layers(range(len(windows))) is whole
    for layers in (range(cut), range(cut, len(windows))):
        part = whole.of_layers(layers)
        places = list(zip(part.group_of, part.place_of, strict=True))
        assert len(set(places)) == len(layers) and max(part.place_of) + 1 == part.size <= whole.size
        assert part.windows == whole.windows
        for layer, group in zip(layers, part.group_of, strict=True):
            assert part.windows[group] == whole.windows[whole.group_of[layer]]
    assert whole.of_layers(range(cut)).size <= -(-whole.size * 2 // 3) or whole.size == 1


def test_one_window_is_one_group() -> None:
    assert layer_groups((7, 7)) == one_group((7, 7)) == LayerGroups((7,), 2, (0, 0), (0, 1))
    assert one_group((7, None)).windows == (None,)
    assert one_group((7, 9)).windows == (9,)


def test_a_long_context_holds_less_than_a_third_on_the_pattern_of_gemma_3() -> None:
    context, chunk = 32768, 512
    groups = layer_groups(GEMMA3)
    windows = [None if size is None else Window(size, chunk) for size in groups.windows]
    cache = KVCache(context // SIZE * groups.num, SIZE, prefix_caching=True, windows=windows)
    table, most = BlockTable(root(UNNAMED)), 0
    cache.adopt(table, cache.no_prefix(), context)
    for end in range(chunk, context + 1, chunk):
        assert cache.grow(table, end)
        most = max(most, cache.pool.num_held)
        cache.trim(table, end)
    assert most <= cache.sizes.most_blocks(context)
    whole = context // SIZE * len(GEMMA3)  # blocks of one layer, where no layer gives any back
    assert most * groups.size <= 0.3 * whole
    cache.check([table])


def test_a_prefix_is_found_only_with_the_windows_behind_it() -> None:
    cache = KVCache(40, 4, prefix_caching=True, windows=(None, Window(6, 8)))
    tokens, first = list(range(33)), BlockTable(root(UNNAMED))
    cache.adopt(first, cache.no_prefix(), 33)
    for end in (8, 16, 24, 32):
        assert cache.grow(first, end)
        cache.commit(first, tokens, end)
        cache.trim(first, end)
    assert first.trimmed == [0, 6]
    found = cache.match(BlockTable(root(UNNAMED)), tokens)
    assert found.num == 8 and found.groups[1][:6] == [cache.pool.null] * 6
    lost = found.groups[1][-1]
    assert cache.index.forget(lost) is not None
    shorter = cache.match(BlockTable(root(UNNAMED)), tokens)
    assert shorter.num == 7 and shorter.groups[0] == found.groups[0][:7]
    second = BlockTable(root(UNNAMED))
    cache.adopt(second, shorter, 33)
    cache.check([first, second])
