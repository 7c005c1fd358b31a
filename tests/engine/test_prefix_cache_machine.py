"""Pool, prefix index and ledger together: whatever comes, promises are kept and no block changes under a holder."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.core.block_keys import Digest, KeyChain, xxh3_128
from pdserve.core.ids import SequenceId
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool, Owner, OwnerKind
from pdserve.engine.cached_prefix import CachedPrefix
from pdserve.engine.ledger import Demand, Denied, ReservationLedger
from pdserve.engine.sequence import Sequence

BLOCK = 2
NUM_BLOCKS = 10
MAX_OUTPUT = 4
ROOTS = (b"one salt", b"another")
NUMBERS = st.integers(0, 5)


@dataclass
class Life:
    """One sequence between its reservation and its release. `begun`: it holds blocks itself, pinned ones included."""

    sequence: Sequence
    root: bytes
    prefix: CachedPrefix
    reservation_id: int
    num_pinned: int = 0
    begun: bool = False
    kind: OwnerKind = OwnerKind.SEQUENCE

    @property
    def owner(self) -> Owner:
        return Owner(self.kind, self.sequence.id)


class PrefixCacheMachine(RuleBasedStateMachine):
    """Prompts over two tokens and two roots, so that prefixes are often shared. A block's content is what was written
    to it: the root and every token up to its end."""

    digest: Digest = staticmethod(xxh3_128)

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.ledger = ReservationLedger(NUM_BLOCKS, BLOCK, lease_s=1.0)
        self.lives: dict[int, Life] = {}
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    @rule(number=NUMBERS, token_ids=st.lists(st.integers(1, 2), min_size=1, max_size=12), root=st.sampled_from(ROOTS))
    def reserve(self, number: int, token_ids: list[int], root: bytes) -> None:
        if number in self.lives:
            return
        demand = Demand(len(token_ids) + MAX_OUTPUT, len(token_ids))
        answer = self.ledger.reserve(SequenceId(1, number), demand, 0.0)
        if not isinstance(answer, Denied):
            sequence = Sequence(SequenceId(1, number), token_ids, len(token_ids), SamplingParams(max_tokens=MAX_OUTPUT))
            prefix = CachedPrefix(self.pool, KeyChain(root, BLOCK, self.digest))
            self.lives[number] = Life(sequence, root, prefix, answer.reservation_id)

    @rule(number=NUMBERS)
    def pin(self, number: int) -> None:
        life = self.lives.get(number)
        if life is not None and not life.begun and not life.num_pinned:
            chain = KeyChain(life.root, BLOCK, self.digest)
            num_full = life.sequence.num_tokens // BLOCK
            chain.extend(life.sequence.token_ids, num_full)
            life.num_pinned = self.pool.pin(chain, num_full, life.sequence.id)

    @rule(number=NUMBERS)
    def begin_as_prefill(self, number: int) -> None:
        life = self.lives.get(number)
        if life is not None and not life.begun:
            expected = life.prefix.num_cached_tokens(life.sequence)
            assert life.prefix.acquire(life.sequence, life.owner) == expected < life.sequence.num_tokens
            self.pool.unpin(life.sequence.id)
            life.begun = True
            self.check_content(life)

    @rule(number=NUMBERS)
    def begin_as_decode(self, number: int) -> None:
        """What is not pinned arrives in blocks of a transfer."""
        life = self.lives.get(number)
        if life is not None and not life.begun:
            sequence = life.sequence
            inbound = Owner(OwnerKind.INBOUND, sequence.id)
            received = self.allocate(blocks_for_tokens(sequence.num_tokens, BLOCK) - life.num_pinned, inbound)
            pinned = self.pool.claim(life.owner)
            assert len(pinned) == life.num_pinned
            self.pool.hand_over(received, inbound, life.owner)
            sequence.block_ids, sequence.num_computed_tokens = [*pinned, *received], sequence.num_tokens
            assert life.prefix.adopt(sequence)
            assert life.prefix.num_shared <= len(pinned)  # fewer if they were retracted since
            self.write(life, len(pinned))
            self.check_content(life)
            life.prefix.publish(sequence, life.owner)
            life.begun = True

    @rule(number=NUMBERS, num_tokens=st.integers(1, 5), publish=st.booleans(), sampled=st.integers(1, 2))
    def compute(self, number: int, num_tokens: int, publish: bool, sampled: int) -> None:
        life = self.lives.get(number)
        if life is None or not life.begun or life.kind is not OwnerKind.SEQUENCE:
            return
        sequence = life.sequence
        first = sequence.num_computed_tokens // BLOCK
        if not sequence.num_remaining_tokens and sequence.num_output_tokens < MAX_OUTPUT:
            sequence.token_ids.append(sampled)
        end = min(sequence.num_computed_tokens + num_tokens, sequence.num_tokens)
        sequence.block_ids += self.allocate(blocks_for_tokens(end, BLOCK) - len(sequence.block_ids), life.owner)
        sequence.num_computed_tokens = end
        self.write(life, first)
        if publish:
            life.prefix.publish(sequence, life.owner)

    @rule(number=NUMBERS)
    def hand_over(self, number: int) -> None:
        life = self.lives.get(number)
        if life is not None and life.begun and life.kind is OwnerKind.SEQUENCE:
            outbound = Owner(OwnerKind.OUTBOUND, life.sequence.id)
            self.pool.hand_over(life.sequence.block_ids, life.owner, outbound)
            life.kind = OwnerKind.OUTBOUND

    @rule(number=NUMBERS, trusted=st.booleans())
    def release(self, number: int, trusted: bool) -> None:
        life = self.lives.pop(number, None)
        if life is not None:
            if not trusted:
                life.prefix.retract(life.sequence, life.owner)
            self.pool.free(life.sequence.block_ids, life.owner)
            self.pool.unpin(life.sequence.id)
            assert self.ledger.release(life.reservation_id)

    def allocate(self, num_blocks: int, owner: Owner) -> list[int]:
        """Under a reservation this never fails, and never takes what somebody holds."""
        held = {block_id for life in self.lives.values() for block_id in life.sequence.block_ids}
        block_ids = self.pool.allocate(num_blocks, owner)
        assert held.isdisjoint(block_ids)
        return block_ids

    def write(self, life: Life, first: int) -> None:
        sequence = life.sequence
        for position in range(first, blocks_for_tokens(sequence.num_computed_tokens, BLOCK)):
            end = min((position + 1) * BLOCK, sequence.num_computed_tokens)
            self.content[sequence.block_ids[position]] = (life.root, tuple(sequence.token_ids[:end]))

    def check_content(self, life: Life) -> None:
        sequence = life.sequence
        for position, block_id in enumerate(sequence.block_ids):
            end = min((position + 1) * BLOCK, sequence.num_computed_tokens)
            assert self.content[block_id] == (life.root, tuple(sequence.token_ids[:end]))

    @invariant()
    def everybody_still_has_its_own_kv(self) -> None:
        self.pool.check_integrity()
        for life in self.lives.values():
            self.check_content(life)

    @invariant()
    def nothing_is_held_without_a_promise(self) -> None:
        assert NUM_BLOCKS - self.pool.num_free_blocks <= self.ledger.num_reserved_blocks <= NUM_BLOCKS

    def teardown(self) -> None:
        for number in list(self.lives):
            self.release(number, True)
        assert self.pool.num_free_blocks == NUM_BLOCKS


class ConstantDigestMachine(PrefixCacheMachine):
    """Every key is the same: fewer hits, and never a wrong one."""

    digest: Digest = staticmethod(lambda _: b"same")


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestConstantDigestMachine = ConstantDigestMachine.TestCase
TestConstantDigestMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
