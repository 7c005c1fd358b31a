"""The tables of docs/quality.md, between markers; what stands around them is written by hand."""

from collections.abc import Sequence
from pathlib import Path

from pdserve_bench.quality.scores import Comparison, Measurement, compare, overall, with_all

BEGIN = "<!-- measured: `python -m pdserve_bench.quality --write-docs` writes from here -->\n"
END = "<!-- to here -->\n"


def write_tables(page: Path, tables: str) -> None:
    """Put `tables` between the page's markers.

    Raises:
        ValueError: the page has no markers.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no markers to write tables between")
    page.write_text(f"{before}{BEGIN}{tables}{END}{after}", encoding="utf-8")


def quality_tables(reference: Measurement, others: Sequence[Measurement]) -> str:
    """Markdown: a row a configuration, over all slices; then a row a slice, with two columns a configuration."""
    return f"{_configurations(reference, others)}\n{_slices(reference, others)}"


def _configurations(reference: Measurement, others: Sequence[Measurement]) -> str:
    rows: list[list[str]] = []
    for measured in (reference, *others):
        found = overall(measured, reference)
        identity = f"`{measured.evaluation_id}`" if measured.evaluation_id else ""
        rows.append([measured.label, identity, f"{found.perplexity:.3f}", *_cells(found)])
    return _table(["configuration", "evaluation id", "perplexity", "ratio to fp32", "agreement with fp32"], 2, rows)


def _slices(reference: Measurement, others: Sequence[Measurement]) -> str:
    heads = ["slice", "tokens", "perplexity in fp32"]
    heads += [f"{measured.label}: {what}" for measured in others for what in ("ratio", "agreement")]
    columns = [compare(measured, reference) for measured in others]
    rows = [
        [
            score.name.replace("_", " "),
            f"{score.num_tokens:,}",
            f"{score.perplexity:.3f}",
            *(cell for column in columns for cell in _cells(column[number])),
        ]
        for number, score in enumerate(with_all(reference.slices))
    ]
    return _table(heads, 1, rows)


def _cells(found: Comparison) -> list[str]:
    return [f"{found.perplexity_ratio:.4f}", f"{100 * found.agreement:.2f} %"]


def _table(heads: Sequence[str], num_text: int, rows: Sequence[Sequence[str]]) -> str:
    """The first `num_text` columns to the left, the others to the right."""
    rule = ["---"] * num_text + ["---:"] * (len(heads) - num_text)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, rule, *rows))
