"""Our own servers, real processes with a tiny model, compared as a user would: started, frozen in turns, measured."""

import os
from pathlib import Path

import psutil
import pytest

from pdserve_bench.compare.document import document
from pdserve_bench.compare.fleets import colocated, disaggregated, started
from pdserve_bench.compare.measure import CompareOptions
from pdserve_bench.compare.run import compare
from pdserve_bench.compare.store import Store
from pdserve_bench.load.generator import RunOptions
from pdserve_bench.measures.summary import Slo
from pdserve_bench.report import write_result
from tests.bench.compare.runs import small_plan

SLO = Slo(ttft_s=60.0, itl_s=60.0)


@pytest.mark.timeout(180)
def test_two_topologies_of_ours_are_compared(tiny_model: Path, tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    extra = ("--model", str(tiny_model), "--dtype", "float32", "--set", "worker.kernels=torch")
    apart = disaggregated(1, 1, cores=cores, num_blocks=256, extra=extra)
    together = colocated(1, 1, 32, cores=cores, num_blocks=256, extra=extra)
    plans = {1.0: [small_plan(4)]}
    options = CompareOptions(baseline=together.name, max_tries=1, run=RunOptions(drain_s=60.0), revision="r1")
    with started([apart, together], tmp_path / "logs") as fleets:
        pids = [pid for fleet in fleets for pid in fleet.pids_by_name().values()]
        result = compare(fleets, plans, SLO, Store(tmp_path / "cells"), lambda _: None, options)
        names = [set(fleet.pids_by_name()) for fleet in fleets]
    assert names == [{"launcher", "coordinator", "prefill-0", "decode-0"}, {"launcher", "coordinator", "colocated-0"}]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert len(result.measured) == 3
    for one in result.measured:
        assert one.summary.completed == one.summary.offered == 4, one.run.records
        assert all(record.server is not None for record in one.run.records)
        last = one.run.samples[-1].values
        assert any(name.startswith("pdserve:kv_blocks_free") for name in last)
        assert set(one.run.server_cpu_s) == names[one.cell.fleet == together.name]
    pinning = result.described[apart.name]["pinning"]
    assert isinstance(pinning, dict)
    assert pinning["coordinator"] == cores
    assert len(pinning["decode-0"]) == len(pinning["prefill-0"]) == 1
    write_result(tmp_path / "result.json", document(result, {"model": "tiny"}, apart.name))
