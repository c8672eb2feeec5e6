"""Where memory that is reserved and not used lies: in PyTorch's allocator, in pools of graphs, in the last KV blocks.

A source (a memory snapshot, a black box, `memory_summary()` text, a server's page) becomes `AllocatorReading`s, and
`report` tells their parts apart.
"""
