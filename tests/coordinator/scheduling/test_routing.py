from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.routing import Need, WorkerView, link, pair_has_room, rank_decode, rank_pairs, rank_prefill
from tests.support.worker_views import BOTH, DECODE, LAYOUT, MODEL, PREFILL, info, view

ALLOWED = ("local", "grpc")
NEED = Need(num_prompt_tokens=20, num_tokens_max=40)  # 5 and 10 blocks


def test_fewest_queued_tokens_and_most_free_blocks_win() -> None:
    views = [
        view(info("p0", PREFILL), queued=30),
        view(info("p1", PREFILL), queued=10),
        view(info("d0", DECODE), free=20),
        view(info("d1", DECODE), free=30),
    ]
    best = rank_pairs(views, NEED, ALLOWED)[0]
    assert (best.prefill.key.worker_id, best.decode.key.worker_id, best.transport) == ("p1", "d1", "grpc")


def test_equals_take_turns() -> None:
    views = [replace(view(info("d0", DECODE)), last_use=5), replace(view(info("d1", DECODE)), last_use=3)]
    assert [v.key.worker_id for v in rank_decode(views, NEED)] == ["d1", "d0"]


def test_a_full_ledger_is_asked_last_but_asked() -> None:
    views = [view(info("d0", DECODE), free=-3), view(info("d1", DECODE), free=1)]
    assert [v.key.worker_id for v in rank_decode(views, NEED)] == ["d1", "d0"]


def test_workers_that_could_never_hold_it_are_left_out() -> None:
    exact = [view(info("p0", PREFILL), usable=5), view(info("d0", DECODE), usable=10)]
    assert len(rank_pairs(exact, NEED, ALLOWED)) == 1
    assert rank_prefill([view(info("p0", PREFILL), usable=4)], NEED) == []
    assert rank_decode([view(info("d0", DECODE), usable=9)], NEED) == []


def test_pairs_need_one_model_one_layout_and_a_common_transport() -> None:
    prefill, decode = info("p0", PREFILL), info("d0", DECODE)
    assert link(prefill, decode, ALLOWED) == ("grpc", LAYOUT)
    assert link(prefill, info("d0", DECODE, layout=replace(LAYOUT, dtype="float16")), ALLOWED) is None
    assert link(prefill, info("d0", DECODE, model=replace(MODEL, fingerprint="other")), ALLOWED) is None
    assert link(prefill, info("d0", DECODE, transports=("shm",)), ALLOWED) is None
    assert link(prefill, decode, ("local",)) is None


def test_memory_is_shared_on_one_host_only() -> None:
    both = ("shm", "grpc")
    prefill, decode = info("p0", PREFILL, both), info("d0", DECODE, both)
    allowed = ("local", "shm", "grpc")
    assert link(prefill, decode, allowed) == ("shm", LAYOUT)
    assert link(prefill, replace(decode, host="elsewhere"), allowed) == ("grpc", LAYOUT)
    assert link(prefill, info("d0", DECODE), allowed) == ("grpc", LAYOUT)
    assert link(prefill, decode, ("grpc", "shm")) == ("grpc", LAYOUT)


def test_a_colocated_worker_works_for_no_other_one_and_needs_no_room_at_itself() -> None:
    transports = ("local", "grpc")
    full = view(info("c0", BOTH, transports), free=1, room=0)
    other = view(info("c1", BOTH, transports), free=90, queued=50, room=0)
    pairs = rank_pairs([full, other], NEED, ALLOWED)
    assert [(p.prefill.key.worker_id, p.decode.key.worker_id, p.transport) for p in pairs] == [
        ("c0", "c0", "local"),
        ("c1", "c1", "local"),
    ]
    assert [pair_has_room(p, NEED) for p in pairs] == [True, True]


def test_local_is_for_one_worker_only() -> None:
    one, other = info("c0", BOTH, ("local",)), info("c1", BOTH, ("local",))
    assert link(one, one, ALLOWED) == ("local", LAYOUT)
    assert link(one, other, ALLOWED) is None
    assert link(one, one, ("grpc",)) is None


views_strategy = st.lists(
    st.tuples(st.sampled_from([PREFILL, DECODE, BOTH]), st.integers(-5, 50), st.integers(1, 20), st.integers(0, 99)),
    max_size=6,
)


@given(views_strategy)
def test_every_pair_is_usable_and_none_is_missed(specs: list[tuple[frozenset, int, int, int]]) -> None:
    views: list[WorkerView] = [
        view(info(f"w{i}", roles, ALLOWED), free=free, usable=usable, queued=queued)
        for i, (roles, free, usable, queued) in enumerate(specs)
    ]
    pairs = rank_pairs(views, NEED, ALLOWED)
    named = {(p.prefill.key, p.decode.key) for p in pairs}
    assert len(named) == len(pairs)
    assert named == {
        (p.key, d.key)
        for p in rank_prefill(views, NEED)
        for d in rank_decode(views, NEED)
        if p.key == d.key or p.info.roles != d.info.roles  # two colocated workers never work for each other
    }
    for pair in pairs:
        assert (pair.transport == "local") == (pair.prefill.key == pair.decode.key)
    queued = [p.prefill.queued_prefill_tokens for p in pairs]
    assert queued == sorted(queued)
