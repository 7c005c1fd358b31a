import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_bench.measures.summary import Distribution, Slo, Summary
from pdserve_bench.pages import plots
from pdserve_bench.pages.page import Page, Section, TableData, render, run_section, write_page
from pdserve_bench.pages.style import WIDTH
from pdserve_bench.pages.svg import inline_svg

SCRIPT = "<script>alert(1)</script>"
TEMPLATE = "{{ 7 * 7 }} {% endfor %}"
HOSTILE = (
    SCRIPT,
    '"><img src=x onerror=alert(1)>',
    f"_hidden $a$ $\\frac{{1}}{{$ --> ]]> &amp; {TEMPLATE}",
    "",
    "\x00\x1b[31m\ud800 \u202e 日本 🚀",
    "long " * 100 + "x" * 300,
)
_VOID = {"meta", "br", "img", "link"}
_PHONE_PX = 360 - 2 * 8


class _Checked(HTMLParser):
    """Notes what a test asks for, and fails on tags that do not match and on ids that come twice."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open
        ids = self.values("id")
        assert len(ids) == len(set(ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def values(self, attribute: str, tag: str | None = None) -> list[str]:
        return [value for of, name, value in self.attributes if name == attribute and tag in (None, of)]


def _every_figure(name: str, make_record, make_run) -> tuple[tuple[str, object], ...]:
    run = make_run([make_record(0, [1.0, 1.1, 3.0]), make_record(1, [], num_prompt_tokens=2000)], name)
    figures = (
        plots.latency_cdf(name, "ms", {name: [0.1, 0.2], f"{name}2": [0.1]}, 0.1),
        plots.goodput_against_rate({name: [(1, 0.5, 0.4, 0.6)]}),
        plots.itl_over_time(run),
        plots.phase_bars({name: {name: 1.0, f"{name}2": 0.5}}),
        plots.ratio_chart([(name, 1.5, 0.9, 1.1)], title=name),
        plots.capacity_map([plots.CapacityPoint(1, 1, False, name)]),
    )
    return tuple((f"{name} {number}", figure) for number, figure in enumerate(figures))


def _page(name: str, make_record, make_run) -> Page:
    table = TableData(name, (name, "count"), ((name, "1"), (name, "2")))
    figures = _every_figure(name, make_record, make_run)
    section = Section(name, (name,), (table,), figures)
    again = Section(name, (), (table,), figures[:1])
    return Page(name, (name,), (section, again), {"settings": {name: [name, 1]}, "seed": 7, "none": None, "e": {}})


@pytest.mark.parametrize("name", ["apart 1P:1D", *HOSTILE])
def test_a_page_loads_nothing_runs_nothing_and_names_every_figure(name: str, make_record, make_run) -> None:
    page = render(_page(name, make_record, make_run))
    page.encode()
    found = _Checked(page)
    assert not {"script", "img", "link", "iframe", "object", "image", "foreignobject"} & set(found.tags)
    assert not [name for _, name, _ in found.attributes if name.startswith("on") or name == "src"]
    ids = set(found.values("id"))
    targets = found.values("href") + re.findall(r"url\((.*?)\)", page)
    assert targets
    assert all(target.startswith("#") and target[1:] in ids for target in targets)
    assert "http" not in page.replace("http-equiv", "")
    assert "@import" not in page
    assert found.tags.count("svg") == found.tags.count("figure") == found.tags.count("figcaption") == 7
    assert found.values("role", "svg") == ["img"] * 7
    assert all(found.values("aria-label", "svg"))


def test_names_are_shown_as_they_are(make_record, make_run) -> None:
    found = _Checked(render(_page(f"{SCRIPT} {TEMPLATE}", make_record, make_run)))
    assert sum(SCRIPT in words for words in found.words) > 10
    assert sum(TEMPLATE in words for words in found.words) > 10


@settings(max_examples=10, deadline=None)
@given(st.text(st.characters(), max_size=40))
def test_any_name_makes_a_plot_that_stands_in_html(name: str) -> None:
    figure = plots.ratio_chart([(name, 1.5, 0.9, 1.1)], title=name)
    assert figure is not None
    found = _Checked(inline_svg(figure, "caption", "p"))
    assert found.tags.count("svg") == 1


def test_equal_input_gives_equal_bytes(tmp_path: Path, make_record, make_run) -> None:
    page = _page("apart", make_record, make_run)
    write_page(tmp_path / "page.html", page)
    written = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert written == render(page), "drawn a second time"
    assert written == render(_page("apart", make_record, make_run)), "made anew"


def test_no_text_is_small_on_a_phone_and_ink_follows_the_page(make_record, make_run) -> None:
    page = render(_page("apart", make_record, make_run))
    style = page[page.index("<style>") : page.index("</style>")]
    sizes_px = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", style)]
    assert len(sizes_px) >= 5
    assert min(sizes_px) >= 14
    in_plots = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", page[page.index("</style>") :])]
    in_plots += [float(size) for size in re.findall(r"font: [^;]*?([\d.]+)px", page[page.index("</style>") :])]
    assert len(in_plots) > 50
    assert min(in_plots) * _PHONE_PX / WIDTH >= 14
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "#000000" not in page
    assert "prefers-color-scheme: dark" in page


def test_the_verdict_comes_first_and_conditions_are_folded(make_record, make_run) -> None:
    section = Section("Details")
    page = render(
        Page("Title", ("Do not disaggregate.",), (section,), {"git": "abc", "machine": {"flags": ["a", "b"]}})
    )
    found = _Checked(page)
    assert page.index("Do not disaggregate.") < page.index("Details") < page.index("<details")
    assert "open" not in [name for tag, name, _ in found.attributes if tag == "details"]
    assert page.index("machine.flags") < page.index("a, b")


def test_a_page_of_nothing_says_so() -> None:
    section = Section("Empty", (), (TableData("Table", ("a", "b"), ()),), (("A plot", None),))
    page = render(Page("Title", (), (section,), {}))
    found = _Checked(page)
    assert "No samples, so there is nothing to plot." in page
    assert "Nothing was measured." in page
    assert "None were recorded." in page
    assert found.tags.count("figcaption") == 1
    assert "svg" not in found.tags


def test_a_row_that_does_not_fit_its_table_is_refused() -> None:
    with pytest.raises(ValueError, match="Latencies: 1 cells in a row of 2 columns"):
        TableData("Latencies", ("a", "b"), (("x",),))


def _summary(**changed: object) -> Summary:
    none = Distribution.of([])
    figures = {
        **dict.fromkeys(("offered", "completed", "failed", "rejected", "cancelled", "unfinished"), 0),
        **dict.fromkeys(("num_good", "num_wrong", "num_count_mismatches"), 0),
        **dict.fromkeys(("duration_s", "request_throughput", "prompt_throughput", "output_throughput", "goodput"), 0.0),
        **dict.fromkeys(("ttft", "ttft_from_send", "itl", "tpot", "e2e", "queue"), none),
        "cached_share": None,
    }
    return Summary(**{**figures, **changed})


def test_the_section_of_a_run_shows_counts_latencies_and_limits(make_record, make_run) -> None:
    run = make_run([make_record(number, [1.0, 1.05, 1.1]) for number in range(4)])
    summary = _summary(
        offered=8, completed=4, failed=1, rejected=2, unfinished=1, num_good=3, goodput=0.375, num_wrong=1,
        ttft=Distribution.of([1.0] * 4), itl=Distribution.of([0.05] * 8), duration_s=10.0,
    )  # fmt: skip
    section = run_section("apart", run, summary, Slo(2.0, 0.08))
    requests, latencies, _, limits = section.tables
    assert requests.rows == (
        ("offered", "8", "100.0 %"),
        ("completed", "4", "50.0 %"),
        ("failed", "1", "12.5 %"),
        ("rejected", "2", "25.0 %"),
        ("cancelled as planned", "0", "0.0 %"),
        ("unfinished", "1", "12.5 %"),
    )
    assert latencies.columns == ("latency", "count", "mean", "p50", "p90", "p99", "max")
    assert latencies.rows[0] == ("TTFT", "4", *["1.00 s"] * 5)
    assert latencies.rows[2] == ("ITL", "8", *["50.0 ms"] * 5)
    assert latencies.rows[3] == ("TPOT", "0", *["–"] * 5)
    assert ("sent late, p99", "3.00 ms") in limits.rows
    assert ("cores used by others", "0.04") in limits.rows
    assert "3 of 8 offered requests (37.5 %) were good" in section.text[0]
    assert "within 2 s, p99 of the request’s own ITLs within 80 ms" in section.text[0]
    assert any("found wrong" in sentence for sentence in section.text)
    assert all(figure is not None for _, figure in section.figures)


def test_the_section_of_an_empty_run_is_a_valid_page(make_run) -> None:
    section = run_section("apart", make_run(), _summary())
    assert all(figure is None for _, figure in section.figures)
    _Checked(render(Page("Title", (), (section,), {})))


def test_a_hundred_thousand_gaps_make_a_small_page_with_the_longest_among_them(make_record, make_run) -> None:
    gaps_s = np.random.default_rng(5).gamma(4, 0.01, (200, 500))
    gaps_s[117, 250] = 1.9
    run = make_run(
        [make_record(number, (number / 2 + np.cumsum(row)).tolist(), number / 2) for number, row in enumerate(gaps_s)],
        duration_s=200.0,
    )
    section = run_section("apart", run, _summary(offered=200, completed=200))
    *_, (_, over_time) = section.figures
    assert over_time is not None
    assert max(over_time.axes[0].lines[0].get_ydata()) == pytest.approx(1900)
    assert len(render(Page("Title", (), (section,), {})).encode()) < 400_000
