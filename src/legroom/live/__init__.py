"""Monitoring of running vLLM servers. `metrics/` scrapes servers or queries a Prometheus and keeps the last minutes as
a `Window`; `detectors/` apply levels of `thresholds`; `forecast` extrapolates KV use; `remedies` computes flags;
`server_view` is the state of one server; `journal/` stores samples, incidents and actions; `gpu_memory` reads NVML."""
