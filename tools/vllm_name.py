"""Gives vLLM's CPU build the distribution name "vllm", by which `vllm serve` finds the platform.

python tools/vllm_name.py VERSION
"""

import sys
import sysconfig
from pathlib import Path

version = f"{sys.argv[1]}+cpu"
info = Path(sysconfig.get_path("purelib")) / f"vllm-{version}.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
