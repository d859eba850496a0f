#!/usr/bin/env bash
# Makes the secrets that the overlays are rendered with, each of 32 random bytes; those that are there stay as they are.
# They lie beside the manifests, are ignored by git, and are the owner's to read. Without them kustomize renders nothing.
#
#   deploy/kubernetes/secrets.sh
set -euo pipefail
umask 077
cd "$(dirname "$0")"
for file in base/secrets/admin-token overlays/baton/secrets/cluster-secret overlays/vllm/secrets/engine-key \
    overlays/vllm-baton/secrets/cluster-secret; do
    if [ -s "$file" ]; then
        echo "$file: kept"
    else
        head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > "$file"
        echo "$file: made"
    fi
done
