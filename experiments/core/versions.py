"""The versions that the numbers of a run depend on: packages, source code, device."""

import functools
import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "sacrebleu")
SOURCES = ("attention_jax", "experiments")


def environment() -> dict[str, Any]:
    """Return versions and device, which with the settings determine the numbers of a run."""
    import jax

    found = {"python": platform.python_version(), **versions()}
    try:
        found["attention_jax"] = metadata.version("attention_jax")
    except metadata.PackageNotFoundError:
        found["attention_jax"] = "not installed (run from its folder)"
    device = jax.devices()[0]
    return {
        "versions": found,
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        },
        "system": platform.platform(),
    }


@functools.cache
def versions() -> dict[str, str | None]:
    """Return the versions that a run's numbers depend on, by name."""
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for file in sorted(f for name in SOURCES for f in (root / name).rglob("*.py")):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return {**found, "source": digest.hexdigest()}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
