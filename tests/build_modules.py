"""Gives tests the modules of _build/ without leaving that folder on sys.path."""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def load(name):
    """The module _build/NAME.py; its own imports among them are resolved too."""
    folder = str(ROOT / "_build")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)
