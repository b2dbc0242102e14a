"""bench: methods side by side on one task, each run an ordinary `skimp train` in a process of its own."""
