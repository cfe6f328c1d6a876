"""The predicted peak: how many tokens running outputs will hold together at the worst moment to come.

Numbers in, a number out. Source: Past-Future scheduler (ASPLOS '25), as in LightLLM.
"""

from collections.abc import Iterable

Load = tuple[int, int]  # (tokens still to come, tokens held now)


def peak(loads: Iterable[Load]) -> int:
    """max over i of (c_1 + … + c_i + i · r_i), longest remaining first.

    Just before output i ends, outputs 1 … i are alive and each has grown by r_i.
    """
    held = most = 0
    for i, (remaining, now) in enumerate(sorted(loads, reverse=True), 1):
        held += now
        most = max(most, held + i * remaining)
    return most
