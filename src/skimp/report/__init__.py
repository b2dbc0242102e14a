"""A run's report: `report.html` and `memory.png`, made from the files in its folder, in a process of their own.

Nothing here imports torch, and nothing of it runs in the training process: `start.make` starts `python -m skimp.report`
when training is over and its memory is given back.
"""
