"""`python -m pdserve_bench.quality`: measures every configuration, shows the tables, and fails if the gate does."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pdserve.core.model_fetch import resolve_model
from pdserve.serving.settings_loader import load_settings
from pdserve_bench.conditions import conditions
from pdserve_bench.quality.engine_scores import CHUNK_TOKENS, Configuration, score_engine
from pdserve_bench.quality.gate import gate
from pdserve_bench.quality.page import quality_tables, write_tables
from pdserve_bench.quality.scores import Measurement, compare
from pdserve_bench.quality.texts import CHECKSUMS, encode_slices
from pdserve_bench.quality.transformers_scores import score_transformers
from pdserve_bench.report import result, targets_table, write_result
from pdserve_bench.targets import Target

PAGE = Path("docs/quality.md")
REFERENCE = Configuration("pdserve float32", "float32")
CONFIGURATIONS = (
    Configuration("pdserve bfloat16", "bfloat16"),
    Configuration("pdserve bfloat16, bf16 attention", "bfloat16", "bfloat16"),
)
"""Those the gate judges: one more is one more row and two more columns."""


def main(
    model: Annotated[str, typer.Option(help="A name, a directory or a GGUF file.")] = "smollm2-135m-instruct",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    write_docs: Annotated[bool, typer.Option("--write-docs", help=f"Rewrite the tables of {PAGE}.")] = False,
) -> None:
    """Perplexity and greedy agreement with fp32 on the fixed texts. Needs transformers, for its rows."""
    console = Console()
    source = resolve_model(model, load_settings({}, None, os.environ).cache_dir.expanduser())
    slices = encode_slices(source)
    reference = score_engine(source, REFERENCE, slices)
    ours = [score_engine(source, configuration, slices) for configuration in CONFIGURATIONS]
    exact, rival = (score_transformers(source, dtype, slices) for dtype in ("float32", "bfloat16"))
    targets = [target for measured in ours for target in gate(measured, reference, rival)]
    others = [*ours, exact, rival]
    console.print(quality_tables(reference, others), markup=False, soft_wrap=True)
    console.print(targets_table(targets))
    if json_file is not None:
        write_result(json_file, _document(model, reference, others, targets))
    if write_docs:
        write_tables(PAGE, quality_tables(reference, others))
    if not all(target.met for target in targets):
        raise typer.Exit(1)


def _document(
    model: str, reference: Measurement, others: Sequence[Measurement], targets: Sequence[Target]
) -> dict[str, object]:
    settings = {"model": model, "chunk_tokens": CHUNK_TOKENS, "texts": dict(CHECKSUMS)}
    measured = [_as_json(measurement, reference) for measurement in (reference, *others)]
    return result("quality", conditions(settings, {}, 0.0), {"configurations": measured}, targets)


def _as_json(measured: Measurement, reference: Measurement) -> dict[str, object]:
    return {
        "label": measured.label,
        "evaluation_id": measured.evaluation_id,
        "slices": [asdict(found) for found in compare(measured, reference)],
    }


if __name__ == "__main__":
    typer.run(main)
