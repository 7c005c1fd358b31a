from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdserve.core.block_keys import COMMON_GROUP
from pdserve.core.model_info import KvLayout
from pdserve.serving.settings import Settings, WorkerSettings
from pdserve.worker.parts import make_parts, prefix_scope
from tests.support.fake_engine import FakeRunner, FakeStore
from tests.support.worker_bench import FAKE_MODEL


def loaded(layout: KvLayout | None = None, **model: str) -> Any:
    store = FakeStore(4, 16)
    store.layout = layout or store.layout
    return SimpleNamespace(runner=FakeRunner(16), paged_kv=store, model_info=replace(FAKE_MODEL, **model))


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_prefix_cache_is_on_unless_switched_off(prefix_cache: bool) -> None:
    settings = Settings(worker=WorkerSettings(prefix_cache=prefix_cache)) if not prefix_cache else Settings()
    nothing = cast(Any, None)
    parts = make_parts(settings, loaded(), "prefill", nothing, nothing, nothing)
    assert (parts.resources.cached_prefix(COMMON_GROUP) is not None) == prefix_cache


def test_workers_that_compute_otherwise_share_no_keys() -> None:
    other_layout = replace(FakeStore(4, 16).layout, dtype="bfloat16")
    engines = [loaded(), loaded(fingerprint="beef"), loaded(evaluation_id="fast"), loaded(other_layout)]
    scopes = [prefix_scope(Settings(), engine) for engine in engines]
    roots = {scope.root(COMMON_GROUP) for scope in scopes if scope is not None}
    assert len(roots) == len(engines)
