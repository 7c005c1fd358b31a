"""Measured cells on disk, so that a comparison that was broken off goes on where it stopped. Measures nothing."""

import hashlib
import json
import logging
import os
import re
import subprocess
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pdserve_bench.conditions import git_revision
from pdserve_bench.load.plan import LoadPlan
from pdserve_bench.load.records import RunResult

_log = logging.getLogger(__name__)
_UNUSED = re.compile(rb"docs/|tests/|[^/]*\.md$")


class Store:
    """One file for each cell in `folder`, which is made if it is not there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get_or_run(self, key: str, conditions_digest: str, run: Callable[[], RunResult]) -> RunResult:
        """What was measured for `key` under the same conditions; else `run`'s result, kept from now on.

        A run that was interrupted is kept for whoever wants to see it, but measured again the next time. A file that is
        not whole is measured again, with a warning. What `run` raises leaves the files as they are.
        """
        path = self.path(key)
        found = _read(path, key, conditions_digest)
        if found is not None and not found.interrupted:
            return found
        result = run()
        self._write(path, {"key": key, "conditions_digest": conditions_digest, "run": result.to_json()})
        return result

    def path(self, key: str) -> Path:
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", key).strip("-.")[:100]
        return self._folder / f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"

    def _write(self, path: Path, document: Mapping[str, object]) -> None:
        """At one stroke: whoever reads sees the old file or the whole new one."""
        text = json.dumps(document, allow_nan=False)
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)


def _read(path: Path, key: str, conditions_digest: str) -> RunResult | None:
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        if (document["key"], document["conditions_digest"]) != (key, conditions_digest):
            return None
        return RunResult.from_json(document["run"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("%s is broken and will be measured again: %r", path, error)
        return None


def conditions_digest(settings: Mapping[str, object], revision: str) -> str:
    """Equal for equal conditions. `settings`: as JSON, all that a measurement depends on, the model among it."""
    text = json.dumps({"settings": settings, "revision": revision}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def plan_digest(plan: LoadPlan) -> str:
    """Equal for plans that send the same at the same times."""
    digest = hashlib.sha256()
    for one in plan.requests:
        fields = (one.number, one.at_s, one.max_tokens, one.request_class, one.tenant, one.cancel_after_tokens)
        digest.update(repr(fields).encode())
        digest.update(array("q", one.token_ids).tobytes())
    return digest.hexdigest()


def sources_revision(folder: Path = Path(__file__).parent) -> str:
    """A digest of what the repository that `folder` is in holds, changes included, but for what no run depends on: what
    is in docs/ and tests/, and pages at the top. Files that git does not know count for nothing.

    "unknown" where it is in no repository.
    """
    if git_revision(folder) is None:
        return "unknown"
    sources = [":/", *(f":(top,exclude,glob){unused}" for unused in ("docs/**", "tests/**", "*.md"))]
    committed = _git(folder, "ls-tree", "-r", "--full-tree", "HEAD").splitlines()
    changed = _git(folder, "diff", "HEAD", "--no-ext-diff", "--", *sources)
    used = [line for line in committed if not _UNUSED.match(line.partition(b"\t")[2])]
    return hashlib.sha256(b"\n".join([*used, changed])).hexdigest()[:16]


def _git(folder: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=True).stdout
