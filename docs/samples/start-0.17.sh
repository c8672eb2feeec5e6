#!/bin/sh
# A start script from the days of vLLM 0.17, for the how-to about upgrades.
exec vllm serve Qwen/Qwen3-32B \
  --max-model-len 30720 \
  --gpu-memory-utilization 0.90 \
  --swap-space 4
