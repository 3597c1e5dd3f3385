#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The test command: environment, lint, types, then pytest, whose summary is the
# last thing printed. Arguments go to pytest.
set -euo pipefail
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/.."
python=$(ci/setup_env.sh --print-python)
bin=$(dirname "$python")
# Nothing is fetched at test time, model weights least of all.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
MYPYPATH=examples "$bin/mypy" -p quickstart
exec "$python" -m pytest "$@"
