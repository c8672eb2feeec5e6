"""Inside vLLM's own processes: the memory that only a worker can see, shown on the server's metrics page.

vLLM loads `plugin.register` into each of its processes where legroom is installed beside it. It does nothing unless
`LEGROOM_WORKER_MEMORY=1` asks for it. Data flow: a thread in each worker reads the allocator and leaves its
figures on a board of files (`memory`), and the API server shows them (`page`); `telemetry` starts both.
"""
