"""The build backend (PEP 517): setuptools, with the requirements that depend on the machine.

Plain build isolation would build against the newest torch there is, and the binding then fails
beside any other. So: if the target environment has a torch, the isolated build uses that very
one (toolchain.py finds it) and asks for none; FLASH_ATTN3_TORCH=VERSION asks for another.
CUTLASS's headers come from their wheel only when nothing nearer holds them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from setuptools import build_meta as _setuptools  # noqa: E402
from setuptools.build_meta import (  # noqa: E402, F401
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from plan import BuildKind, build_kind  # noqa: E402
from toolchain import find_cutlass, find_torch, site_folders  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


def machine_requirements(environ=os.environ) -> list[str]:
    """What an isolated build needs here beyond pyproject.toml's list."""
    kind = build_kind(environ)
    if kind is BuildKind.FALLBACK:
        return []
    requirements = []
    asked = environ.get("FLASH_ATTN3_TORCH", "").strip()
    if asked:
        requirements.append(f"torch=={asked}")
    elif find_torch(site_folders()) is None:
        requirements.append("torch>=2.9")
    if kind is BuildKind.KERNELS and find_cutlass(ROOT, environ) is None:
        requirements.append("nvidia-cutlass>=4.2")
    return requirements


def get_requires_for_build_wheel(config_settings=None):
    return [*_setuptools.get_requires_for_build_wheel(config_settings), *machine_requirements()]


def get_requires_for_build_editable(config_settings=None):
    return [*_setuptools.get_requires_for_build_editable(config_settings), *machine_requirements()]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return _setuptools.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return _setuptools.build_editable(wheel_directory, config_settings, metadata_directory)
