"""What is read from machine code, and what counts as a fault of a compiled kernel."""

import dataclasses
import re

import pytest

from sluice_server.kernels.triton.aot import SASS, AotCase, KernelResources, faults, loop_of

CODE = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                    /* 0x00000a00ff017b82 */
        /*0010*/                   HMMA.16816.F32.BF16 R8, R4, R2, RZ ;      /* 0x000000020408723c */
        /*0020*/              @!P0 BRA 0x10 ;                                /* 0xfffffffc00088947 */
        /*0030*/                   IADD3 R1, R2, 0x20, RZ ;                  /* 0x0000002002017810 */
        /*0040*/               @P4 BRA 0x60 ;                                /* 0x0000000000084947 */
        /*0050*/              @!P1 BRA 0x0 ;                                 /* 0xfffffffc00088947 */
        /*0060*/                   BRA 0x60;                                 /* 0xfffffffc00fc7947 */
"""
FINE = KernelResources(64, 0, 1000, 2, 2, 8, 16, 0, 2, 2, 100, 5000)
CASE = AotCase("a/b", None, {}, {}, tensor_cores="mma", is_pipelined=True)


def test_the_shortest_loop_that_multiplies_is_measured() -> None:
    found = re.findall(SASS, CODE)
    assert [(name, to) for _, name, to in found if to] == [("BRA", to) for to in ("0x10", "0x60", "0x0", "0x60")]
    assert loop_of(found) == 2 and loop_of([one for one in found if one[1] != "HMMA"]) == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"buffers": 1}, "keys and values have 1 buffers: 2 are needed"),
        ({"waits": 0}, "each tile waits for all copies in flight"),
        ({"stack": 40}, "spills: 40 bytes"),
        ({"shared": 106_496}, "106496 bytes of shared memory; a block has 101376"),
        ({"mma": 0}, "no tensor cores"),
    ],
)
def test_faults_are_named(changes: dict[str, int], said: str) -> None:
    assert not faults(CASE, 120, FINE)
    (found,) = faults(CASE, 120, dataclasses.replace(FINE, **changes))
    assert said in found


@pytest.mark.parametrize(("capability", "is_wrong"), [(80, False), (90, True), (100, True), (120, False)])
def test_warp_groups_multiply_where_there_are_any(capability: int, is_wrong: bool) -> None:
    case = dataclasses.replace(CASE, tensor_cores="wgmma")
    assert faults(case, capability, dataclasses.replace(FINE, wgmma=0)) == ["no wgmma"] * is_wrong
