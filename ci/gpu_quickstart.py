# SPDX-License-Identifier: Apache-2.0
"""The quick start's comparison with an engine on each GPU.

Arguments are those of ``python -m quickstart``. The engines differ from the
quick start's own in what is the CPU's there: device, data type, CUDA graphs,
and where KV is buffered.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from quickstart import __main__ as quickstart
from quickstart import servers
from quickstart.engines import EngineSpec

#: Of the CPU's arguments, these and what follows them.
_WITH_VALUE = ("--dtype", "--kv-transfer-config")
_ALONE = ("--enforce-eager",)


class GpuEngineSpec(EngineSpec):
    """An engine on the GPU of its number: prefill engines come first."""

    @property
    def computing_core(self) -> int | None:
        """Its number is that of a GPU: any core."""
        return None

    def command(self) -> list[str]:
        """``vllm serve`` and its arguments, for a GPU."""
        words = super().command()
        for flag in _WITH_VALUE:
            if flag in words:
                at = words.index(flag)
                del words[at : at + 2]
        words = [word for word in words if word not in _ALONE]
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": self.role,
            "kv_buffer_device": "cuda",
            "kv_load_failure_policy": "recompute",
        }
        return [*words, "--kv-transfer-config", json.dumps(transfer)]

    def engine_environment(self) -> dict[str, str]:
        """Environment variables, with the one GPU it sees."""
        variables = super().engine_environment()
        for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE", "UCX_TLS"):
            variables.pop(name, None)
        variables["CUDA_VISIBLE_DEVICES"] = str(self.core)
        return variables


def main() -> int:
    """Run the comparison."""
    # What was the number of a core becomes that of a GPU.
    vars(servers).update(EngineSpec=GpuEngineSpec, core_for=lambda index: index)
    return quickstart.main()


if __name__ == "__main__":
    sys.exit(main())
