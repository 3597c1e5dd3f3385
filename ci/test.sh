#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The test command: the environment, then the default steps of
# ci/pipeline.yaml, whose counts are the last thing printed. Arguments go to
# ci/run_pipeline.py: --list, --step LABEL, --changed BASE, --dry-run.
set -euo pipefail
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/.."
python=$(ci/setup_env.sh --print-python)
exec "$python" ci/run_pipeline.py "$@"
