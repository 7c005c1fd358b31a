"""What the kernels were compiled to: wide multiply-adds in registers of 512 bits, and no call of a library's."""

import re
from collections import Counter

import pytest

from pdserve_kernels.cpu.attention import attend_unit
from pdserve_kernels.cpu.decoder import run_step, sample_logits
from pdserve_kernels.cpu.gemm import gemm
from pdserve_kernels.cpu.simd import HAS_BF16_DOT

KERNELS = {"gemm": gemm, "attend_unit": attend_unit, "run_step": run_step, "sample_logits": sample_logits}
_INSTRUCTION = re.compile(r"^\t(v?\w+)\t(.*)$", re.MULTILINE)
_SYMBOL = re.compile(r"\$([A-Za-z_]\w*)|(?:callq?|jmpq?)\t([A-Za-z_]\w*)")


@pytest.fixture(scope="module")
def assembly() -> dict[str, str]:
    """Of the optimised modules whose machine code is run, cached or not."""
    found = {}
    for name, kernel in KERNELS.items():
        library = kernel._library
        found[name] = library._codegen._tm.emit_assembly(library._get_module_for_linking())
    return found


def count(text: str, mnemonic: str) -> Counter[str]:
    """Instructions whose name begins with `mnemonic`, by the widest register they use."""
    widths: Counter[str] = Counter()
    for name, operands in _INSTRUCTION.findall(text):
        if name.startswith(mnemonic):
            widths[next((width for width in ("zmm", "ymm", "xmm") if f"%{width}" in operands), "none")] += 1
    return widths


@pytest.mark.parametrize(("kernel", "at_least"), [("gemm", 200), ("attend_unit", 800), ("run_step", 4)])
def test_multiply_adds_are_as_wide_as_registers(assembly, kernel, at_least):
    found = count(assembly[kernel], "vfmadd")
    assert found["zmm"] >= at_least
    assert set(found) == {"zmm"}


@pytest.mark.skipif(not HAS_BF16_DOT, reason="the processor has no bf16 dot product")
@pytest.mark.parametrize(("kernel", "at_least"), [("gemm", 200), ("attend_unit", 400)])
def test_bf16_dot_products_are_as_wide_as_registers(assembly, kernel, at_least):
    found = count(assembly[kernel], "vdpbf16ps")
    assert found["zmm"] >= at_least
    assert set(found) == {"zmm"}


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_called_but_kernels_and_what_reports_their_errors(assembly, kernel):
    """Above all no scalar fma of a C library, which LLVM calls where it does not know the machine."""
    symbols = {first or second for first, second in _SYMBOL.findall(assembly[kernel])}
    assert symbols
    foreign = {s for s in symbols if not s.startswith(("_ZN15pdserve_kernels3cpu", "numba_", "NRT_", "Py"))}
    assert not foreign
