"""Runs inside vLLM's processes: exports the memory of each worker on the server's /metrics page.

vLLM loads `plugin.register` into each of its processes where legroom is installed beside it. It does nothing unless
`LEGROOM_WORKER_MEMORY=1` is set. A thread in each worker reads the allocator (`worker_memory`) and writes a file to a
shared folder; the API server exports all files (`page`). `telemetry` starts both. `recorder` writes a black box when
memory runs out.
"""
