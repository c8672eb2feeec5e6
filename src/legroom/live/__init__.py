"""A running vLLM, seen from outside.

`metrics/` reads its figures, from the server itself or from a Prometheus, and keeps the last minutes as a `Window`;
`detectors/` say what is wrong, by the levels in `thresholds`; `forecast` says what will be; `remedies` says what helps;
`view` is all of that at one moment; `journal/` keeps samples, incidents and actions. `gpu_memory` adds the
GPU memory of servers on this machine.
"""
