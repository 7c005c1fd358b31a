"""Where a sequence goes: pure functions of frozen views of the workers. Reserves nothing and talks to nobody."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from coordinator.fleet.values import Role, WorkerInfo, WorkerKey
from pdserve.core.model_info import KvLayout

LOCAL_TRANSPORT = "local"
ONE_HOST_TRANSPORTS = frozenset({"shm"})


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One ready worker of the model at one moment.

    `queued_prefill_tokens` and `free_blocks` (usable − reserved) are the last report's, corrected by what this
    coordinator dispatched and saw end since; `free_blocks` may be negative. `prefill_room` is usable blocks minus the
    prompts that this coordinator has there. `last_use` grows with every use of any worker. `num_releases` counts the
    coordinator's sequences that ended there.
    """

    info: WorkerInfo
    usable_blocks: int
    free_blocks: int
    prefill_room: int
    queued_prefill_tokens: int
    num_in_flight: int
    last_use: int = 0
    ledger_version: int = 0
    num_releases: int = 0

    @property
    def key(self) -> WorkerKey:
        return self.info.key

    def can(self, role: Role) -> bool:
        return role in self.info.roles


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill worker, a decode worker and how KV gets from one to the other."""

    prefill: WorkerView
    decode: WorkerView
    transport: str
    kv_layout: KvLayout


@dataclass(frozen=True, slots=True)
class Need:
    """What a sequence will hold: KV of its prompt on the prefill side, of its whole life on the decode side."""

    num_prompt_tokens: int
    num_tokens_max: int


def holds_prompt(view: WorkerView, need: Need) -> bool:
    return view.info.blocks_for(need.num_prompt_tokens) <= view.usable_blocks


def holds_life(view: WorkerView, need: Need) -> bool:
    return view.info.blocks_for(need.num_tokens_max) <= view.usable_blocks


def rank_prefill(views: Seq[WorkerView], need: Need) -> list[WorkerView]:
    """Workers that could ever hold the prompt, fewest queued prefill tokens first; equals take turns."""
    fit = [view for view in views if view.can(Role.PREFILL) and holds_prompt(view, need)]
    return sorted(fit, key=lambda view: (view.queued_prefill_tokens, view.num_in_flight, view.last_use, view.key))


def rank_decode(views: Seq[WorkerView], need: Need) -> list[WorkerView]:
    """Workers that could ever hold the whole sequence, most free blocks first; equals take turns."""
    fit = [view for view in views if view.can(Role.DECODE) and holds_life(view, need)]
    return sorted(fit, key=lambda view: (-view.free_blocks, view.num_in_flight, view.last_use, view.key))


def has_prefill_room(view: WorkerView, need: Need) -> bool:
    """Whether the prompt's blocks fit beside the prompts already sent there: more would only wait over there."""
    return view.info.blocks_for(need.num_prompt_tokens) <= view.prefill_room


def link(prefill: WorkerInfo, decode: WorkerInfo, allowed: Seq[str]) -> tuple[str, KvLayout] | None:
    """Transport and layout of a pair, or None if it can't exchange KV. `allowed` is in order of preference.

    Two workers that both do both never work for each other: each prompt would hold blocks on one while it waits for
    blocks on the other, and two such prompts could wait for each other.
    """
    layout = next((layout for layout in prefill.kv_layouts if layout in decode.kv_layouts), None)
    if layout is None or prefill.model.fingerprint != decode.model.fingerprint:
        return None
    same_worker, same_host = prefill.key == decode.key, prefill.host == decode.host
    if not same_worker and prefill.roles == decode.roles:
        return None
    for transport in allowed:
        both_have_it = transport in prefill.transports and transport in decode.transports
        in_reach = same_host or transport not in ONE_HOST_TRANSPORTS
        if both_have_it and in_reach and (transport == LOCAL_TRANSPORT) == same_worker:
            return transport, layout
    return None


def rank_pairs(views: Seq[WorkerView], need: Need, allowed: Seq[str]) -> list[Pair]:
    """Every pair that could hold the sequence, best first: by prefill worker, there its own pool before others', then
    by decode worker. Whether there is room now is another question."""
    decodes = rank_decode(views, need)
    pairs: list[Pair] = []
    for prefill in rank_prefill(views, need):
        for decode in sorted(decodes, key=lambda view: view.key != prefill.key):
            linked = link(prefill.info, decode.info, allowed)
            if linked is not None:
                pairs.append(Pair(prefill, decode, *linked))
    return pairs


def pair_has_room(pair: Pair, need: Need) -> bool:
    """A worker that is its own pair needs no room for the prompt: the lifetime reservation holds it."""
    return pair.prefill.key == pair.decode.key or has_prefill_room(pair.prefill, need)
