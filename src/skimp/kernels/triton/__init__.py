"""The Triton forms, for cards; on a CPU through Triton's interpreter (TRITON_INTERPRET=1 before triton is imported).

A row of numbers is one program: read in pieces of `BLOCK` columns, so that no width is refused. Sums and exponentials
are float32 whatever the tensors are; a result is rounded once. No operator overwrites its inputs.
"""
