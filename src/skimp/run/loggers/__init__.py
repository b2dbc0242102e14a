"""Other programs' loggers, in a process of their own that reads metrics.jsonl and evals.jsonl as they grow.

The training process imports none of them and never waits for them: a logger that hangs, fails or takes memory does so
next door, and what the run writes itself is complete in any case.
"""
