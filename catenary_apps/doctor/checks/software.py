"""The vendor's Python packages, and whether versions fit together."""

from __future__ import annotations

from catenary.gaudi_releases import PLUGIN, PYTHONS, RELEASES, supported, take_image, too_old
from catenary_apps.doctor.result import Result, not_applicable, ok, problem, warning
from catenary_apps.doctor.survey import Survey
from catenary_apps.doctor.versions import known_releases, minor, shown


def check_packages(survey: Survey) -> Result:
    """habana-torch-plugin and torch, in the Python that runs this."""
    name = "packages"
    plugin, torch = survey.host.package(PLUGIN), survey.host.package("torch")
    if plugin is None:
        where = "engines for these cards run" if survey.cards else "an engine for Gaudi would run"
        return not_applicable(
            name, f"no {PLUGIN} in this Python: {where} in the image for hpu (docs/gaudi.md)"
        )
    if torch is None:
        return problem(
            name,
            f"{PLUGIN} {plugin} without torch",
            "install the vendor's torch of the same release, or use its image",
        )
    if too_old(plugin) is not None:
        found = f"{PLUGIN} {plugin}, torch {torch}: engines run on {supported()}"
        return problem(name, found, take_image())
    release = RELEASES.get(minor(plugin) or (0, 0))
    if release is None:
        return warning(
            name,
            f"{PLUGIN} {plugin} is none of the known releases {known_releases()}",
            "use the image of one of those",
        )
    if minor(torch) not in release.torches:
        wanted = " or ".join(shown(version) for version in release.torches)
        return problem(
            name,
            f"torch {torch} does not belong to {PLUGIN} {plugin}, which comes with {wanted}",
            "another torch was installed over the vendor's: make the environment anew, with no package that "
            "brings a torch of its own",
        )
    return ok(name, f"{PLUGIN} {plugin}, torch {torch}")


def check_python(survey: Survey) -> Result:
    """The Python of the engines."""
    name, python = "Python", survey.host.python
    if python not in PYTHONS:
        wanted = " or ".join(shown(version) for version in PYTHONS)
        return problem(
            name,
            f"{shown(python)}; engines run on Python {wanted}",
            f"{take_image()}: those for Ubuntu 24.04 have Python 3.12, those for Red Hat 9 have 3.11",
        )
    plugin = survey.host.package(PLUGIN)
    release = RELEASES.get(minor(plugin) or (0, 0)) if plugin else None
    if release is not None and python not in release.pythons:
        wanted = " or ".join(shown(version) for version in release.pythons)
        return problem(
            name, f"{shown(python)}, for which {PLUGIN} {plugin} is not made", f"use Python {wanted}"
        )
    return ok(name, shown(python))


def check_compatibility(survey: Survey) -> Result:
    """Driver and software of one release: others fail in odd ways."""
    name, host = "driver and software", survey.host
    if not survey.cards:
        return not_applicable(name, "no driver to compare")
    driver = minor(survey.driver or "")
    if driver is None:
        return warning(
            name, "the driver's version is unknown", "hl-smi shows it; it must be the release of the software"
        )
    plugin = host.package(PLUGIN)
    software = minor(plugin) if plugin else None
    if software is None:
        if driver < min(RELEASES):
            return problem(
                name, f"the driver {shown(driver)} is too old", f"{take_image()} ({known_releases()})"
            )
        if driver not in RELEASES:
            return warning(
                name,
                f"the driver {shown(driver)} is none of the known releases {known_releases()}",
                "install the driver of one of those, and take the image of the same release",
            )
        return ok(name, f"driver {shown(driver)}: take the Gaudi image of {shown(driver)}")
    if driver < software:
        return problem(
            name,
            f"the driver {shown(driver)} is older than the software {shown(software)}",
            f"install the driver {shown(software)} on the host, or take the image of {shown(driver)}",
        )
    if driver > software:
        return warning(
            name,
            f"the driver {shown(driver)} is newer than the software {shown(software)}",
            f"the vendor supports equal releases: take the image of {shown(driver)}",
        )
    return ok(name, f"both {shown(driver)}")
