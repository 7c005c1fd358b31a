"""Models on Hugging Face's hub, or a server that speaks like it: fetched once into the cache, then used without it."""

import glob
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import quote

from pdserve.core.errors import PdserveError
from pdserve.core.model_fetch.cache import locked, not_found, read_note, write_note

HUB_FORMS = "a model on the hub (ORG/NAME, ORG/NAME@REVISION or ORG/NAME/FILE.gguf)"

_NAME = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>(?:refs/pr/)?\w[\w.-]*))?(?:/(?P<file>\w[^@]*\.gguf))?", re.ASCII
)
_INDEX = "model.safetensors.index.json"
_DESCRIPTIONS = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}


@dataclass(frozen=True, slots=True)
class HubName:
    """`file` is the one .gguf file meant; empty for the whole model as safetensors."""

    repo: str
    revision: str = "main"
    file: str = ""

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" + (f"/{self.file}" if self.file else "")


def parse_hub_name(source: str) -> HubName | None:
    """ORG/NAME, ORG/NAME@REVISION (a branch, tag or commit), either followed by /FILE.gguf; None for anything else."""
    found = _NAME.fullmatch(source)
    if found is None or ".." in source:
        return None
    return HubName(found["repo"], found["revision"] or "main", found["file"] or "")


def fetch_hub_model(name: HubName, cache_dir: Path, *, refresh: bool = False) -> Path:
    """The cached directory (or .gguf file) of a model on the hub, downloaded if it is not there whole.

    The server is HF_ENDPOINT's (https://huggingface.co unless set); HF_TOKEN opens gated models.

    Args:
        refresh: ask for newer files even if the model is in the cache; it is still used where none can be had.

    Raises:
        PdserveError: MODEL_NOT_FOUND, saying what was tried and what would do.
    """
    folder = cache_dir.expanduser().absolute() / "hub"
    note_path = folder / "fetched" / f"{quote(str(name), safe='')}.json"
    if not refresh and (cached := _cached(folder, note_path)):
        return cached
    try:
        with locked(note_path.with_suffix(".lock")):
            if not refresh and (cached := _cached(folder, note_path)):
                return cached
            path, files = _download(name, folder)
            write_note(note_path, {"path": str(path.relative_to(folder)), "files": files})
    except PdserveError:
        raise
    except Exception as error:  # of several kinds: the library lets its HTTP client's own pass
        if cached := _cached(folder, note_path):
            sys.stderr.write(f"{_explained(name, error)}; using the copy in the cache\n")
            return cached
        raise not_found(_explained(name, error)) from error
    return path / name.file


def _cached(folder: Path, note_path: Path) -> Path | None:
    """What a finished download left, if every file of it is still there."""
    note = read_note(note_path)
    path, files = note.get("path"), note.get("files")
    if not isinstance(path, str) or not isinstance(files, list):
        return None
    names = cast("list[str]", files)
    if not names or not all((folder / path / name).exists() for name in names):
        return None
    return folder / path / (names[0] if names[0].endswith(".gguf") else "")


def _download(name: HubName, folder: Path) -> tuple[Path, list[str]]:
    """The folder of one commit's files, and the names of those that make up the model."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when the library is imported
    import huggingface_hub

    endpoint = os.environ.get("HF_ENDPOINT") or None
    info = huggingface_hub.HfApi(endpoint=endpoint).model_info(name.repo, revision=name.revision)
    files = _wanted(name, [sibling.rfilename for sibling in info.siblings or ()])
    path = Path(
        huggingface_hub.snapshot_download(
            name.repo,
            revision=info.sha,
            cache_dir=folder,
            allow_patterns=[glob.escape(file) for file in files],
            endpoint=endpoint,
        )
    )
    missing = [file for file in files if not (path / file).exists()]
    if missing:
        raise not_found(f"the download of {name} ended before it had {', '.join(missing)}; try again")
    return path, files


def _wanted(name: HubName, available: Sequence[str]) -> list[str]:
    ggufs = [file for file in available if file.endswith(".gguf")]
    if name.file:
        if name.file not in available:
            raise not_found(f"{name.repo} has no file {name.file} (it has: {', '.join(ggufs) or 'no .gguf file'})")
        return [name.file]
    weights = [file for file in available if _is_weights(file)]
    if "config.json" in available and weights:
        return [file for file in available if file in _DESCRIPTIONS] + weights
    if ggufs:
        raise not_found(f"{name.repo} holds GGUF files; name one, as in {name.repo}/{ggufs[0]} ({', '.join(ggufs)})")
    raise not_found(f"{name.repo} holds no model that can be served: no config.json with .safetensors files")


def _is_weights(file: str) -> bool:
    """Copies in folders, or in one "consolidated" file, are the same weights in other layouts."""
    return file == _INDEX or ("/" not in file and file.endswith(".safetensors") and not file.startswith("consolidated"))


def _explained(name: HubName, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, GatedRepoError) or status == 403:
        return f"{name.repo} is gated: ask for access at {endpoint}/{name.repo}, then set HF_TOKEN to a token of yours"
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repo} has no revision {name.revision!r} at {endpoint}"
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        return (
            f"{name.repo!r} is no path that exists, and {endpoint} has no such model, or only for those whom HF_TOKEN "
            f"lets in (HF_TOKEN is {'set' if os.environ.get('HF_TOKEN') else 'not set'})"
        )
    return (
        f"{name} is neither a path that exists nor in the cache, and could not be fetched from {endpoint} "
        f"(HF_ENDPOINT names another server): {error}"
    )
