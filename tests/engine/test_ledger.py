from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.core.ids import SequenceId
from pdserve.core.reservation import blocks_for_tokens
from pdserve.engine.ledger import Demand, Denied, Reservation, ReservationLedger, strict_lifetime


def ledger(num_blocks: int = 100, block_size: int = 16, lease_s: float = 10.0) -> ReservationLedger:
    return ReservationLedger(num_blocks, block_size, lease_s)


def tokens(num_blocks: int) -> Demand:
    return Demand(num_blocks * 16, num_blocks * 16)


def grant(books: ReservationLedger, number: int, num_blocks: int, now_s: float = 0.0) -> Reservation:
    answer = books.reserve(SequenceId(1, number), tokens(num_blocks), now_s)
    assert isinstance(answer, Reservation)
    return answer


def test_two_sequences_that_do_not_fit_together_run_one_after_the_other() -> None:
    books = ledger()
    first = grant(books, 1, 60)
    denied = books.reserve(SequenceId(1, 2), tokens(60), 0.0)
    assert denied == Denied(needed=60, free=40, ledger_version=0, never_fits=False)
    books.release(first.reservation_id)
    assert books.version == 1
    grant(books, 2, 60)


def test_two_that_fit_run_together_and_one_too_large_never_fits() -> None:
    books = ledger()
    grant(books, 1, 50)
    grant(books, 2, 50)
    answer = books.reserve(SequenceId(1, 3), Demand(100 * 16 + 1, 1), 0.0)
    assert isinstance(answer, Denied)
    assert answer.never_fits
    assert answer.needed == 101


def test_the_whole_pool_can_be_reserved_by_one() -> None:
    assert grant(ledger(), 1, 100).num_blocks == 100


def test_asking_again_gives_the_same_reservation() -> None:
    books = ledger()
    assert grant(books, 1, 60) == grant(books, 1, 60)
    assert books.num_reserved_blocks == 60


def test_releasing_twice_gives_back_once() -> None:
    books = ledger()
    reservation = grant(books, 1, 60)
    assert books.release(reservation.reservation_id)
    assert not books.release(reservation.reservation_id)
    assert books.num_unreserved_blocks == 100


def test_a_lease_runs_out_unless_its_own_coordinator_renews_it() -> None:
    books = ledger()
    mine = grant(books, 1, 1)
    other = books.reserve(SequenceId(2, 1), tokens(1), 0.0)
    assert isinstance(other, Reservation)
    books.renew(1, 5.0)
    assert books.expired(9.9) == []
    assert books.expired(10.0) == [other]
    assert [r.reservation_id for r in books.expired(15.0)] == [mine.reservation_id, other.reservation_id]
    assert books.num_reserved_blocks == 2  # until somebody releases them


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.integers(1, 256))
def test_strict_reserves_the_whole_lifetime_whatever_is_expected(maximum: int, expected: int, block_size: int) -> None:
    num_blocks = strict_lifetime(Demand(maximum, expected), block_size)
    assert (num_blocks - 1) * block_size < maximum <= num_blocks * block_size
    assert num_blocks == blocks_for_tokens(maximum, block_size)


class LedgerMachine(RuleBasedStateMachine):
    """Whatever comes, the promises never exceed the pool, and all come back."""

    def __init__(self) -> None:
        super().__init__()
        self.books = ledger(num_blocks=20)
        self.granted: dict[SequenceId, Reservation] = {}

    @rule(number=st.integers(1, 8), num_tokens=st.integers(1, 400))
    def reserve(self, number: int, num_tokens: int) -> None:
        sequence_id = SequenceId(1, number)
        answer = self.books.reserve(sequence_id, Demand(num_tokens, num_tokens), 0.0)
        if isinstance(answer, Reservation):
            self.granted[sequence_id] = answer
        else:
            assert answer.needed > answer.free

    @rule(number=st.integers(1, 8))
    def release(self, number: int) -> None:
        reservation = self.granted.pop(SequenceId(1, number), None)
        if reservation is not None:
            assert self.books.release(reservation.reservation_id)
            assert not self.books.release(reservation.reservation_id)

    @invariant()
    def promises_are_kept(self) -> None:
        assert self.books.num_reserved_blocks == sum(r.num_blocks for r in self.granted.values())
        assert self.books.num_reserved_blocks <= self.books.num_usable_blocks
        assert len(self.books) == len(self.granted)


TestLedgerMachine = LedgerMachine.TestCase
