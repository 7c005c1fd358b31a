"""The bounds that the default model's figures must keep on a CPU. Other models have none."""

from collections.abc import Iterator, Sequence

from pdserve_bench.engine.plan import Configuration
from pdserve_bench.engine.results import ConfigurationResult, DecodeCell, PrefillCell
from pdserve_bench.targets import Target

JUDGED_MODEL = "smollm2-135m-instruct"

DECODE = Configuration("bfloat16", 2)
DECODE_FLOORS = {(8, 512): 1.6, (32, 2048): 1.7, (8, 2048): 1.4}
"""Step time as a multiple of its floor, by (batch, context)."""
OUTSIDE_SHARE = 0.08
"""Of the step: everything but GEMM and attention."""

PREFILL = Configuration("bfloat16", 1)
PREFILL_BFLOAT16_ATTENTION = Configuration("bfloat16", 1, "bfloat16")
CEILING_SHARES = {PREFILL: 0.51, PREFILL_BFLOAT16_ATTENTION: 0.55}
PROMPT_LEN, LARGE_CHUNK, SMALL_CHUNK = 2048, 512, 128
SMALL_CHUNK_TIME = 1.10
"""As a multiple of the large chunk's."""


def targets(results: Sequence[ConfigurationResult]) -> list[Target]:
    """Those whose cells were measured."""
    judged = [result for result in results if result.model_name == JUDGED_MODEL]
    decode = [target for result in judged if result.configuration == DECODE for target in _decode(result)]
    return decode + [target for result in judged for target in _prefill(result)]


def _decode(result: ConfigurationResult) -> Iterator[Target]:
    for cell in result.decode:
        bound = DECODE_FLOORS.get((cell.batch, cell.context))
        if bound is not None:
            name, limits, noise = _decode_name(cell), result.limits, cell.foreign_cores
            of_both = max(noise, limits.foreign_cores)
            yield Target(f"{name}, step time", "floors", "<=", cell.floors(limits), bound, of_both)
            if cell.shares is not None:
                outside = f"{name}, outside GEMM and attention"
                yield Target(outside, "of step", "<=", cell.shares.outside, OUTSIDE_SHARE, noise)


def _prefill(result: ConfigurationResult) -> Iterator[Target]:
    bound = CEILING_SHARES.get(result.configuration)
    cells = {cell.chunk: cell for cell in result.prefill if cell.num_tokens == PROMPT_LEN}
    large, small = cells.get(LARGE_CHUNK), cells.get(SMALL_CHUNK)
    if bound is None or large is None:
        return
    share, of_both = large.ceiling_share(result.limits), max(large.foreign_cores, result.limits.foreign_cores)
    yield Target(_prefill_name(result, large), "of GEMM ceiling", ">=", share, bound, of_both)
    if small is not None and result.configuration == PREFILL:
        slower = small.prompt.median_s / large.prompt.median_s
        noise = max(small.foreign_cores, large.foreign_cores)
        name = f"{_prefill_name(result, small)}, time"
        yield Target(name, f"of chunk {LARGE_CHUNK}", "<=", slower, SMALL_CHUNK_TIME, noise)


def _decode_name(cell: DecodeCell) -> str:
    return f"decode, batch {cell.batch}, context {cell.context}"


def _prefill_name(result: ConfigurationResult, cell: PrefillCell) -> str:
    option = "" if result.configuration.attention == "float32" else f", {result.configuration.attention} attention"
    return f"prefill of {cell.num_tokens}, chunk {cell.chunk}{option}"
