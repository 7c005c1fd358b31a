"""Request traces of production services: reading, and scaling to a smaller machine. Makes no prompts."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

TRACE_BLOCK_TOKENS = 512
"""Tokens of a prompt that one hash id of a Mooncake trace names, with all before them."""

SAMPLES = Path(__file__).parent.parent / "samples"

TRACES: Mapping[str, str] = {
    "azure-conv-sample": "azure_llm_2023_conv_head.csv",
    "azure-code-sample": "azure_llm_2023_code_head.csv",
    "mooncake-sample": "mooncake_conversation_head.jsonl",
}
"""The traces that ship with this package, by name, and their files in `SAMPLES`."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request; `at_s` from the first of the trace. `hash_ids` name its prompt's blocks of `block_tokens` tokens."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = TRACE_BLOCK_TOKENS

    def __post_init__(self) -> None:
        if not math.isfinite(self.at_s):
            raise ValueError(f"a time must be finite, not {self.at_s}")
        if self.num_prompt_tokens < 1 or self.num_output_tokens < 0 or self.block_tokens < 1:
            raise ValueError("a prompt and a block have at least one token, and an output none or more")


def trace_path(name_or_path: str) -> Path:
    """Of a shipped sample, by its name in `TRACES`, or of any file.

    Raises:
        ValueError: it is neither.
    """
    if name_or_path in TRACES:
        return SAMPLES / TRACES[name_or_path]
    path = Path(name_or_path)
    if not path.is_file():
        raise ValueError(f"{name_or_path}: no such trace file, nor a sample of that name ({', '.join(TRACES)})")
    return path


def read_trace(path: Path) -> list[TraceRow]:
    """Rows by rising time, the first at 0.

    Known are the Azure LLM inference trace (CSV of TIMESTAMP, ContextTokens, GeneratedTokens) and Mooncake's (JSON
    lines of timestamp in ms, input_length, output_length, hash_ids).

    Raises:
        ValueError: not such a file, or a row is malformed: says in which line.
        OSError: it cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file in UTF-8") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    rows = list(_parsed(path, *_reader_of(path, numbered)))
    if not rows:
        raise ValueError(f"{path}: a trace without requests")
    rows.sort(key=lambda row: row.at_s)
    return [replace(row, at_s=row.at_s - rows[0].at_s) for row in rows]


_Numbered = Sequence[tuple[int, str]]


def _reader_of(path: Path, numbered: _Numbered) -> tuple[Callable[[str], TraceRow], _Numbered]:
    """What reads a line, and the lines that hold a row."""
    first = numbered[0][1] if numbered else ""
    if first.lstrip().startswith("{"):
        return _mooncake_row, numbered
    header = first.split(",")
    if all(column in header for column in ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        return lambda line: _azure_row(header, line), numbered[1:]
    raise ValueError(f"{path}: neither an Azure trace (CSV with a header) nor a Mooncake trace (JSON lines)")


def _parsed(path: Path, read_row: Callable[[str], TraceRow], numbered: _Numbered) -> Iterator[TraceRow]:
    for number, line in numbered:
        try:
            yield read_row(line)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}, line {number}: not a request of a trace: {reason}") from error


def _azure_row(header: Sequence[str], line: str) -> TraceRow:
    """Its clock shows no zone, or always the same one."""
    values = dict(zip(header, line.split(","), strict=True))
    since = datetime.fromisoformat(values["TIMESTAMP"]).replace(tzinfo=None) - datetime(2000, 1, 1)
    return TraceRow(since.total_seconds(), int(values["ContextTokens"]), int(values["GeneratedTokens"]))


def _mooncake_row(line: str) -> TraceRow:
    row: dict[str, Any] = json.loads(line)
    if type(row) is not dict:
        raise ValueError("not a JSON object")
    lengths = _integer(row["input_length"]), _integer(row["output_length"])
    return TraceRow(float(row["timestamp"]) / 1000, *lengths, tuple(map(_integer, row.get("hash_ids", ()))))


def _integer(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def rescaled(
    rows: Iterable[TraceRow],
    *,
    rate_factor: float = 1.0,
    length_factor: float = 1.0,
    max_prompt_tokens: int,
    max_output_tokens: int,
    duration_s: float | None = None,
) -> list[TraceRow]:
    """A trace at `rate_factor` times its rate, with lengths times `length_factor`, then cut to the most allowed.

    Arrivals keep their shape: times are divided by `rate_factor`, and those from `duration_s` on are left out. Lengths
    are rounded, and at least 1. Blocks shrink with the prompts, to the whole number of tokens below, so that a block
    that was whole stays whole; names remain of whole blocks within the prompt only. The share of a prompt that can be
    found in a cache is kept best where 512 × `length_factor` is a multiple of the server's block size.

    Raises:
        ValueError: a factor, a maximum or the duration is not above 0, blocks would vanish, or no row is left.
    """
    _check_scaling(rate_factor, length_factor, max_prompt_tokens, max_output_tokens)
    ordered = sorted(rows, key=lambda row: row.at_s)
    scaled = [
        _scaled_row(
            replace(row, at_s=(row.at_s - ordered[0].at_s) / rate_factor),
            length_factor,
            max_prompt_tokens,
            max_output_tokens,
        )
        for row in ordered
    ]
    kept = [row for row in scaled if duration_s is None or row.at_s < duration_s]
    if not kept:
        raise ValueError("no request of the trace is left: it is empty, or the duration is not above 0 s")
    return kept


def _check_scaling(rate_factor: float, length_factor: float, max_prompt_tokens: int, max_output_tokens: int) -> None:
    for name, factor in (("rate", rate_factor), ("length", length_factor)):
        if not 0 < factor < math.inf:
            raise ValueError(f"the {name} factor must be above 0 and finite, not {factor}")
    if max_prompt_tokens < 1 or max_output_tokens < 1:
        raise ValueError(f"at least one token of prompt and output, not {max_prompt_tokens} and {max_output_tokens}")


def _scaled_row(row: TraceRow, factor: float, max_prompt_tokens: int, max_output_tokens: int) -> TraceRow:
    block_tokens = int(row.block_tokens * factor)
    if row.hash_ids and not block_tokens:
        raise ValueError(f"a length factor of {factor} leaves nothing of blocks of {row.block_tokens} tokens")
    num_prompt_tokens = min(max_prompt_tokens, max(1, round(row.num_prompt_tokens * factor)))
    num_whole = num_prompt_tokens // block_tokens if block_tokens else 0
    return replace(
        row,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=min(max_output_tokens, max(1, round(row.num_output_tokens * factor))),
        hash_ids=row.hash_ids[:num_whole],
        block_tokens=max(1, block_tokens),
    )
