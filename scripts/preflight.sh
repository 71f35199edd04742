#!/bin/sh
# Names what is missing before an installation fails on it half way.
# usage: preflight.sh PYTHON
set -eu

python=${1:-python3}
missing=''
packages=''

need() {  # command, Debian package
  if ! command -v "$1" >/dev/null 2>&1; then
    missing="$missing $1"
    packages="$packages $2"
  fi
}

# jericho and fast-downward, which TextWorld needs, are compiled here.
need gcc gcc
need g++ g++
need cmake cmake
need make make

if ! command -v "$python" >/dev/null 2>&1; then
  missing="$missing $python"
  packages="$packages python3 python3-venv"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "preflight: got $("$python" --version 2>&1), expected Python 3.11 or" \
    "newer. Name one: make PYTHON=python3.11" >&2
  exit 1
elif ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
  missing="$missing venv"
  packages="$packages python3-venv"
fi

if [ -n "$missing" ]; then
  echo "preflight: missing:$missing" >&2
  echo "preflight: on Debian or Ubuntu: sudo apt-get install$packages" >&2
  exit 1
fi
