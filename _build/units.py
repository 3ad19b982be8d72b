"""Which kernels there are, and which of them a build holds.

A unit of compilation is one file of a few lines in csrc/instantiations, named
PASS_DTYPE_dHEADDIMS (`fwd_bf16_d192_128`: forward, bfloat16, D 192 with Dv 128). The list is
written out rather than globbed, so that a stray file never joins a release and a missing one is
noticed; tests/test_repo_rules.py holds the folder and the list equal, and their number under 48.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from errors import BuildError

# The slow ones first: ninja starts them in this order, so the last minutes are not one long unit.
KERNEL_UNITS = (
    "fwd_e4m3_d256",
    "fwd_e4m3_d192_128",
    "fwd_e4m3_d128",
    "fwd_e4m3_d64",
    "fwd_bf16_d256",
    "fwd_fp16_d256",
    "fwd_bf16_d192",
    "fwd_fp16_d192",
    "fwd_bf16_d192_128",
    "fwd_fp16_d192_128",
    "fwd_bf16_d128",
    "fwd_fp16_d128",
    "fwd_bf16_d96",
    "fwd_fp16_d96",
    "fwd_bf16_d64",
    "fwd_fp16_d64",
    "bwd_bf16_d256",
    "bwd_fp16_d256",
    "bwd_bf16_d192",
    "bwd_fp16_d192",
    "bwd_bf16_d192_128",
    "bwd_fp16_d192_128",
    "bwd_bf16_d128",
    "bwd_fp16_d128",
    "bwd_bf16_d96",
    "bwd_fp16_d96",
    "bwd_bf16_d64",
    "bwd_fp16_d64",
)

MAX_UNITS = 48

_UNIT_NAME = re.compile(r"(?P<passname>[a-z0-9]+)_(?P<dtype>[a-z0-9]+)_d(?P<dims>\d+(_\d+)?)$")


@dataclass(frozen=True)
class Unit:
    """One instantiation file and the axes it can be selected by."""

    name: str

    def _field(self, field: str) -> str:
        match = _UNIT_NAME.match(self.name)
        if match is None:
            raise ValueError(f"{self.name} is not PASS_DTYPE_dHEADDIMS")
        return match[field]

    @property
    def passname(self) -> str:
        return self._field("passname")

    @property
    def dtype(self) -> str:
        return self._field("dtype")

    @property
    def head_dims(self) -> str:
        return self._field("dims")

    @property
    def source(self) -> str:
        return f"csrc/instantiations/{self.name}.cu"

    @property
    def macro(self) -> str:
        """What tells csrc/host that this unit is linked in."""
        return f"FLASH_ATTN3_HAS_{self.name.upper()}"


ALL_UNITS = tuple(Unit(name) for name in KERNEL_UNITS)

# Environment variable -> (axis of Unit, what one entry is called in a message).
SWITCHES = {
    "FLASH_ATTN3_HEAD_DIMS": ("head_dims", "head dims"),
    "FLASH_ATTN3_DTYPES": ("dtype", "dtypes"),
    "FLASH_ATTN3_PASSES": ("passname", "passes"),
}


def _order(value: str) -> tuple:
    """Numbers by size, words by letter."""
    return tuple(int(part) if part.isdigit() else 0 for part in value.split("_")), value


def _choices(axis: str, units: tuple[Unit, ...]) -> list[str]:
    return sorted({getattr(unit, axis) for unit in units}, key=_order)


def _wanted(variable: str, text: str, units: tuple[Unit, ...]) -> set[str]:
    axis, noun = SWITCHES[variable]
    known = _choices(axis, units)
    entries = [entry for entry in re.split(r"[,;\s]+", text.strip().lower()) if entry]
    unknown = [entry for entry in entries if entry not in known]
    if unknown or not entries:
        raise BuildError(
            f"{variable}={text!r} names {unknown[0] if unknown else 'nothing'}; the {noun} that "
            f"can be compiled are {', '.join(known)} (separate several by commas)."
        )
    return set(entries)


def select_units(
    environ=os.environ, units: tuple[Unit, ...] = ALL_UNITS
) -> tuple[Unit, ...]:
    """The units that FLASH_ATTN3_HEAD_DIMS, _DTYPES and _PASSES leave; all when none is set."""
    selected = units
    used = []
    for variable, (axis, _) in SWITCHES.items():
        text = environ.get(variable, "")
        if not text.strip():
            continue
        wanted = _wanted(variable, text, units)
        selected = tuple(unit for unit in selected if getattr(unit, axis) in wanted)
        used.append(f"{variable}={text}")
    if not selected:
        raise BuildError(
            f"{' '.join(used)} leave no kernel to compile; set FLASH_ATTN3_SKIP_CUDA=1 to install "
            "the fallback alone."
        )
    return selected
