#!/usr/bin/env bash
# Lays out what a container of ours has and nothing else: the binary without its symbols, the libraries it names, the
# certificates of public authorities, and a user that is not root. No shell, no package manager, no tool.
#
#   deploy/container/rootfs.sh BINARY FOLDER
set -euo pipefail
binary=${1:?usage: rootfs.sh BINARY FOLDER}
root=${2:?usage: rootfs.sh BINARY FOLDER}

mkdir -p "$root"/{usr/bin,etc/ssl/certs,etc/baton,run,tmp,proc,dev,sys,var/log/baton,var/lib/baton,var/cache/baton}
chmod 755 "$root"
chmod 1777 "$root/tmp"
chown 65532:65532 "$root"/var/{log,lib,cache}/baton 2>/dev/null || true # where the builder may not, mount something there

install -m 755 "$binary" "$root/usr/bin/baton"
strip "$root/usr/bin/baton"

# `NAME => PATH (ADDRESS)`, and the loader by its path alone.
ldd "$binary" | awk '/=> \//{print $3} /^[[:space:]]*\//{print $1}' | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
done

install -m 644 /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
printf 'root:x:0:0::/:/nonexistent\nbaton:x:65532:65532::/:/nonexistent\n' > "$root/etc/passwd"
printf 'root:x:0:\nbaton:x:65532:\n' > "$root/etc/group"
printf 'hosts: files dns\n' > "$root/etc/nsswitch.conf"
chmod 644 "$root"/etc/{passwd,group,nsswitch.conf}
