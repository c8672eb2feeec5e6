"""The replay that jumps from event to event, over flat columns that Numba can compile.

Between an arrival, a finish and a block that the pool can no longer give, every step of the scheduler is the same: each
running request computes one token. All such steps are taken at once. `replay.Reference` is what this must equal.
"""
