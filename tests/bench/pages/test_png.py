import struct
from pathlib import Path

import pytest

from pdserve_bench.pages.plots import ratio_chart
from pdserve_bench.pages.png import write_png


def _figure(name: str = "goodput"):
    figure = ratio_chart([(name, 1.5, 0.9, 1.1)])
    assert figure is not None
    return figure


@pytest.mark.parametrize("width_px", [600, 760, 1000, 1200, 1201])
def test_a_png_is_as_wide_as_asked(tmp_path: Path, width_px: int) -> None:
    path = tmp_path / "plot.png"
    write_png(path, _figure(), width_px)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">I", data[16:20]) == (width_px,)


def test_equal_figures_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        write_png(tmp_path / name, _figure())
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_name_that_the_font_lacks_is_no_error(tmp_path: Path) -> None:
    write_png(tmp_path / "plot.png", _figure("日本 🚀 $x$"))


def test_a_width_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not 0"):
        write_png(tmp_path / "plot.png", _figure(), 0)
