"""Placement of workers on cores, on made-up machines."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.launch.placement import Cpu, Want, place

PREFILL, DECODE = Want(1, decode=False), Want(1, decode=True)


def machine(num_nodes: int, cores_per_node: int, threads_per_core: int = 1) -> list[Cpu]:
    """Numbered as Linux does on x86: first all cores of all nodes, then their second threads."""
    num_cores = num_nodes * cores_per_node
    return [
        Cpu(core + num_cores * thread, core, core // cores_per_node)
        for thread in range(threads_per_core)
        for core in range(num_cores)
    ]


def test_decode_workers_choose_first() -> None:
    assert place(machine(1, 3), [PREFILL, DECODE, DECODE]) == [(2,), (0,), (1,)]


def test_prefill_workers_double_up_before_they_join_a_decode_worker() -> None:
    assert place(machine(1, 2), [PREFILL, PREFILL, DECODE]) == [(1,), (1,), (0,)]
    assert place(machine(1, 1, 2), [PREFILL, PREFILL, DECODE]) == [(1,), (0,), (0,)]


def test_siblings_are_left_while_whole_cores_are_free() -> None:
    cpus = [Cpu(0, 0), Cpu(1, 0), Cpu(2, 2), Cpu(3, 2)]
    assert place(cpus, [DECODE, DECODE]) == [(0,), (2,)]
    assert place(cpus, [Want(2, decode=True)]) == [(0, 2)]
    assert place(cpus, [DECODE, DECODE, PREFILL, PREFILL]) == [(0,), (2,), (1,), (3,)]


def test_a_prefill_worker_takes_another_prefill_workers_sibling() -> None:
    assert place(machine(1, 2, 2), [PREFILL, PREFILL, DECODE]) == [(1,), (3,), (0,)]


def test_the_cores_of_a_worker_are_on_one_node_and_workers_on_the_emptier_one() -> None:
    three = Want(3, decode=True)
    assert place(machine(2, 4), [three, three]) == [(0, 1, 2), (4, 5, 6)]
    assert place(machine(2, 2), [DECODE, Want(2, decode=True)]) == [(0,), (2, 3)]
    uneven = [Cpu(0, 0, node=1), Cpu(1, 1, node=2), *(Cpu(core, core, node=0) for core in (2, 3, 4))]
    assert place(uneven, [DECODE, Want(2, decode=True)]) == [(2,), (3, 4)]


def test_a_worker_spans_nodes_rather_than_share_cores() -> None:
    assert place(machine(2, 2), [Want(3, decode=True)]) == [(0, 1, 2)]
    assert place(machine(2, 2, 2), [DECODE, DECODE, Want(2, decode=True)]) == [(0,), (2,), (1, 3)]


@pytest.mark.parametrize("threads", [3, 100])
def test_a_worker_gets_each_core_once_at_most(threads: int) -> None:
    assert place(machine(1, 2), [Want(threads, decode=True)] * 2) == [(0, 1)] * 2


@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 2),
    st.lists(st.builds(Want, st.integers(1, 4), st.booleans()), min_size=1, max_size=12),
)
def test_every_placement(num_nodes: int, cores_per_node: int, threads_per_core: int, wants: list[Want]) -> None:
    cpus = machine(num_nodes, cores_per_node, threads_per_core)
    shares = place(cpus, wants)
    whole = {cpu.id: cpu.whole_core for cpu in cpus}
    for want, share in zip(wants, shares, strict=True):
        assert len(set(share)) == len(share) == min(want.num_threads, len(cpus))
    used = Counter(core for share in shares for core in share)
    assert used.keys() <= whole.keys()
    if sum(want.num_threads for want in wants) <= len(set(whole.values())):
        assert max(Counter(whole[core] for core in used.elements()).values()) == 1
    if all(want.num_threads == 1 for want in wants):
        loads = [used[cpu.id] for cpu in cpus]
        assert max(loads) - min(loads) <= 1
