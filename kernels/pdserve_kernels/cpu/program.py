"""Addresses of the compiled entry points, and whether this machine can run them. Importing it compiles, or reads the
cache: seconds the first time, a fraction of one later."""

from pdserve_kernels.cpu import attention, decoder, gemm
from pdserve_kernels.cpu.simd import HAS_BF16_DOT

__all__ = ["ATTEND", "GEMM", "HAS_BF16_DOT", "LOGITS", "NUM_FUNCTIONS", "STEP", "kv_inner_order"]

STEP = int(decoder.run_step.address or 0)
LOGITS = int(decoder.sample_logits.address or 0)
GEMM = int(gemm.gemm.address or 0)
ATTEND = int(attention.attend_unit.address or 0)
NUM_FUNCTIONS = len((STEP, LOGITS, GEMM, ATTEND))
kv_inner_order = "word_columns"
