"""Fleets: the command lines of ours, and real processes started, pinned, frozen in turns, and told apart."""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pdserve.cli import console
from pdserve_bench.compare.fleets import Fleet, FleetSpec, Ports, colocated, disaggregated, free_ports, started
from pdserve_bench.load.openai_http import OpenAiClient
from pdserve_bench.load.pdserve_grpc import PdserveClient
from pdserve_bench.peer.server import Gone

FAKE_SERVER = str(Path(__file__).parents[1] / "fake_openai_server.py")
PARENT = f"""
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, {FAKE_SERVER!r}, *sys.argv[1:]])
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
child.wait()
"""
PORTS = Ports(8101, 8102)
CORES = tuple(sorted(os.sched_getaffinity(0)))


def settings_of(spec: FleetSpec) -> dict[str, str]:
    words = shlex.split(spec.command)
    pairs = [words[index + 1].partition("=") for index, word in enumerate(words) if word == "--set"]
    return {name: value for name, _, value in pairs}


def flag_of(spec: FleetSpec, flag: str) -> str:
    words = shlex.split(spec.command)
    return words[words.index(flag) + 1]


# --- command lines ----------------------------------------------------------------------------------------------------


def test_a_disaggregated_fleet_shares_cores_and_kv() -> None:
    spec = disaggregated(1, 1, cores=(0, 1), num_blocks=4096, ports=PORTS, extra=("--model", "a dir"))
    assert shlex.split(spec.command)[:4] == [sys.executable, "-m", "pdserve.cli", "serve"]
    assert [flag_of(spec, flag) for flag in ("--mode", "--prefill", "--decode", "--model")] == [
        "disaggregated",
        "1",
        "1",
        "a dir",
    ]
    assert settings_of(spec) == {
        "worker.prefix_cache": "false",
        "worker.threads": "1",
        "worker.num_blocks": "2048",
        "prefill.token_budget": "512",
    }
    assert (spec.http_url, spec.grpc_address) == ("http://127.0.0.1:8101", "127.0.0.1:8102")
    assert (flag_of(spec, "--http-port"), flag_of(spec, "--grpc-port")) == ("8101", "8102")
    assert (spec.protocol, spec.cores) == ("grpc", (0, 1))
    wide = disaggregated(1, 3, cores=range(8), num_blocks=4096, prefill_chunk=256, ports=PORTS)
    assert settings_of(wide)["worker.threads"] == "2"
    assert settings_of(wide)["prefill.token_budget"] == "256"


def test_colocated_fleets_of_both_shapes_hold_as_much_kv() -> None:
    wide = colocated(1, 2, 128, cores=(0, 1), num_blocks=4096, ports=PORTS)
    narrow = colocated(2, 1, 32, cores=(0, 1), num_blocks=4096, ports=PORTS)
    assert settings_of(wide) == {
        "worker.prefix_cache": "false",
        "worker.threads": "2",
        "worker.num_blocks": "4096",
        "colocated.token_budget": "128",
    }
    assert (flag_of(narrow, "--mode"), flag_of(narrow, "--colocated")) == ("colocated", "2")
    assert settings_of(narrow)["worker.threads"] == "1"
    assert settings_of(narrow)["worker.num_blocks"] == "2048"
    assert len({wide.name, narrow.name, colocated(1, 2, 64, cores=(0, 1), num_blocks=9, ports=PORTS).name}) == 3


@pytest.mark.parametrize(
    "spec",
    [
        disaggregated(1, 2, cores=(0, 1), num_blocks=300, ports=PORTS),
        colocated(2, 1, 32, cores=(0, 1), num_blocks=300, ports=PORTS, extra=("--set", "worker.prefix_cache=true")),
    ],
)
def test_the_settings_are_such_as_the_command_takes(spec: FleetSpec) -> None:
    given = [f"{name}={value}" for name, value in settings_of(spec).items()]
    settings = console.settings_from({}, given, None)
    assert settings.worker.prefix_cache == ("prefix_cache=true" in spec.command)
    assert settings.worker.num_blocks * (3 if "prefill" in spec.command else 2) == 300


def test_what_cannot_be_started_is_refused() -> None:
    with pytest.raises(ValueError, match="workers: 0"):
        disaggregated(1, 0, cores=(0, 1), num_blocks=100)
    with pytest.raises(ValueError, match="chunk: 0"):
        colocated(1, 2, 0, cores=(0, 1), num_blocks=100)
    with pytest.raises(ValueError, match="KV blocks for each worker: 0"):
        colocated(2, 1, 32, cores=(0, 1), num_blocks=1)
    with pytest.raises(ValueError, match="needs its pid"):
        FleetSpec("peer", "", "http://127.0.0.1:8000")
    with pytest.raises(ValueError, match="no gRPC address"):
        FleetSpec("peer", "serve", "http://127.0.0.1:8000", protocol="grpc")


def test_free_ports_differ() -> None:
    ports = free_ports()
    assert ports.http != ports.grpc
    assert min(ports.http, ports.grpc) > 0


def test_a_fleets_identity_knows_settings_but_no_ports() -> None:
    one, other = (disaggregated(1, 1, cores=(0, 1), num_blocks=64, ports=ports) for ports in (PORTS, Ports(1, 2)))
    assert one.identity == other.identity
    assert "8101" not in str(one.identity)
    for changed in (
        disaggregated(1, 1, cores=(0, 1), num_blocks=66, ports=PORTS),
        disaggregated(1, 1, cores=(0,), num_blocks=64, ports=PORTS),
        replace(one, protocol="http"),
    ):
        assert changed.identity != one.identity
    running = FleetSpec("peer", "", "http://127.0.0.1:8000", pid=1)
    assert running.identity == replace(running, pid=2).identity
    assert running.identity != replace(running, http_url="http://127.0.0.1:8001").identity


# --- processes --------------------------------------------------------------------------------------------------------


def fake_fleet(name: str, *, ours: bool = False, cores: tuple[int, ...] = ()) -> FleetSpec:
    """A fake server below a process of its own; of `ours`, the child is named as our launcher names one."""
    port = free_ports().http
    words = [sys.executable, "-c", PARENT, str(port), *(["--name=decode-0"] if ours else [])]
    address = "127.0.0.1:9" if ours else ""
    return FleetSpec(name, shlex.join(words), f"http://127.0.0.1:{port}", address, "http", cores)


def status_of(fleet: Fleet) -> set[str]:
    return {psutil.Process(pid).status() for pid in fleet.pids_by_name().values()}


@pytest.mark.timeout(60)
def test_fleets_stand_frozen_and_one_is_thawed_at_a_time(tmp_path: Path) -> None:
    with started([fake_fleet("a"), fake_fleet("b", ours=True)], tmp_path) as fleets:
        first, second = fleets
        assert next(iter(first.pids_by_name())) == "server"
        assert list(second.pids_by_name()) == ["launcher", "decode-0"]
        assert first.model == "fake"
        for fleet in fleets:
            os.waitid(os.P_PID, next(iter(fleet.pids_by_name().values())), os.WSTOPPED | os.WNOWAIT)
        first.thaw()
        assert psutil.STATUS_STOPPED not in status_of(first)
        assert status_of(second) == {psutil.STATUS_STOPPED}
        first.freeze()
        assert first.cpu_s() > 0
        assert first.metrics_url == first.spec.http_url + "/metrics"
        pids = [pid for fleet in fleets for pid in fleet.pids_by_name().values()]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert (tmp_path / "a.log").exists()


@pytest.mark.timeout(60)
def test_all_of_a_fleet_is_pinned_and_says_so(tmp_path: Path) -> None:
    core = CORES[-1]
    with started([fake_fleet("a/b c", ours=True, cores=(core,))], tmp_path) as (fleet,):
        described = fleet.describe()
        assert described["pinning"] == {"launcher": [core], "decode-0": [core]}
        assert described["cores"] == [core]
        assert described["command"] == fleet.spec.command
        assert described["model"] == "fake"
    assert tuple(sorted(os.sched_getaffinity(0))) == CORES
    assert (tmp_path / "a-b-c.log").exists()


def test_cores_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="cores 4000"),
        started([fake_fleet("a", cores=(CORES[0], 4000))], tmp_path),
    ):
        pass
    assert tuple(sorted(os.sched_getaffinity(0))) == CORES


@pytest.mark.timeout(60)
def test_a_fleet_that_ran_before_is_left_running(tmp_path: Path) -> None:
    with started([fake_fleet("a")], tmp_path) as (first,):
        first.thaw()
        root = first.pids_by_name()["server"]
        with started([FleetSpec("b", "", first.spec.http_url, pid=root)], tmp_path) as (second,):
            assert second.pids_by_name() == first.pids_by_name()
        assert psutil.STATUS_STOPPED not in status_of(first)


@pytest.mark.timeout(60)
def test_one_that_does_not_start_ends_the_others(tmp_path: Path) -> None:
    good = fake_fleet("a")
    bad = FleetSpec("b", f"{sys.executable} -c 'raise SystemExit(3)'", f"http://127.0.0.1:{free_ports().http}")
    with pytest.raises(Gone, match="exit code 3"), started([good, bad], tmp_path):
        pass
    port = good.http_url.rpartition(":")[2]
    assert not [one for one in psutil.process_iter(["cmdline"]) if port in (one.info["cmdline"] or [])]


@pytest.mark.timeout(60)
async def test_a_client_speaks_what_the_fleet_does() -> None:
    class Answering:
        endpoint = type("E", (), {"model": "m"})

        def processes(self) -> list[psutil.Process]:
            return [psutil.Process()]

        def describe(self) -> dict[str, object]:
            return {}

    http = FleetSpec("a", "x", "http://127.0.0.1:8", "127.0.0.1:9", "http")
    for spec, kind in ((http, OpenAiClient), (replace(http, protocol="grpc"), PdserveClient)):
        client = Fleet(spec, Answering()).client()  # type: ignore[arg-type]
        assert isinstance(client, kind)
        await client.close()
