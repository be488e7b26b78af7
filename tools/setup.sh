#!/usr/bin/env bash
# Prepares a Debian or Ubuntu machine: system packages, and a virtual environment with torch unless one is found.
# Quick when nothing is missing. What it finds is remembered in build/torch_python for the Makefile.
#
#   tools/setup.sh build   what demo and test need
#   tools/setup.sh check   the same, and the tools of `make check`
#
# LOCKSTEP_PYTHON=<python>: use this Python's torch. Torch_DIR or CMAKE_PREFIX_PATH in the environment: CMake will find torch itself.
set -euo pipefail
cd "$(dirname "$0")/.."
purpose=${1:-build}
torch_version=2.13.0

say() { printf 'setup: %s\n' "$*" >&2; }

# Package and a file or command that shows it is there, so that machines without dpkg's record are not bothered.
missing=()
need_command() { command -v "$2" >/dev/null 2>&1 || missing+=("$1"); }
need_header() {
  local dir
  for dir in ${LOCKSTEP_EXTRA_INCLUDES:-} /usr/include /usr/local/include; do
    [ -e "$dir/$2" ] && return
  done
  missing+=("$1")
}
need_command g++ g++
need_command cmake cmake
need_command ninja-build ninja
need_command python3 python3
need_header libcli11-dev CLI/CLI.hpp
[ -n "${LOCKSTEP_GOOGLETEST_DIR:-}" ] || need_header libgmock-dev gmock/gmock.h
# Nice to have: their absence is no error.
optional=()
wanted=("${missing[@]}")
missing=()
need_command ccache ccache
need_header libgloo-dev gloo/rendezvous/store.h
need_command openmpi-bin mpirun
need_command iproute2 ip
optional=("${missing[@]}")
missing=("${wanted[@]}")
if command -v python3 >/dev/null 2>&1 && ! python3 -c 'import ensurepip' >/dev/null 2>&1; then missing+=(python3-venv); fi

install_packages() {
  local sudo=()
  if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || return 1
    sudo=(sudo -n)
  fi
  command -v apt-get >/dev/null 2>&1 || return 1
  "${sudo[@]}" apt-get update -q >&2 || true
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" >&2
}

if [ ${#missing[@]} -gt 0 ] || { [ ${#optional[@]} -gt 0 ] && [ ! -e build/.optional_tried ]; }; then
  say "system packages to install: ${missing[*]:-} ${optional[*]:-}"
  if ! install_packages "${missing[@]}" "${optional[@]}"; then
    if [ ${#missing[@]} -gt 0 ]; then
      say "these packages are missing and could not be installed here. Please run:"
      say "  sudo apt-get install ${missing[*]} ${optional[*]:-}"
      exit 1
    fi
    say "going on without: ${optional[*]} (some tests will be skipped)"
  fi
  mkdir -p build && touch build/.optional_tried
fi

cmake_version=$(cmake --version | sed -n '1s/[^0-9]*//p')
if [ "$(printf '%s\n3.25\n' "$cmake_version" | sort -V | head -1)" != 3.25 ]; then
  say "cmake 3.25 or later is needed, found $cmake_version: pip install cmake, or a newer distribution"
  exit 1
fi

has_torch() {
  "$1" - <<'PY' >/dev/null 2>&1
import importlib.util, re, pathlib
package = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0])
text = (package / "version.py").read_text()
major, minor = map(int, re.search(r"__version__ = '(\d+)\.(\d+)", text).groups())
assert (major, minor) >= (2, 11) and (package / "share/cmake/Torch/TorchConfig.cmake").exists()
PY
}

mkdir -p build
python=
for candidate in "${LOCKSTEP_PYTHON:-}" .venv/bin/python3 "$(command -v python3)"; do
  if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 && has_torch "$candidate"; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ] && [ -z "${Torch_DIR:-}${CMAKE_PREFIX_PATH:-}" ]; then
  say "no torch found: installing torch==$torch_version into .venv"
  [ -x .venv/bin/python3 ] || python3 -m venv .venv
  .venv/bin/python3 -m pip install -q --disable-pip-version-check "torch==$torch_version" numpy >&2
  python=.venv/bin/python3
fi
case "$python" in .venv/*) python=$PWD/$python ;; esac
printf '%s\n' "$python" >build/torch_python

if [ "$purpose" = check ]; then
  [ -x .venv/bin/python3 ] || python3 -m venv .venv
  if ! [ -x .venv/bin/clang-tidy ] || ! [ -x .venv/bin/clang-format ]; then
    .venv/bin/python3 -m pip install -q --disable-pip-version-check clang-format==18.1.8 clang-tidy==18.1.8 >&2
  fi
fi
