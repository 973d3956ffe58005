"""Triton reads this variable when a kernel is defined, so it is set before any test file is imported."""
import os

os.environ.setdefault("TRITON_INTERPRET", "1")
