"""A figure as SVG that can stand in an HTML page beside others: own ids, text as text, font and ink of the page."""

import io
import re
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.figure import Figure

from pdserve_bench.pages.style import INK, missing_glyphs_allowed

_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_FONT_FAMILY = re.compile(r"font-family:[^;]*;? ?")


def inline_svg(figure: Figure, label: str, prefix: str) -> str:
    """An `<svg>` element, equal for equal figures. `label` is what a screen reader says; `prefix` begins every id."""
    root = ElementTree.fromstring(_drawn(figure))
    _drop(root, ("metadata", "style"))
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(name): _adapted(_local(name), value, prefix) for name, value in element.items()}
    root.attrib = {"viewBox": root.attrib["viewBox"], "class": "plot", "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _drawn(figure: Figure) -> str:
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pdserve"}), missing_glyphs_allowed():
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    return buffer.getvalue()


def _drop(parent: ElementTree.Element, tags: tuple[str, ...]) -> None:
    for child in list(parent):
        if _local(child.tag) in tags:
            parent.remove(child)
        else:
            _drop(child, tags)


def _local(name: str) -> str:
    """Without the namespace, which an SVG inside HTML does not need."""
    return name.rpartition("}")[2]


def _adapted(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    if name == "href":
        return f"#{prefix}-{value.removeprefix('#')}"
    if name == "style":
        value = _FONT_FAMILY.sub("", value).replace(INK, "currentColor")
    return value.replace("url(#", f"url(#{prefix}-")
