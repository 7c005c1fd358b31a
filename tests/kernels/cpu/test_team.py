"""Threads that run a kernel together: all of them take part, and meet at the barrier."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from numba import carray, cfunc, types

from pdserve_kernels.cpu.simd import call_function, call_int_function, take_ticket
from pdserve_kernels.cpu.team import Team, make_team

needs_openmp = pytest.mark.skipif(make_team(2).num_threads != 2, reason="torch brought no OpenMP that is known")


@cfunc(types.void(types.voidptr))
def arrive_meet_and_tell(where):
    """[barrier, thread number, thread count, arrived, came, then what each thread saw arrived behind the barrier]."""
    job = carray(where, 16, np.int64)
    thread = call_int_function(job[1]) if job[1] != 0 else 0
    job[4] = call_int_function(job[2]) if job[2] != 0 else 1
    take_ticket(job.ctypes.data + 24)
    if job[0] != 0:
        call_function(job[0])
    job[5 + thread] = job[3]


def seen(team: Team) -> list[int]:
    """By each thread that came; all of them saw as many."""
    job = np.zeros(16, dtype=np.int64)
    job[:3] = team.barrier, team.thread_number, team.thread_count
    team.run(arrive_meet_and_tell.address, job.ctypes.data)
    came = job[4]
    assert job[5 + came :].tolist() == [0] * (11 - came)
    assert job[5 : 5 + came].tolist() == [came] * came
    return job[5 : 5 + came].tolist()


def test_one_thread_needs_nothing():
    assert make_team(1) == Team(1)
    assert seen(Team(1)) == [1]


@needs_openmp
@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_every_thread_of_a_team_sees_all_others_arrive(num_threads):
    team = make_team(num_threads)
    for _ in range(20):
        assert seen(team) == [num_threads] * num_threads


@needs_openmp
def test_torchs_own_threads_are_left_as_they_are():
    before = torch.get_num_threads()
    seen(make_team(3))
    assert torch.get_num_threads() == before


@needs_openmp
@pytest.mark.parametrize(("setting", "fewer"), [("OMP_THREAD_LIMIT=1", True), ("OMP_DYNAMIC=true", False)])
def test_a_kernel_learns_of_threads_that_openmp_withholds(setting, fewer):
    """With OMP_DYNAMIC it depends on the machine's load."""
    name, value = setting.split("=")
    code = "from tests.kernels.cpu.test_team import make_team, seen; print([len(seen(make_team(2))) for _ in range(9)])"
    environment = {"PYTHONPATH": ".:kernels", "OMP_NUM_THREADS": "2", name: value}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) <= ({1} if fewer else {1, 2})
