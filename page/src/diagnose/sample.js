// docs/samples/kv-too-small.log
export const SAMPLE_LOG = `(APIServer pid=1) INFO 11-15 03:00:01 [api_server.py:1977] vLLM API server version 0.11.2
(APIServer pid=1) INFO 11-15 03:00:01 [utils.py:253] non-default args: {'model_tag': 'meta-llama/Llama-3.1-8B', 'model': 'meta-llama/Llama-3.1-8B'}
(EngineCore_DP0 pid=77) INFO 11-15 03:00:19 [gpu_model_runner.py:3338] Model loading took 14.9888 GiB memory and 8.214 seconds
(EngineCore_DP0 pid=77) INFO 11-15 03:00:41 [gpu_worker.py:359] Available KV cache memory: 5.06 GiB
(EngineCore_DP0 pid=77) ERROR 11-15 03:00:41 [core.py:842] EngineCore failed to start.
(EngineCore_DP0 pid=77) ERROR 11-15 03:00:41 [core.py:842] Traceback (most recent call last):
(EngineCore_DP0 pid=77) ERROR 11-15 03:00:41 [core.py:842] ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (5.06 GiB). Based on the available memory, the estimated maximum model length is 41472. Try increasing \`gpu_memory_utilization\` or decreasing \`max_model_len\` when initializing the engine.
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
`;
