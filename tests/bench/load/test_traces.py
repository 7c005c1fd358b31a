import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_bench.load.traces import SAMPLES, TRACES, TraceRow, read_trace, rescaled, trace_path

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.5000000,4808,10
2023-11-17 00:00:00.5000000,3180,8
"""
MOONCAKE = """{"timestamp": 2000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 600, "output_length": 0, "hash_ids": [0, 3]}
"""
LARGE = {"max_prompt_tokens": 10**9, "max_output_tokens": 10**9}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_an_azure_trace_is_read(tmp_path: Path, line_end: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(AZURE.replace("\n", line_end).encode("utf-8-sig"))
    assert read_trace(path) == [TraceRow(0.0, 4808, 10), TraceRow(1.0, 3180, 8)]


def test_azure_columns_are_found_by_name(tmp_path: Path) -> None:
    text = "GeneratedTokens,TIMESTAMP,more,ContextTokens\n10,2024-05-10 00:00:00.009930+00:00,x,4808\n"
    assert read_trace(written(tmp_path, text)) == [TraceRow(0.0, 4808, 10)]


def test_a_mooncake_trace_is_read(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, MOONCAKE)) == [
        TraceRow(0.0, 1100, 5, (0, 1, 2)),
        TraceRow(0.5, 600, 0, (0, 3)),
    ]


def test_rows_come_by_time(tmp_path: Path) -> None:
    text = "".join(reversed(MOONCAKE.splitlines(keepends=True)))
    assert [row.num_prompt_tokens for row in read_trace(written(tmp_path, text))] == [1100, 600]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2023-11-16 18:17:03,4808", "shorter"),
        ("2023-11-16 18:17:03,4808,10,7", "longer"),
        ("yesterday,4808,10", "yesterday"),
        ("2023-11-16 18:17:03,many,10", "many"),
        ("2023-11-16 18:17:03,0,10", "at least one token"),
        ("2023-11-16 18:17:03,10,-1", "at least one token"),
    ],
)
def test_a_malformed_azure_row_is_named(tmp_path: Path, row: str, reason: str) -> None:
    path = written(tmp_path, AZURE + "\n" + row + "\n")
    with pytest.raises(ValueError, match=rf"{path}, line 5: .*{reason}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "Expecting property name"),
        ("[1, 2]", "not a JSON object"),
        ('{"timestamp": 1, "input_length": 4}', "'output_length' is missing"),
        ('{"timestamp": null, "input_length": 4, "output_length": 4}', "NoneType"),
        ('{"timestamp": NaN, "input_length": 4, "output_length": 4}', "finite"),
        ('{"timestamp": 1, "input_length": 4.5, "output_length": 4}', "4.5 is not a whole number"),
        ('{"timestamp": 1, "input_length": true, "output_length": 4}', "True is not a whole number"),
        ('{"timestamp": 1, "input_length": 4, "output_length": 4, "hash_ids": ["a"]}', "'a' is not a whole number"),
        ('{"timestamp": 1, "input_length": 4, "output_length": 4, "hash_ids": 3}', "not iterable"),
        ('{"timestamp": 1, "input_length": -4, "output_length": 4}', "at least one token"),
    ],
)
def test_a_malformed_mooncake_row_is_named(tmp_path: Path, row: str, reason: str) -> None:
    path = written(tmp_path, MOONCAKE + row + "\n")
    with pytest.raises(ValueError, match=rf"{path}, line 3: .*{reason}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "neither an Azure trace"),
        (b"a,b,c\n1,2,3\n", "neither an Azure trace"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "without requests"),
        (b"\xff\xfe\x00", "UTF-8"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path}: .*{reason}"):
        read_trace(path)


@pytest.mark.parametrize("name", TRACES)
def test_samples_ship_and_are_attributed(name: str) -> None:
    rows = read_trace(trace_path(name))
    assert len(rows) == 200
    assert rows[0].at_s == 0
    assert 30 < rows[-1].at_s < 600
    assert any(row.hash_ids for row in rows) == name.startswith("mooncake")
    assert TRACES[name] in (SAMPLES / "README.md").read_text(encoding="utf-8")


def test_the_mooncake_sample_shares_prefixes_and_names_every_block() -> None:
    rows = read_trace(trace_path("mooncake-sample"))
    names = [name for row in rows for name in row.hash_ids]
    assert len(set(names)) < len(names)
    assert all(len(row.hash_ids) == -(-row.num_prompt_tokens // 512) for row in rows)


def test_a_trace_is_found_by_name_or_path(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE)
    assert trace_path(str(path)) == path
    with pytest.raises(ValueError, match=r"nowhere\.csv: .*mooncake-sample"):
        trace_path(str(tmp_path / "nowhere.csv"))


ROWS = st.lists(
    st.builds(
        lambda at_s, tokens, output: TraceRow(at_s, tokens, output, tuple(range(-(-tokens // 512)))),
        st.floats(0, 3600),
        st.integers(1, 20_000),
        st.integers(0, 2000),
    ),
    min_size=1,
    max_size=20,
)


@settings(deadline=None)
@given(
    ROWS,
    st.floats(0.01, 10),
    st.floats(1 / 512, 2).filter(lambda f: 512 * f >= 1),
    st.integers(1, 9000),
    st.integers(1, 500),
)
def test_a_rescaled_trace_keeps_order_shape_and_bounds(
    rows: list[TraceRow], rate_factor: float, length_factor: float, max_prompt: int, max_output: int
) -> None:
    scaled = rescaled(
        rows,
        rate_factor=rate_factor,
        length_factor=length_factor,
        max_prompt_tokens=max_prompt,
        max_output_tokens=max_output,
    )
    ordered = sorted(rows, key=lambda row: row.at_s)
    assert [row.at_s for row in scaled] == pytest.approx([(r.at_s - ordered[0].at_s) / rate_factor for r in ordered])
    for row, before in zip(scaled, ordered, strict=True):
        assert row.num_prompt_tokens == min(max_prompt, max(1, round(before.num_prompt_tokens * length_factor)))
        assert row.num_output_tokens == min(max_output, max(1, round(before.num_output_tokens * length_factor)))
        assert row.block_tokens == int(512 * length_factor)
        assert len(row.hash_ids) * row.block_tokens <= row.num_prompt_tokens
        assert row.hash_ids == before.hash_ids[: len(row.hash_ids)]
        if max_prompt >= before.num_prompt_tokens * length_factor:
            assert len(row.hash_ids) >= before.num_prompt_tokens // 512, "a whole block stays whole"


def test_a_trace_is_cut_after_scaling() -> None:
    rows = [TraceRow(float(at_s), 10, 10) for at_s in range(5, 15)]
    cut = rescaled(rows, rate_factor=2, duration_s=2, **LARGE)
    assert [row.at_s for row in cut] == [0.0, 0.5, 1.0, 1.5]
    assert rescaled(rows, **LARGE) == [replace(row, at_s=row.at_s - 5) for row in rows]


def test_only_whole_blocks_within_the_prompt_keep_their_names() -> None:
    row = TraceRow(0.0, 512 * 4 + 100, 10, (7, 8, 9, 10, 11))
    (eighth,) = rescaled([row], length_factor=1 / 8, **LARGE)
    assert (eighth.num_prompt_tokens, eighth.block_tokens, eighth.hash_ids) == (268, 64, (7, 8, 9, 10))
    (clipped,) = rescaled([row], length_factor=1 / 8, max_prompt_tokens=200, max_output_tokens=1)
    assert (clipped.num_prompt_tokens, clipped.num_output_tokens, clipped.hash_ids) == (200, 1, (7, 8, 9))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rate_factor": 0}, "rate factor"),
        ({"length_factor": float("nan")}, "length factor"),
        ({"max_prompt_tokens": 0}, "at least one token"),
        ({"max_output_tokens": 0}, "at least one token"),
        ({"duration_s": 0}, "no request"),
        ({"length_factor": 1 / 600}, "leaves nothing of blocks of 512"),
    ],
)
def test_bad_scaling_is_refused(changed: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rescaled([TraceRow(0.0, 600, 1, (1,))], **{**LARGE, **changed})  # type: ignore[arg-type]


def test_rows_without_names_may_shrink_below_a_block() -> None:
    (row,) = rescaled([TraceRow(0.0, 1200, 1)], length_factor=1 / 600, **LARGE)
    assert (row.num_prompt_tokens, row.hash_ids) == (2, ())


def test_the_mooncake_sample_is_as_published() -> None:
    first = json.loads(trace_path("mooncake-sample").read_text(encoding="utf-8").splitlines()[0])
    assert first == {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [*range(14)]}
