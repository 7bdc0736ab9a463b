"""The checks, in the order in which they are shown: each takes a survey and gives one result."""

from __future__ import annotations

from collections.abc import Callable

from catenary_apps.doctor.checks.cards import check_modules, check_numa, check_owners, check_smi
from catenary_apps.doctor.checks.container import check_runtime
from catenary_apps.doctor.checks.cpu import check_governor, check_idle_states, check_numa_balancing
from catenary_apps.doctor.checks.driver import check_cards, check_driver, check_status
from catenary_apps.doctor.checks.memory import check_hugepages, check_iommu, check_limits, check_memory
from catenary_apps.doctor.checks.network import check_libfabric, check_ports
from catenary_apps.doctor.checks.software import check_compatibility, check_packages, check_python
from catenary_apps.doctor.result import Result
from catenary_apps.doctor.survey import Survey

Check = Callable[[Survey], Result]

CHECKS: tuple[Check, ...] = (
    check_cards,
    check_driver,
    check_status,
    check_smi,
    check_owners,
    check_modules,
    check_numa,
    check_packages,
    check_python,
    check_compatibility,
    check_hugepages,
    check_governor,
    check_idle_states,
    check_numa_balancing,
    check_iommu,
    check_memory,
    check_limits,
    check_ports,
    check_libfabric,
    check_runtime,
)

__all__ = ["CHECKS"]
