// Logs to click on, one a cause; the first is docs/samples/kv-too-small.log.
export const SAMPLES = [
  {
    name: "length",
    entry: "LR203",
    gpu: "rtx-4090",
    shown: "To serve at least one request with the models's max seq len (131072) ...",
    log: `(APIServer pid=1) INFO 11-15 03:00:01 [api_server.py:1977] vLLM API server version 0.11.2
(APIServer pid=1) INFO 11-15 03:00:01 [utils.py:253] non-default args: {'model_tag': 'meta-llama/Llama-3.1-8B', 'model': 'meta-llama/Llama-3.1-8B'}
(EngineCore_DP0 pid=77) INFO 11-15 03:00:19 [gpu_model_runner.py:3338] Model loading took 14.9888 GiB memory and 8.214 seconds
(EngineCore_DP0 pid=77) INFO 11-15 03:00:41 [gpu_worker.py:359] Available KV cache memory: 5.06 GiB
(EngineCore_DP0 pid=77) ERROR 11-15 03:00:41 [core.py:842] EngineCore failed to start.
(EngineCore_DP0 pid=77) ERROR 11-15 03:00:41 [core.py:842] Traceback (most recent call last):
(EngineCore_DP0 pid=77) ERROR 11-15 03:00:41 [core.py:842] ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (5.06 GiB). Based on the available memory, the estimated maximum model length is 41472. Try increasing \`gpu_memory_utilization\` or decreasing \`max_model_len\` when initializing the engine.
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
`,
  },
  {
    name: "weights",
    entry: "LR101",
    gpu: "rtx-4090",
    shown: "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB ...",
    log: `(APIServer pid=1) INFO 11-15 03:00:01 [api_server.py:1977] vLLM API server version 0.11.2\n(APIServer pid=1) INFO 11-15 03:00:01 [utils.py:253] non-default args: {'model_tag': 'Qwen/Qwen3-32B', 'model': 'Qwen/Qwen3-32B'}\n(EngineCore_DP0 pid=77) ERROR 11-15 03:04:05 [core.py:842]   File "vllm/v1/worker/gpu_worker.py", line 99, in load_model\n(EngineCore_DP0 pid=77) ERROR 11-15 03:04:05 [core.py:842]   File "vllm/v1/worker/gpu_worker.py", line 99, in initialize_model\n(EngineCore_DP0 pid=77) ERROR 11-15 03:04:05 [core.py:842]   File "vllm/v1/worker/gpu_worker.py", line 99, in create_weights\n(EngineCore_DP0 pid=77) ERROR 11-15 03:04:05 [core.py:842] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU 0 has a total capacity of 23.64 GiB of which 101.00 MiB is free. Including non-PyTorch memory, this process has 23.53 GiB memory in use. Of the allocated memory 23.21 GiB is allocated by PyTorch, and 9.10 MiB is reserved by PyTorch but unallocated.\n`,
  },
  {
    name: "shared",
    entry: "LR103",
    gpu: "h100",
    shown: "Free memory on device cuda:0 (30.12/79.18 GiB) on startup is less than desired ...",
    log: `(APIServer pid=1) INFO 11-15 03:00:01 [api_server.py:1977] vLLM API server version 0.11.2\n(APIServer pid=1) INFO 11-15 03:00:01 [utils.py:253] non-default args: {'model_tag': 'meta-llama/Llama-3.1-8B', 'model': 'meta-llama/Llama-3.1-8B'}\n(EngineCore_DP0 pid=77) ERROR 11-15 03:04:05 [core.py:842] ValueError: Free memory on device cuda:0 (30.12/79.18 GiB) on startup is less than desired GPU memory utilization (0.9, 71.26 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.\n`,
  },
  {
    name: "cache",
    entry: "LR201",
    gpu: "16GiB",
    shown: "No available memory for the cache blocks ...",
    log: `(APIServer pid=1) INFO 11-15 03:00:01 [api_server.py:1977] vLLM API server version 0.11.2\n(APIServer pid=1) INFO 11-15 03:00:01 [utils.py:253] non-default args: {'model_tag': 'Qwen/Qwen3-4B', 'model': 'Qwen/Qwen3-4B', 'gpu_memory_utilization': 0.5}\nINFO 11-15 03:04:05 [worker.py:267] the current vLLM instance can use total_gpu_memory (15.73GiB) x gpu_memory_utilization (0.50) = 7.87GiB\nINFO 11-15 03:04:05 [worker.py:267] model weights take 7.51GiB; non_torch_memory takes 0.05GiB; PyTorch activation peak memory takes 1.42GiB; the rest of the memory reserved for KV Cache is -1.11GiB.\nValueError: No available memory for the cache blocks. Try increasing \`gpu_memory_utilization\` when initializing the engine.\n`,
  },
];
