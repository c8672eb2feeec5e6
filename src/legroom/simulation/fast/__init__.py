"""The fast replay: the scheduler over flat columns that Numba can compile. Between an arrival, a finish and a full pool
every step is the same: each running request decodes one token. Such steps are taken in bulk. The result equals that of
`trace_replay.StepByStepReplay`."""
