"""Which settings contradict each other, and how that is said. Pure; single fields are checked by their types."""

from pdserve.serving.settings import Settings

WILDCARDS = ("0.0.0.0", "::", "*")


def contradictions(settings: Settings) -> list[str]:
    """What no single field shows to be impossible, one line each."""
    coordinator, worker = settings.coordinator, settings.worker
    checks = (
        (
            coordinator.heartbeat_s >= worker.lease_s,
            f"coordinator.heartbeat_s ({coordinator.heartbeat_s:g}) must be below worker.lease_s "
            f"({worker.lease_s:g}), or reservations end between two heartbeats",
        ),
        (
            coordinator.report_interval_s >= coordinator.stalled_after_s,
            f"coordinator.report_interval_s ({coordinator.report_interval_s:g}) must be below "
            f"coordinator.stalled_after_s ({coordinator.stalled_after_s:g}), or every idle worker counts as stalled",
        ),
        (
            coordinator.default_deadline_s > coordinator.max_deadline_s,
            f"coordinator.default_deadline_s ({coordinator.default_deadline_s:g}) must not exceed "
            f"coordinator.max_deadline_s ({coordinator.max_deadline_s:g})",
        ),
        (
            any(not text.strip() for pair in coordinator.api_keys.items() for text in pair),
            "coordinator.api_keys: neither a key nor its tenant may be empty",
        ),
        (
            coordinator.http_port == coordinator.grpc_port != 0,
            f"coordinator.http_port and coordinator.grpc_port are both {coordinator.grpc_port}",
        ),
        (
            worker.control_port == worker.kv_port != 0,
            f"worker.control_port and worker.kv_port are both {worker.kv_port}",
        ),
        (
            worker.host in WILDCARDS and not worker.advertise_host,
            f"worker.host is {worker.host}, which nobody can dial: give worker.advertise_host (--advertise-host)",
        ),
        (not settings.transfer.transports, "transfer.transports must name at least one transport"),
        (any(core < 0 for core in worker.cores), "worker.cores must not be negative"),
        (len(set(worker.cores)) != len(worker.cores), "worker.cores names a core twice"),
    )
    addresses = [
        f"worker.coordinators: {address!r} is not HOST:PORT"
        for address in worker.coordinators
        if not is_address(address)
    ]
    return [message for wrong, message in checks if wrong] + addresses + _namesakes(settings)


def _namesakes(settings: Settings) -> list[str]:
    first: dict[str, str] = {}
    problems: list[str] = []
    for model in settings.models:
        if model.name in first:
            problems.append(
                f"more_models: {first[model.name]} and {model.source} would both be served as {model.name!r}: "
                "give one of them a served_name"
            )
        first.setdefault(model.name, model.source)
    return problems


def is_address(text: str) -> bool:
    """Whether `text` is HOST:PORT; an IPv6 host stands in brackets."""
    host, separator, port = text.rpartition(":")
    bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    return bool(separator and host and not bare_ipv6 and port.isascii() and port.isdigit() and 0 < int(port) < 65536)
