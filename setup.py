# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="vllm-kairos",
    version="0.1.0",
    description="Load-aware prefill deflection for disaggregated vLLM",
    long_description=(Path(__file__).parent / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=[
        *find_packages(include=["vllm_kairos", "vllm_kairos.*"]),
        # Shipped with the package, kept at the top of the tree.
        "vllm_kairos._patches",
        "vllm_kairos._profiles",
    ],
    package_dir={
        "vllm_kairos._patches": "patches",
        "vllm_kairos._profiles": "profiles",
    },
    package_data={
        "vllm_kairos._patches": ["*.patch", "*.md", "*.json"],
        "vllm_kairos._profiles": ["*.json"],
    },
    install_requires=[
        "vllm==0.18.1",
        "numpy",
        "scikit-learn>=1.5",
        "joblib",
        "msgspec>=0.18",
        "pyzmq>=25",
        "fastapi",
        "uvicorn",
        "aiohttp>=3.10",
        "prometheus_client",
        "psutil",
        "tqdm",
        "matplotlib>=3.8",
    ],
    extras_require={
        "test": [
            "pytest",
            "pytest-asyncio",
            "pytest-timeout",
            "hypothesis",
            "lm-eval[api]==0.4.13",
        ]
    },
    entry_points={
        "console_scripts": ["vllm-kairos = vllm_kairos.cli:main"],
        "vllm.scheduler_plugins": [
            "kairos = vllm_kairos.engine.plugin:scheduler_class"
        ],
        "vllm.general_plugins": ["kairos = vllm_kairos.engine.plugin:register"],
    },
)
