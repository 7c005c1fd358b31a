"""Threads that run a kernel together: all of them take part, and meet at the barrier."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from numba import carray, cfunc, types

from pdserve_kernels.cpu.meeting import meet
from pdserve_kernels.cpu.simd import call_int_function, load_int64_acquire, take_ticket
from pdserve_kernels.cpu.team import Team, make_team

needs_openmp = pytest.mark.skipif(make_team(2).num_threads != 2, reason="torch brought no OpenMP that is known")


_MEETINGS = 200
_MEETING = 48  # where the meeting's own lines begin


@cfunc(types.void(types.voidptr))
def meet_again_and_again(where):
    """[give way, thread number, thread count, came, arrivals, then how often each thread saw one missing]."""
    job = carray(where, 64, np.int64)
    thread = call_int_function(job[1]) if job[1] != 0 else 0
    count = call_int_function(job[2]) if job[2] != 0 else 1
    job[3] = count
    for number in range(1, _MEETINGS + 1):
        take_ticket(job.ctypes.data + 8 * 4)
        meet(job.ctypes.data + 8 * _MEETING, count, job[0])
        job[5 + thread] += load_int64_acquire(job.ctypes.data + 8 * 4) != number * count
        meet(job.ctypes.data + 8 * _MEETING, count, job[0])


def num_came(team: Team) -> int:
    """All of them met, and nobody went on before."""
    job = np.zeros(64, dtype=np.int64)
    job[:3] = team.give_way, team.thread_number, team.thread_count
    team.run(meet_again_and_again.address, job.ctypes.data)
    came = int(job[3])
    assert job[4] == _MEETINGS * came
    assert job[5:_MEETING].tolist() == [0] * (_MEETING - 5)
    return came


def test_one_thread_needs_nothing():
    assert make_team(1) == Team(1)
    assert num_came(Team(1)) == 1


@needs_openmp
@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_every_thread_of_a_team_sees_all_others_arrive(num_threads):
    """More threads than cores, too: those that wait give way."""
    team = make_team(num_threads)
    assert [num_came(team) for _ in range(5)] == [num_threads] * 5


@needs_openmp
def test_torchs_own_threads_are_left_as_they_are():
    before = torch.get_num_threads()
    num_came(make_team(3))
    assert torch.get_num_threads() == before


@needs_openmp
@pytest.mark.parametrize(("setting", "fewer"), [("OMP_THREAD_LIMIT=1", True), ("OMP_DYNAMIC=true", False)])
def test_a_kernel_learns_of_threads_that_openmp_withholds(setting, fewer):
    """With OMP_DYNAMIC it depends on the machine's load."""
    name, value = setting.split("=")
    code = (
        "from tests.kernels.cpu.test_team import make_team, num_came; print([num_came(make_team(2)) for _ in '.' * 9])"
    )
    environment = {"PYTHONPATH": ".:kernels", "OMP_NUM_THREADS": "2", name: value}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) <= ({1} if fewer else {1, 2})
