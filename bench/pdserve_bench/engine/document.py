"""The engine benchmark's results as tables and as JSON, every figure beside its floor."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.table import Table

from pdserve_bench.conditions import conditions
from pdserve_bench.engine.plan import Workload
from pdserve_bench.engine.results import ConfigurationResult, Shares
from pdserve_bench.report import new_table, noise_mark
from pdserve_bench.report import result as result_file
from pdserve_bench.targets import Target


def document(
    workload: Workload, results: Sequence[ConfigurationResult], targets: Sequence[Target]
) -> dict[str, object]:
    """The result file: every cell with its floor and what that says of it."""
    fingerprints = {result.configuration.dtype: result.fingerprint for result in results}
    settings = {**asdict(workload), "source": str(workload.source), "fingerprints": fingerprints}
    foreign_cores = max((result.foreign_cores for result in results), default=0.0)
    found = conditions(settings, {"workload": workload.seed}, foreign_cores)
    return result_file("engine", found, {"configurations": [_configuration(one) for one in results]}, targets)


def _configuration(result: ConfigurationResult) -> dict[str, object]:
    limits = result.limits
    decode = [
        {**asdict(cell), "floor_s": cell.floor_s(limits), "floors": cell.floors(limits)} for cell in result.decode
    ]
    prefill = [
        {
            **asdict(cell),
            "tokens_per_s": cell.tokens_per_s,
            "floor_s": cell.floor_s(limits),
            "ceiling_share": cell.ceiling_share(limits),
        }
        for cell in result.prefill
    ]
    return {**asdict(result), "decode": decode, "prefill": prefill}


def tables(results: Sequence[ConfigurationResult]) -> Iterator[Table]:
    for result in results:
        if result.decode:
            yield _decode_table(result)
        if result.prefill:
            yield _prefill_table(result)


def _decode_table(result: ConfigurationResult) -> Table:
    limits = result.limits
    title = (
        f"Decode: {result.configuration}; reads {limits.bytes_per_s / 1e9:.1f} GB/s{noise_mark(limits.foreign_cores)}"
    )
    columns = ("batch", "context", "step ms", "p10", "p90", "min", "floor ms", "floors", "tokens/s", *_SHARES)
    table = new_table(title, (), (*columns, "foreign cores"))
    for cell in result.decode:
        step = cell.step
        table.add_row(
            str(cell.batch),
            str(cell.context),
            *(f"{1e3 * value:.2f}" for value in (step.median_s, step.p10_s, step.p90_s, step.min_s)),
            f"{1e3 * cell.floor_s(limits):.2f}",
            f"{cell.floors(limits):.2f}",
            f"{cell.batch / step.median_s:.0f}",
            *_shares(cell.shares),
            f"{cell.foreign_cores:.2f}{noise_mark(cell.foreign_cores)}",
        )
    return table


def _prefill_table(result: ConfigurationResult) -> Table:
    limits = result.limits
    title = (
        f"Prefill: {result.configuration}; multiplies {limits.flops_per_s / 1e9:.0f} GFLOP/s, "
        f"the model's matrices {limits.model_flops_per_s / 1e9:.0f}{noise_mark(limits.foreign_cores)}"
    )
    columns = ("tokens", "chunk", "tokens/s", "s", "min", "floor s", "of ceiling", *_SHARES)
    table = new_table(title, (), (*columns, "foreign cores"))
    for cell in result.prefill:
        table.add_row(
            str(cell.num_tokens),
            str(cell.chunk),
            f"{cell.tokens_per_s:.0f}",
            *(f"{value:.3f}" for value in (cell.prompt.median_s, cell.prompt.min_s, cell.floor_s(limits))),
            f"{cell.ceiling_share(limits):.2f}",
            *_shares(cell.shares),
            f"{cell.foreign_cores:.2f}{noise_mark(cell.foreign_cores)}",
        )
    return table


_SHARES = ("GEMM %", "attention %", "sampling %", "model's rest %", "Python %")


def _shares(shares: Shares | None) -> Iterator[str]:
    if shares is None:
        yield from ("–" for _ in _SHARES)
    else:
        for share in (shares.gemm, shares.attention, shares.sampling, shares.model_rest, shares.python):
            yield f"{100 * share:.1f}"
