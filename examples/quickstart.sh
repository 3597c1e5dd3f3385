#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# From a fresh machine to a measured comparison: sets up, starts real engines
# and vLLM's bundled proxy, profiles, replays the same arrivals under each
# policy, prints the table. See --help for what can be chosen.
set -euo pipefail
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$("$here/../ci/setup_env.sh" --print-python)
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m quickstart "$@"
