#!/usr/bin/env bash
# Installs the servers and tools that tests and benchmarks start on 127.0.0.1, where they are missing: nginx, PostgreSQL, and FFmpeg's
# libraries for torchcodec. Debian and Ubuntu, as root; elsewhere it says what is missing, and the tests that need it say so, too.
set -euo pipefail
missing=()
command -v nginx >/dev/null || [ -x /usr/sbin/nginx ] || missing+=(nginx-light)
command -v initdb >/dev/null || compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null || missing+=(postgresql)
command -v ffmpeg >/dev/null || missing+=(ffmpeg)
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed here: ${missing[*]}; tests that need them are skipped (as root on Debian or Ubuntu, $0 installs them)" >&2
    exit 0
fi
echo "installing ${missing[*]} (once)"
export DEBIAN_FRONTEND=noninteractive
{ apt-get update -q && apt-get install -y -q --no-install-recommends "${missing[@]}"; } >/dev/null ||
    echo "could not install ${missing[*]}; tests that need them are skipped" >&2
