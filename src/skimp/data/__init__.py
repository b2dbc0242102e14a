"""data: its methods, listed without importing them."""

from skimp.core.registry import Facts

FACTS: list[Facts] = []
