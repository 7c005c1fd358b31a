"""A figure as a PNG, for READMEs."""

from pathlib import Path

from matplotlib.figure import Figure

from pdserve_bench.pages.style import missing_glyphs_allowed


def write_png(path: Path, figure: Figure, width_px: int = 1200) -> None:
    """On white, `width_px` wide, the height following; legible at half that size.

    Raises:
        ValueError: `width_px` is below 1.
        OSError: the file cannot be written.
    """
    if width_px < 1:
        raise ValueError(f"a PNG is at least 1 pixel wide, not {width_px}")
    # The canvas cuts fractions off: a little more than the width keeps 1200 from becoming 1199.
    dpi = (width_px + 0.01) / figure.get_figwidth()
    with missing_glyphs_allowed():
        figure.savefig(path, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
