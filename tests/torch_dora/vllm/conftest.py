"""Settings of vLLM for tests: CPU, offline, quiet."""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _settings():
    os.environ.update(
        HF_HUB_OFFLINE="1",
        # Interpreted, this package's kernels are slow; one test uses them.
        TORCH_DORA_VLLM_PUNICA="1",
        TOKENIZERS_PARALLELISM="false",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
    )
