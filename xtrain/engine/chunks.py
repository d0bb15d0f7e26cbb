"""How much of what would be large exists at once: kernels are cut by it, the estimate counts by it.

Here rather than in the kernels, which the estimate of a run must not load.
"""

# Of the fused loss: tokens at a time on a CPU; bytes of a chunk's logits on a GPU, which are those
# of 8192 tokens over 50304 in bf16.
LOSS_TOKENS = 128
LOSS_BYTES = 1 << 30
# Of composed attention on a GPU: blocks of queries at most, each of which costs 3 launches forward
# and 7 backward, and the host a bit of a step; queries in a block at least, because smaller
# products waste the tensor cores.
QUERY_BLOCKS = 4
LEAST_QUERIES = 128
