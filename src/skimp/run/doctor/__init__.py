"""What is wrong: with this machine (`machine`, `software`, `check`) or with a run that died (`autopsy`).

Nothing here imports torch: a doctor must answer on the machine where torch cannot be imported. What needs torch is
asked of a child process (`probe`, `check`), which may crash without taking the answer along.
"""
