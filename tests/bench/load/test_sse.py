"""Server-sent events, cut anywhere."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve_bench.load.sse import EventParser

LINES = st.sampled_from(
    [b"data: a", b"data:b", b"data", b"data:  c", "data: é😀".encode(), b": comment", b"event: x", b"", b"", b"datax"]
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


def parsed(*parts: bytes) -> list[bytes]:
    parser = EventParser()
    return [data for part in parts for data in parser.feed(part)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", [b"a", b"b", b"c"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a \n\n", [b" a "]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data\n\n", [b""]),
        (b": ping\n\n: ping\ndata: a\n\n", [b"a"]),
        (b"event: error\nid: 3\ndata: a\nretry: 10\n\n", [b"a"]),
        (b"\n\n\ndata: a\n\n\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\n\ndata: unended\n", [b"a"]),
        (b"database: a\n\n", []),
        (b"", []),
    ],
)
def test_streams_are_read_as_the_standard_says(stream: bytes, events: list[bytes]) -> None:
    assert parsed(stream) == events


def test_j02_two_events_in_one_read_and_a_cut_inside_a_character() -> None:
    first, second = 'data: {"text": "é😀"}\n\n'.encode(), b"data: [DONE]\n\n"
    assert parsed(first + second) == [first[6:-2], b"[DONE]"]
    cut = first.index("😀".encode()) + 2
    assert parsed(first[:cut], first[cut:] + second) == [first[6:-2], b"[DONE]"]


@given(st.lists(st.tuples(LINES, ENDS), max_size=12), st.data())
@example([(b"data: a", b"\r\n"), (b"", b"\r\n")], None)
def test_any_cutting_gives_the_same_events(lines: list[tuple[bytes, bytes]], data: st.DataObject | None) -> None:
    stream = b"".join(line + end for line, end in lines)
    whole = parsed(stream)
    assert parsed(*(stream[i : i + 1] for i in range(len(stream)))) == whole
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
        assert parsed(*(stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True))) == whole


@given(st.lists(st.tuples(LINES, ENDS), max_size=12))
def test_events_are_those_of_a_plain_reading_line_by_line(lines: list[tuple[bytes, bytes]]) -> None:
    expected: list[bytes] = []
    held: list[bytes] | None = None
    for line in b"".join(line + end for line, end in lines).splitlines():
        if not line:
            expected += [] if held is None else [b"\n".join(held)]
            held = None
        elif line.partition(b":")[0] == b"data":
            held = [*(held or []), line.partition(b":")[2].removeprefix(b" ")]
    assert parsed(b"".join(line + end for line, end in lines)) == expected
