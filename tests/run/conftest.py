"""Fixtures of the session tests."""

from session_cases import plan_once, recipe, shared_cache, text_file, tiny_folder  # noqa: F401
