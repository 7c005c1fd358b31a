# pyright: basic
"""Where the threads of a team wait for each other: a barrier in user space, as a step has hundreds of them.

OpenMP's own goes to sleep after some hundred turns wherever a process holds more threads than there are cores, counting
those of any pool that was ever used; waking them costs more than a phase takes.
"""

from numba import njit

from pdserve_kernels.cpu.compiled import JIT
from pdserve_kernels.cpu.simd import (
    call_function,
    load_int64_acquire,
    spin_pause,
    store_int64,
    store_int64_release,
    take_ticket,
)

MEETING_BYTES = 128
"""Two cache lines, zero at first: how many have arrived, and how many meetings there have been."""

_TURNS_BEFORE_YIELD = 2000
"""Some tens of microseconds; then whoever else wants the core may have it, as it may be one of the team."""


@njit(**JIT)
def meet(where, num_threads, give_way):
    """Returns when `num_threads` are here, whose earlier writes all of them see then.

    `give_way`: address of `void sched_yield(void)`. The last to arrive opens the barrier by counting the meeting
    (a central barrier; Mellor-Crummey and Scott 1991, section 3.1).
    """
    meetings = where + MEETING_BYTES // 2
    number = load_int64_acquire(meetings)
    if take_ticket(where) == num_threads - 1:
        store_int64(where, 0)
        store_int64_release(meetings, number + 1)
        return
    turns = 0
    while load_int64_acquire(meetings) == number:
        spin_pause()
        turns += 1
        if turns > _TURNS_BEFORE_YIELD:
            call_function(give_way)
