from pathlib import Path

from pdserve.serving.settings import Settings
from pdserve.serving.settings_docs import settings_markdown

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == settings_markdown(), "run make settings-docs"


def test_every_setting_is_explained() -> None:
    for name, field in Settings.model_fields.items():
        fields = getattr(field.annotation, "model_fields", {name: field})
        assert [n for n, f in fields.items() if not f.description] == []
