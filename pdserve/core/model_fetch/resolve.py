"""From what a user names a model by to the path of its files."""

from pathlib import Path

from pdserve.core.model_fetch.built_in import BUILT_IN
from pdserve.core.model_fetch.cache import not_found
from pdserve.core.model_fetch.hub import HUB_FORMS, fetch_hub_model, parse_hub_name
from pdserve.core.model_fetch.wheels import fetch_model


def resolve_model(source: str, cache_dir: Path, *, refresh: bool = False) -> Path:
    """The path of a model named by a built-in name, a path, or a name on Hugging Face's hub (see `parse_hub_name`).

    What is in the cache is used as it is, without a network; what is not is fetched.

    Args:
        refresh: verify a built-in model's file by hash; ask the hub for newer files.

    Raises:
        PdserveError: MODEL_NOT_FOUND, if it is none of these, or cannot be downloaded.
    """
    if source in BUILT_IN:
        return fetch_model(BUILT_IN[source], cache_dir, verify=refresh)
    path = Path(source).expanduser()
    if source and path.exists():
        return path
    name = parse_hub_name(source)
    if name is None:
        names = ", ".join(BUILT_IN)
        raise not_found(f"{source!r} is neither a path that exists, a built-in model ({names}) nor {HUB_FORMS}")
    return fetch_hub_model(name, cache_dir, refresh=refresh)
