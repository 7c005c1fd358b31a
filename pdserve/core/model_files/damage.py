"""How a model file is refused that is not what its name says. Reads no more than its first bytes."""

from pathlib import Path

from pdserve.core.errors import PdserveError
from pdserve.core.model_files.config import bad_model

_GIT_LFS = b"version https://git-lfs"


def damaged(path: Path, problem: str) -> PdserveError:
    """The refusal of a file that has `problem`, said after its path; of git-lfs's stand-in for a file, as such."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_GIT_LFS))
    except OSError:
        start = b""
    if start == _GIT_LFS:
        return bad_model(f"{path} is a git-lfs pointer, not the file itself: run `git lfs pull` where it was cloned")
    return bad_model(f"{path} {problem}")
