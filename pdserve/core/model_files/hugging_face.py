"""A Hugging Face model directory: config.json, generation_config.json, tokenizer files, safetensors shards."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from pdserve.core.errors import PdserveError
from pdserve.core.model_files.architectures import hugging_face_family
from pdserve.core.model_files.config import ModelConfig, bad_model
from pdserve.core.model_files.damage import damaged
from pdserve.core.model_files.files import StoredTensor
from pdserve.core.model_files.hugging_face_config import architecture_name
from pdserve.core.model_files.raw_values import as_token_ids, section, unique_sorted

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000


class HuggingFaceFiles:
    """See `files.ModelFiles`. Only shards named by the index are read, if there is one; else model.safetensors."""

    def __init__(self, directory: Path) -> None:
        self._source = directory
        names = sorted(path.name for path in directory.glob("*"))  # none where it may not be read
        if names and "config.json" not in names:
            raise _without_config(directory, names)
        raw = read_json(directory / "config.json")
        raw = section(raw, "text_config") | raw
        self._family = hugging_face_family(architecture_name(raw))
        self._config = self._family.from_hugging_face(raw, _eos_token_ids(directory, raw))

    @property
    def source(self) -> Path:
        return self._source

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def gguf_metadata(self) -> Mapping[str, object] | None:
        return None

    def stored_tensors(self) -> list[StoredTensor]:
        index_path = self._source / INDEX_NAME
        if index_path.exists():
            tensors = _indexed_tensors(self._source, read_json(index_path))
        else:
            tensors = read_shard(_single_file(self._source))
        wanted = (self._family.hugging_face_tensor(tensor) for tensor in tensors)
        return [tensor for tensor in wanted if tensor is not None]


def _without_config(directory: Path, names: Sequence[str]) -> PdserveError:
    lack = f"{directory} holds no config.json"
    if "adapter_config.json" in names:
        return bad_model(f"{lack} but an adapter_config.json: a LoRA adapter; merge it into its base model")
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    return bad_model(f"{lack}; name one of its GGUF files: {', '.join(ggufs[:8])}" if ggufs else lack)


def read_json(path: Path) -> dict[str, object]:
    """One JSON object, in which no key may come twice.

    Raises:
        PdserveError: the file is missing, not JSON, not an object, or has a key twice.
    """
    try:
        parsed: object = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise bad_model(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise bad_model(f"{path} is not a JSON object")
    return cast("dict[str, object]", parsed)


def read_shard(path: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file, by offset.

    Raises:
        PdserveError: the file is missing, truncated or malformed, or names a tensor twice.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            raw_header = file.read(header_bytes) if header_bytes <= _MAX_HEADER_BYTES else b""
    except OSError as error:
        raise bad_model(f"cannot read {path}: {error.strerror}") from error
    if not raw_header or len(raw_header) < header_bytes:
        raise damaged(path, "is truncated or not a safetensors file")
    try:
        header: object = json.loads(raw_header, object_pairs_hook=_no_duplicates)
        items = cast("dict[str, dict[str, object]]", header).items()
        tensors = [_entry(path, name, raw, 8 + header_bytes) for name, raw in items if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise bad_model(f"{path} has a malformed header: {error}") from error
    for tensor in tensors:
        if tensor.offset + tensor.num_bytes > file_bytes:
            raise bad_model(f"{path} is truncated: {tensor.name} ends after the file does ({file_bytes} bytes)")
    return sorted(tensors, key=lambda tensor: tensor.offset)


def _entry(path: Path, name: str, raw: dict[str, object], data_start: int) -> StoredTensor:
    begin, end = _sizes(raw, "data_offsets")
    if end < begin:
        raise ValueError(f"{name} has offsets {begin}, {end}")
    return StoredTensor(name, str(raw["dtype"]), tuple(_sizes(raw, "shape")), path, data_start + begin, end - begin)


def _sizes(raw: dict[str, object], key: str) -> list[int]:
    sizes = cast("list[object]", raw[key])
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{key} holds something other than sizes")
    return cast("list[int]", sizes)


def _single_file(directory: Path) -> Path:
    path = directory / SINGLE_NAME
    if not path.exists():
        pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
        found = "weights are pickled there, which is not read; convert them to safetensors" if pickled else "no weights"
        raise bad_model(f"{directory} holds neither {SINGLE_NAME} nor {INDEX_NAME} ({found})")
    return path


def _indexed_tensors(directory: Path, index: Mapping[str, object]) -> list[StoredTensor]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise bad_model(f"{directory / INDEX_NAME} has no weight_map")
    shard_of = {name: str(shard) for name, shard in cast("dict[str, object]", weight_map).items()}
    tensors: list[StoredTensor] = []
    for shard in sorted(set(shard_of.values())):
        path = directory / shard
        if path.parent != directory or "\0" in shard:
            raise bad_model(f"{directory / INDEX_NAME} names a file outside the directory: {shard!r}")
        if not path.exists():
            raise bad_model(f"shard {path} is named in the index but missing")
        in_shard = [tensor for tensor in read_shard(path) if shard_of.get(tensor.name) == shard]
        absent = {name for name, of in shard_of.items() if of == shard} - {tensor.name for tensor in in_shard}
        if absent:
            raise bad_model(f"{path} lacks {min(absent)}, which the index says it holds")
        tensors += in_shard
    return tensors


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return result


def _eos_token_ids(directory: Path, raw: Mapping[str, object]) -> tuple[int, ...]:
    """Every id that any of the model's files calls end of sequence: they often disagree, and each is meant."""
    ids = as_token_ids(raw.get("eos_token_id"), "eos_token_id of config.json")
    ids += as_token_ids(section(raw, "text_config").get("eos_token_id"), "eos_token_id of text_config")
    if (directory / "generation_config.json").exists():
        generation = read_json(directory / "generation_config.json")
        ids += as_token_ids(generation.get("eos_token_id"), "eos_token_id of generation_config.json")
    return unique_sorted([*ids, *_tokenizer_eos(directory)])


def _tokenizer_eos(directory: Path) -> list[int]:
    config_path, tokenizer_path = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not (config_path.exists() and tokenizer_path.exists()):
        return []
    eos = read_json(config_path).get("eos_token")
    text = cast("dict[str, object]", eos).get("content") if isinstance(eos, dict) else eos
    added = read_json(tokenizer_path).get("added_tokens")
    tokens = cast("list[object]", added) if isinstance(added, list) else []
    matching = [cast("dict[str, object]", token) for token in tokens if isinstance(token, dict)]
    found = [token.get("id") for token in matching if text is not None and token.get("content") == text]
    return as_token_ids(found, "added_tokens of tokenizer.json")
