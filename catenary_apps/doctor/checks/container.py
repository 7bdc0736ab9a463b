"""What docker compose needs to give cards to a container."""

from __future__ import annotations

import json

from catenary_apps.doctor.result import Result, not_applicable, ok, warning
from catenary_apps.doctor.survey import Survey

_DOCKER = ("/usr/bin/dockerd", "/usr/local/bin/dockerd", "/usr/sbin/dockerd", "/snap/bin/docker")
_RUNTIME = ("/usr/bin/habana-container-runtime", "/usr/local/bin/habana-container-runtime")
_INSTALL = (
    "install habanalabs-container-runtime, then add the runtime habana to /etc/docker/daemon.json "
    "(docs/gaudi.md) and restart docker"
)


def check_runtime(survey: Survey) -> Result:
    """The habana runtime of Docker."""
    name, host = "container runtime", survey.host
    if not survey.cards:
        return not_applicable(name, "no card to give to containers")
    if host.exists("/.dockerenv") or host.exists("/run/.containerenv"):
        visible = host.environment.get("HABANA_VISIBLE_DEVICES")
        if visible:
            return ok(name, f"in a container with HABANA_VISIBLE_DEVICES={visible}")
        return warning(
            name,
            "in a container without HABANA_VISIBLE_DEVICES",
            "start it with the runtime habana and -e HABANA_VISIBLE_DEVICES=all",
        )
    if not any(host.exists(program) for program in _DOCKER):
        return not_applicable(name, "no Docker here")
    try:
        runtimes = json.loads(host.text("/etc/docker/daemon.json") or "{}").get("runtimes", {})
    except (ValueError, AttributeError):
        return warning(
            name, "/etc/docker/daemon.json is not valid JSON", "mend it: docker does not start with it"
        )
    if "habana" in runtimes:
        program = runtimes["habana"].get("path", "habana-container-runtime")
        if program.startswith("/") and not host.exists(program):
            return warning(name, f"the runtime habana is {program}, which is not there", _INSTALL)
        return ok(name, f"docker has the runtime habana ({program})")
    found = "docker does not know the runtime habana"
    if any(host.exists(program) for program in _RUNTIME):
        found += ", though it is installed"
    return warning(name, found, _INSTALL)
