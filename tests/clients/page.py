"""docs/conformance.md from the tables that the tests run: `python -m tests.clients.page` rewrites it.

What stands behind the marker is written by hand and kept.
"""

from collections.abc import Sequence
from pathlib import Path

from tests.clients.behaviours import BEHAVIOURS
from tests.clients.chat_features import CHAT_FEATURES
from tests.clients.completion_features import COMPLETION_FEATURES
from tests.clients.feature import Feature

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
MARKER = "<!-- written by hand from here on -->\n"
HEAD = """\
# Public clients

What the `openai` package gets from a pdserve fleet of real processes. Every row is run by
`tests/clients/test_openai.py` with `OpenAI` and with `AsyncOpenAI`, and its result is asserted to the letter: text,
`finish_reason`, usage, logprobs, or the error's class, field and code. Every answer must also satisfy the client's own
type declarations. `python -m tests.clients.page` writes the tables from what the tests run.

"""


def generated() -> str:
    """All of the page but what is written by hand."""
    parts = [
        HEAD,
        "## `POST /v1/completions`\n\n",
        _table(COMPLETION_FEATURES),
        "\n## `POST /v1/chat/completions`\n\n",
        _table(CHAT_FEATURES),
        "\n## The client itself\n\n| what | `OpenAI` | `AsyncOpenAI` |\n|---|---|---|\n",
        *(f"| {name} | yes | yes |\n" for name in BEHAVIOURS),
    ]
    return "".join(parts) + "\n"


def _table(features: Sequence[Feature]) -> str:
    rows = [f"| {feature.name} | {feature.result} | {feature.result} |\n" for feature in features]
    return "| feature | whole | streamed |\n|---|---|---|\n" + "".join(rows)


def main() -> None:
    by_hand = PAGE.read_text().partition(MARKER)[2] if PAGE.exists() else ""
    PAGE.write_text(generated() + MARKER + by_hand)


if __name__ == "__main__":
    main()
