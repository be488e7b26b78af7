#!/usr/bin/env bash
# Prepares a Debian or Ubuntu machine: system packages, and a virtual environment with torch unless one is found.
# Quick and silent when nothing is missing. The Python whose torch is used is remembered in build/torch_python for the Makefile.
#
#   tools/setup.sh build   what demo and test need
#   tools/setup.sh check   the same, and the tools of `make check`
#
# LOCKSTEP_PYTHON=<python>           use this Python's torch
# Torch_DIR, CMAKE_PREFIX_PATH       where CMake finds torch by itself, no torch is installed
# LOCKSTEP_EXTRA_INCLUDES=<dirs>     more folders with headers, separated by spaces or colons
# LOCKSTEP_GOOGLETEST_DIR=<folder>   GoogleTest's sources, instead of the package
set -euo pipefail
cd "$(dirname "$0")/.."
purpose=${1:-build}
torch_version=2.13.0
transformers_version=5.23.0
safetensors_version=0.8.0
clang_tools_version=18.1.8
minimum_cmake=3.25

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
  say "$@"
  exit 1
}

# --- System packages. Each is shown to be there by a command or a header, so that machines without dpkg's record are not bothered.

missing=()
optional=()
need_command() { command -v "$2" >/dev/null 2>&1 || missing+=("$1"); }
need_header() {
  local dir dirs
  IFS=': ' read -r -a dirs <<<"${LOCKSTEP_EXTRA_INCLUDES:-} ${CMAKE_INCLUDE_PATH:-}"
  for dir in "${dirs[@]}" /usr/include /usr/local/include; do
    [ -e "$dir/$2" ] && return
  done
  missing+=("$1")
}

has_python_headers() {
  [ -e "$("${python:-python3}" -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null)/Python.h" ]
}

sudo=()
may_install() {
  command -v apt-get >/dev/null 2>&1 || return 1
  [ "$(id -u)" = 0 ] && return
  sudo=(sudo -n)
  "${sudo[@]}" true 2>/dev/null
}
is_updated=
install_packages() {
  # A machine that just booted may be updating itself: wait for its lock.
  local apt=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300)
  if [ -z "$is_updated" ]; then
    "${apt[@]}" update >&2 || say "apt-get update failed: going on with the package lists that are there"
    is_updated=1
  fi
  "${apt[@]}" install -y --no-install-recommends "$@" >&2
}
require_packages() {
  [ $# -gt 0 ] || return 0
  if may_install; then
    say "installing system packages: $*"
    install_packages "$@" && return
    say "apt-get failed, see above. Is there a network? These packages are needed:"
  else
    say "these packages are missing, and installing them takes root or sudo without a password. Please run:"
  fi
  say "  sudo apt-get install --no-install-recommends $*"
  [ ${#optional[@]} = 0 ] || say "and, for faster builds and more tests: ${optional[*]}"
  exit 1
}
# Their absence is no error, so each is tried once.
try_packages() {
  local package untried=() absent=() tried=build/.optional_packages_tried
  for package in "$@"; do grep -qsx "$package" $tried || untried+=("$package"); done
  [ ${#untried[@]} -gt 0 ] || return 0
  if ! may_install; then
    absent=("${untried[@]}")
  else
    say "installing optional system packages: ${untried[*]}"
    if ! install_packages "${untried[@]}"; then
      for package in "${untried[@]}"; do install_packages "$package" || absent+=("$package"); done
    fi
  fi
  [ ${#absent[@]} = 0 ] || say "going on without ${absent[*]}: builds may be slower, some tests will be skipped"
  printf '%s\n' "${untried[@]}" >>$tried
}

# --- The virtual environment.

can_make_venv() { python3 -c 'import ensurepip, venv' >/dev/null 2>&1; }
has_venv() { .venv/bin/python3 -m pip --version >/dev/null 2>&1; }
ensure_venv() {
  has_venv && return
  can_make_venv || require_packages python3-venv
  # One that was interrupted, or whose Python is gone, would otherwise be in the way for ever.
  .venv/bin/python3 -m ensurepip >/dev/null 2>&1 && has_venv && return
  rm -rf .venv
  python3 -m venv .venv >&2 || die "$(command -v python3) could not make a virtual environment in .venv, see above"
  has_venv || die "$(command -v python3) made a virtual environment without a working pip in .venv"
}
pip_install() {
  local quiet=(-q)
  ensure_venv
  [ -t 2 ] && quiet=()
  .venv/bin/python3 -m pip install "${quiet[@]}" --disable-pip-version-check "$@" >&2 && return
  say "pip could not install $* into .venv, see above. It takes a network (or pip's settings for a mirror or proxy),"
  say "Python 3.10 or later (this is $(.venv/bin/python3 --version 2>&1)) and room on the disk."
  die "If torch 2.11 or later is elsewhere on this machine: make … LOCKSTEP_PYTHON=<its python>"
}
# Of .venv, only what pip finished counts: it writes this file last.
has_installed() { compgen -G ".venv/lib/python3*/site-packages/$1.dist-info/RECORD" >/dev/null; }

# --- What is there?

has_torch() {
  "$1" - <<'PY' >/dev/null 2>&1
import importlib.util, re, pathlib
package = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0])
text = (package / "version.py").read_text()
major, minor = map(int, re.search(r"__version__ = '(\d+)\.(\d+)", text).groups())
assert (major, minor) >= (2, 11) and (package / "share/cmake/Torch/TorchConfig.cmake").exists()
PY
}
environment_has_torch() {
  local dir dirs
  if [ -n "${Torch_DIR:-}" ]; then
    [ -e "$Torch_DIR/TorchConfig.cmake" ] || [ -e "$Torch_DIR/share/cmake/Torch/TorchConfig.cmake" ] && return
    die "Torch_DIR=$Torch_DIR has no TorchConfig.cmake. Correct or unset it"
  fi
  IFS=: read -r -a dirs <<<"${CMAKE_PREFIX_PATH:-}"
  for dir in "${dirs[@]}"; do
    [ -e "$dir/share/cmake/Torch/TorchConfig.cmake" ] && return
  done
  return 1
}
find_torch_python() {
  if [ -n "${LOCKSTEP_PYTHON:-}" ]; then
    python=$(command -v "$LOCKSTEP_PYTHON") || die "LOCKSTEP_PYTHON=$LOCKSTEP_PYTHON is no program that can be run"
    has_torch "$python" ||
      die "LOCKSTEP_PYTHON=$LOCKSTEP_PYTHON has no torch 2.11 or later. Install it there, name another Python, or unset it"
  elif has_installed 'torch-*' && has_torch .venv/bin/python3; then
    python=.venv/bin/python3
  else
    python=$(command -v python3) && has_torch "$python" || python=
  fi
  case "$python" in /* | '') ;; *) python=$PWD/$python ;; esac
}
is_recent_cmake() {
  local version
  version=$("$1" --version 2>/dev/null | sed -n '1s/[^0-9]*//p')
  [ -n "$version" ] && [ "$(printf '%s\n' "$version" $minimum_cmake | sort -V | head -n 1)" = $minimum_cmake ]
}

mkdir -p build
python=
find_torch_python
must_install_torch=
[ -n "$python" ] || environment_has_torch || must_install_torch=1
must_install_clang_tools=
if [ "$purpose" = check ]; then
  has_installed "clang_format-$clang_tools_version" && has_installed "clang_tidy-$clang_tools_version" || must_install_clang_tools=1
fi

# --- Install what is not.

[ -n "${CXX:-}" ] || need_command g++ g++
is_recent_cmake .venv/cmake/bin/cmake || need_command cmake cmake
need_command ninja-build ninja
need_command python3 python3
if [ -n "$must_install_torch$must_install_clang_tools" ] && ! can_make_venv && ! has_venv; then missing+=(python3-venv); fi
need_header libcli11-dev CLI/CLI.hpp
[ -n "${LOCKSTEP_GOOGLETEST_DIR:-}" ] || need_header libgmock-dev gmock/gmock.h
[ "$purpose" != check ] || need_command git git
required=("${missing[@]}")

missing=()
need_command ccache ccache
need_header libgloo-dev gloo/rendezvous/store.h
need_header nlohmann-json3-dev nlohmann/json.hpp
need_command openmpi-bin mpirun
# mpicc comes without the headers it needs.
mpicc -x c -include mpi.h -fsyntax-only /dev/null >/dev/null 2>&1 || missing+=(libopenmpi-dev)
need_command iproute2 ip
has_python_headers || missing+=(python3-dev)
optional=("${missing[@]}")

require_packages "${required[@]}"
try_packages "${optional[@]}"

# The Makefile looks in .venv/cmake/bin before the rest of the PATH.
if ! is_recent_cmake .venv/cmake/bin/cmake && ! is_recent_cmake cmake; then
  say "$(cmake --version | head -n 1) is older than $minimum_cmake: installing cmake into .venv"
  pip_install "cmake>=$minimum_cmake,<4"
  ln -sfn "$(.venv/bin/python3 -c 'import cmake; print(cmake.CMAKE_DATA)')" .venv/cmake
  is_recent_cmake .venv/cmake/bin/cmake || die "the cmake that pip installed into .venv does not run"
fi

if [ -n "$must_install_torch" ]; then
  say "no torch 2.11 or later found: installing torch==$torch_version into .venv, which may take some minutes"
  pip_install "torch==$torch_version" numpy pytest
  has_torch .venv/bin/python3 || die "pip installed torch into .venv, but without the files that C++ programs are built with"
  python=$PWD/.venv/bin/python3
fi
printf '%s\n' "$python" >build/torch_python

# Environments made before there was a plugin. Tried once: the tests of the plugin are skipped without it.
if [ "$python" = "$PWD/.venv/bin/python3" ] && ! has_installed 'pytest-*' && [ ! -e build/.pytest_tried ]; then
  touch build/.pytest_tried
  say "installing pytest into .venv"
  .venv/bin/python3 -m pip install -q --disable-pip-version-check pytest >&2 ||
    say "going on without pytest: the tests of the Python plugin will be skipped"
fi

# What some tests compare with, checkpoints and the Llama of the examples, and are skipped without. Each is tried once.
optional_pip_packages=("safetensors==$safetensors_version" "transformers==$transformers_version")
for package in "${optional_pip_packages[@]}"; do
  tried=build/.optional_pip_packages_tried
  [ "$python" = "$PWD/.venv/bin/python3" ] && ! has_installed "${package%%==*}-*" && ! grep -qsx "$package" $tried || continue
  printf '%s\n' "$package" >>$tried
  say "installing $package into .venv"
  .venv/bin/python3 -m pip install -q --disable-pip-version-check "$package" >&2 ||
    say "going on without $package: some tests will be skipped"
done

if [ -n "$must_install_clang_tools" ]; then
  say "installing clang-format and clang-tidy $clang_tools_version into .venv"
  pip_install "clang-format==$clang_tools_version" "clang-tidy==$clang_tools_version"
fi
