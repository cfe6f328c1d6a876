"""Philox against the published vectors, and its mapping of coordinates to noise."""

import math

import pytest
import torch

from sluice_server.kernels.reference import philox as under_test
from sluice_server.kernels.reference.philox import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    PhiloxWords,
    gumbel,
    philox,
    row_uniforms,
    uniforms,
)

# kat_vectors of Random123: philox4x32 with 10 rounds
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    words = PhiloxWords(*(torch.tensor([[word]]) for word in counter))
    found = philox(words, column(signed(key[0] | key[1] << 32)))
    assert tuple(int(word) for word in found) == expected


def test_coordinates_land_in_their_words() -> None:
    seed, position, output = 0xF123456789ABCDEF, 77, 3
    words = philox(PhiloxWords(*(torch.tensor([[w]]) for w in (25, position, output, 0))), column(signed(seed)))
    found = uniforms(column(signed(seed)), column(position), column(output), torch.tensor([[100, 101, 102, 103]]))
    expected = [min((int(w) + 0.5) / 2**32, 1 - 2**-24) for w in words]
    assert found[0].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("vocab", [1, 111, 4096, 70001])
def test_row_variant_equals_the_variant_by_id(vocab: int) -> None:
    seeds, positions, outputs = column(-5, 2**62, 0), column(0, 9, 2**31), column(0, 1, 7)
    ids = torch.arange(vocab).expand(3, vocab)
    assert torch.equal(row_uniforms(seeds, positions, outputs, vocab), uniforms(seeds, positions, outputs, ids))


def test_passes_of_any_size_give_the_same_row(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinates = column(1, 2, 3, 4, 5), column(0, 1, 2, 3, 4), column(0, 0, 0, 0, 1)
    whole = row_uniforms(*coordinates, 1000)
    monkeypatch.setattr(under_test, "_CALLS", 37)
    assert torch.equal(row_uniforms(*coordinates, 1000), whole)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_every_coordinate_matters(changed: int) -> None:
    seeds, positions, outputs = (column(value + (at == changed)) for at, value in enumerate((5, 6, 7)))
    base = row_uniforms(column(5), column(6), column(7), 512)
    assert not torch.isin(row_uniforms(seeds, positions, outputs, 512), base).any()


def test_high_half_of_the_seed_matters() -> None:
    low, high = column(1), column(1 + 2**32)
    assert not torch.equal(row_uniforms(low, column(0), column(0), 64), row_uniforms(high, column(0), column(0), 64))


def test_uniforms_are_uniform_and_inside() -> None:
    noise = row_uniforms(column(12), column(0), column(0), 400_000)[0]
    counts = torch.histc(noise, bins=100, min=0.0, max=1.0)
    chi_squared = ((counts - 4000) ** 2 / 4000).sum().item()
    assert noise.min() > 0.0 and noise.max() < 1.0
    assert chi_squared < 149.4  # 99 degrees of freedom, p = 0.001; the seed is fixed


def test_words_at_the_ends_stay_inside() -> None:
    ends = under_test._to_unit(torch.tensor([0, 1, 2**32 - 1]))
    noise = gumbel(ends.clone())
    assert ends.tolist() == [2**-33, 3 * 2**-33, 1 - 2**-24]
    assert noise.max() < GUMBEL_MAX and noise.min() > GUMBEL_MIN
    assert noise[0].item() == pytest.approx(33 * math.log(2), rel=1e-6)


def test_gumbel_bits_do_not_depend_on_place_or_length() -> None:
    whole = torch.rand(100_001, generator=torch.Generator().manual_seed(0)).clamp_(2**-33, 1 - 2**-24)
    noise = gumbel(whole.clone())
    for first, length in ((1, 1), (3, 17), (1000, 64), (777, 1024), (50_001, 50_000)):
        assert torch.equal(gumbel(whole[first : first + length].clone()), noise[first : first + length])
