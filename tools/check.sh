#!/usr/bin/env bash
# The checks that need no run: format, layers, behaviour tables, lint, headers on their own. For a configured build (`make quick-check`).
#   tools/check.sh quick    lint only what differs from CHECK_BASE (default: where HEAD left the remote's branch, else the last commit)
#   tools/check.sh all      lint everything
#   tools/check.sh format   check nothing, format everything in place
#
# Lint covers lockstep/ and the programs (cli/, checkpoint_cli/), headers included. Files that are compiled together are linted together, whichever of them changed: most
# of a lint is libtorch's headers, and so even a change of everything takes minutes. Not linted: tests/, examples/ and benchmarks/, which are only formatted, and
# */optional/, which is compiled or not depending on the machine.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:-all}
bin=.venv/bin
jobs=${JOBS:-$(nproc)}
[ ! -x .venv/cmake/bin/cmake ] || PATH=$PWD/.venv/cmake/bin:$PATH

# Files that match the patterns and exist: tracked, or new and not ignored.
existing() {
  local file
  git ls-files --cached --others --exclude-standard --deduplicate -- "$@" | while read -r file; do [ ! -e "$file" ] || echo "$file"; done
}
is_linted() { [[ $1 != */optional/* ]]; }

# Where a header is linted: in the source beside it, else alone (the build has a source for that), else in a source that includes it.
source_of_header() {
  local alone=build/headers/$1.cpp
  if [ -e "${1%.h}.cpp" ]; then
    echo "${1%.h}.cpp"
  elif [ -e "$alone" ]; then
    echo "$alone"
  else
    git grep --untracked -lF "#include \"$1\"" -- 'lockstep/*.cpp' 'cli/*.cpp' 'checkpoint_cli/*.cpp' | grep -v /optional/ | head -n 1 || true
  fi
}

# What a source is compiled in: the file in the build that includes it, else itself.
unit_of() {
  grep -o '"file": "[^"]*/Unity/[^"]*' build/compile_commands.json | cut -d'"' -f4 |
    { xargs -r grep -lF "#include \"$PWD/$1\"" || true; } | head -n 1 | grep . || echo "$1"
}

if [ "$mode" = format ]; then
  existing '*.h' '*.cpp' | xargs "$bin/clang-format" -i
  exit
fi

echo "== format"
existing '*.h' '*.cpp' | xargs "$bin/clang-format" --dry-run -Werror

echo "== layers and behaviour tables"
python3 -B tools/check_layers.py
python3 -B tools/check_behaviour.py

echo "== lint"
# clang-tidy goes on with its defaults after a mistake in its settings; this does not.
"$bin/clang-tidy" --config-file=.clang-tidy --verify-config >/dev/null
patterns=('lockstep/*.cpp' 'lockstep/*.h' 'cli/*.cpp' 'cli/*.h' 'checkpoint_cli/*.cpp' 'checkpoint_cli/*.h')
if [ "$mode" = quick ]; then
  base=${CHECK_BASE:-$(git merge-base HEAD origin/HEAD 2>/dev/null || true)}
  if [ -z "$base" ] || [ "$base" = "$(git rev-parse HEAD)" ]; then
    base=$(git rev-parse -q --verify HEAD~1 || git rev-list --max-parents=0 HEAD)
  fi
  changed=$(git diff --name-only --diff-filter=d "$base" -- "${patterns[@]}")
  changed+=$'\n'$(git ls-files --others --exclude-standard -- "${patterns[@]}")
else
  changed=$(existing "${patterns[@]}")
fi
mapfile -t sources < <(
  for file in $changed; do
    is_linted "$file" || continue
    case $file in *.h) source_of_header "$file" ;; *) echo "$file" ;; esac
  done | sort -u | while read -r source; do unit_of "$source"; done | sort -u
)
if [ ${#sources[@]} -gt 0 ]; then
  # GCC's precompiled headers mean nothing to clang: lint with commands that lack them.
  python3 -B tools/lint_commands.py build/compile_commands.json build/lint
  printf '%s\n' "${sources[@]}" | xargs -P "$jobs" -n 1 "$bin/clang-tidy" -p build/lint --quiet --warnings-as-errors='*' \
    --checks=-bugprone-suspicious-include --header-filter="^$PWD/(lockstep|cli|checkpoint_cli)/.*\.(h|cpp)\$" 2>&1 |
    { grep -vE '^[0-9]+ warnings? generated\.$' || true; }
fi
echo "${#sources[@]} units linted"

echo "== headers compile alone"
targets=(lockstep_headers)
if [ "$mode" = quick ]; then
  # Those that changed, and those that include them, directly or not.
  affected=$(grep -E '^lockstep/.*\.h$' <<<"$changed" | sort -u || true)
  while [ -n "$affected" ]; do
    more=$(sed 's/.*/#include "&"/' <<<"$affected" | grep -rlFf - --include='*.h' lockstep || true)
    more=$(printf '%s\n' "$affected" "$more" | grep . | sort -u)
    [ "$more" != "$affected" ] || break
    affected=$more
  done
  # Internal headers have no target.
  mapfile -t targets < <(sed -n 's/.*/headers\/&.cpp.o:/p' <<<"$affected" | grep -v '^headers/.cpp.o:$' |
    { grep -Ff - <(ninja -C build -t targets all) || true; } | cut -d: -f1)
fi
[ ${#targets[@]} -eq 0 ] || cmake --build --preset dev -j "$jobs" --target "${targets[@]}"
echo "${#targets[@]} of $(find build/headers -name '*.h.cpp' | wc -l) headers compiled"
