"""Which cores each worker of one machine is pinned to. Pure: the topology is an argument (`machine` reads it)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cpu:
    """One logical core as the operating system numbers it. SMT siblings share `whole_core`."""

    id: int
    whole_core: int
    node: int = 0


@dataclass(frozen=True, slots=True)
class Want:
    """What one worker asks for. A `decode` worker is placed first and, while it can be helped, shares with nobody."""

    num_threads: int
    decode: bool


class _Use:
    """How many workers hold each core so far."""

    def __init__(self) -> None:
        self.of_cpu: Counter[int] = Counter()
        self.of_whole_core: Counter[int] = Counter()
        self.of_node: Counter[int] = Counter()
        self.by_decode: Counter[int] = Counter()
        """By whole core."""

    def add(self, cpus: Sequence[Cpu], decode: bool) -> None:
        self.of_cpu.update(cpu.id for cpu in cpus)
        self.of_whole_core.update(cpu.whole_core for cpu in cpus)
        self.of_node.update(cpu.node for cpu in cpus)
        if decode:
            self.by_decode.update(cpu.whole_core for cpu in cpus)

    def cost(self, cpu: Cpu, siblings: int) -> tuple[int, int, int]:
        """Of one more worker on `cpu`, of which it has taken `siblings` itself; what matters most comes first."""
        return self.of_cpu[cpu.id], self.of_whole_core[cpu.whole_core] + siblings, self.by_decode[cpu.whole_core]


def place(cpus: Sequence[Cpu], wants: Sequence[Want]) -> list[tuple[int, ...]]:
    """Core ids for each of `wants`, in its order: `num_threads` each, or all there are if those are fewer.

    Decode workers choose first. Each takes, in order of importance: cores that nobody holds, whole cores whose SMT
    siblings nobody holds, cores of one NUMA node, the least used node. Where cores run out, workers double up evenly,
    and rather with a prefill worker than with a decode worker.
    """
    use = _Use()
    shares: dict[int, tuple[int, ...]] = {}
    for index in sorted(range(len(wants)), key=lambda i: not wants[i].decode):
        chosen = _choose(cpus, wants[index].num_threads, use)
        use.add(chosen, wants[index].decode)
        shares[index] = tuple(sorted(cpu.id for cpu in chosen))
    return [shares[index] for index in range(len(wants))]


@dataclass(frozen=True, slots=True)
class _Choice:
    """Cores that one worker could take, and the sum of their costs."""

    cpus: tuple[Cpu, ...]
    cost: tuple[int, ...]


def _choose(cpus: Sequence[Cpu], num_threads: int, use: _Use) -> tuple[Cpu, ...]:
    """The best of: the least used cores of one node, for each node, and of the whole machine."""
    nodes = sorted({cpu.node for cpu in cpus})
    choices = [_least_used([cpu for cpu in cpus if cpu.node == node], num_threads, use) for node in nodes]
    choices.append(_least_used(cpus, num_threads, use))

    def rank(choice: _Choice) -> tuple[int, ...]:
        own_nodes = {cpu.node for cpu in choice.cpus}
        return -len(choice.cpus), *choice.cost, len(own_nodes), sum(use.of_node[node] for node in own_nodes)

    return min(choices, key=rank).cpus


def _least_used(cpus: Sequence[Cpu], num_threads: int, use: _Use) -> _Choice:
    """Taken one after the other, so that a worker avoids its own cores' siblings too."""
    picked: dict[Cpu, tuple[int, ...]] = {}
    own: Counter[int] = Counter()
    for _ in range(min(num_threads, len(cpus))):
        costs = {cpu: use.cost(cpu, own[cpu.whole_core]) for cpu in cpus if cpu not in picked}
        best = min(costs, key=lambda cpu: costs[cpu])
        picked[best] = costs[best]
        own[best.whole_core] += 1
    return _Choice(tuple(picked), tuple(map(sum, zip(*picked.values(), strict=True))))
