#!/usr/bin/env bash
# Installs the servers and tools that tests and benchmarks start on 127.0.0.1, where they are missing: nginx, PostgreSQL, FFmpeg's
# libraries for torchcodec, and Azurite (with npm). Debian and Ubuntu, as root; elsewhere it says what is missing, and the tests that need
# it say so, too.
set -euo pipefail
say_skipped() { echo "$1; tests that need them are skipped (as root on Debian or Ubuntu, $0 installs them)" >&2; }
if ! command -v azurite-blob >/dev/null; then
    if [ "$(id -u)" -eq 0 ] && command -v npm >/dev/null; then
        echo "installing azurite (once)"
        npm install --global --silent --no-audit --no-fund azurite@3.35.0 >/dev/null 2>&1 || say_skipped "could not install azurite"
    else
        say_skipped "not installed here: azurite"
    fi
fi
missing=()
command -v nginx >/dev/null || [ -x /usr/sbin/nginx ] || missing+=(nginx-light)
command -v initdb >/dev/null || compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null || missing+=(postgresql)
command -v ffmpeg >/dev/null || missing+=(ffmpeg)
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    say_skipped "not installed here: ${missing[*]}"
    exit 0
fi
echo "installing ${missing[*]} (once)"
export DEBIAN_FRONTEND=noninteractive
{ apt-get update -q && apt-get install -y -q --no-install-recommends "${missing[@]}"; } >/dev/null ||
    say_skipped "could not install ${missing[*]}"
