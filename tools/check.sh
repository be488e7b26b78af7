#!/usr/bin/env bash
# The checks that need no run: format, layers, behaviour tables, lint, headers on their own.
#   tools/check.sh quick   lint only what differs from CHECK_BASE (default: where HEAD left the remote's branch, else the last commit)
#   tools/check.sh all     lint everything
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:-all}
bin=.venv/bin

echo "== format"
git ls-files '*.h' '*.cpp' | xargs "$bin/clang-format" --dry-run -Werror

echo "== layers and behaviour tables"
python3 -B tools/check_layers.py
python3 -B tools/check_behaviour.py

cmake --preset dev -DLOCKSTEP_PYTHON="$(cat build/torch_python)" >build/configure.log || { cat build/configure.log; exit 1; }

echo "== lint"
if [ "$mode" = quick ]; then
  base=${CHECK_BASE:-$(git merge-base HEAD origin/HEAD 2>/dev/null || true)}
  if [ -z "$base" ] || [ "$base" = "$(git rev-parse HEAD)" ]; then
    base=$(git rev-parse -q --verify HEAD~1 || git rev-list --max-parents=0 HEAD)
  fi
  mapfile -t sources < <(git diff --name-only --diff-filter=d "$base" -- 'lockstep/*.cpp' 'cli/*.cpp' | grep -v /optional/ || true)
else
  mapfile -t sources < <(git ls-files 'lockstep/*.cpp' 'cli/*.cpp' | grep -v /optional/)
fi
if [ ${#sources[@]} -gt 0 ]; then
  # GCC's precompiled headers mean nothing to clang: lint with commands that lack them.
  python3 -B tools/lint_commands.py build/compile_commands.json build/lint
  printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -n 1 "$bin/clang-tidy" -p build/lint --quiet --warnings-as-errors='*' 2>/dev/null
fi
echo "${#sources[@]} files linted"

echo "== headers compile alone"
cmake --build --preset dev --target all_verify_interface_header_sets
