#!/usr/bin/env bash
# See that a Docker engine answers: start one where none does, and install it before if it must be.
# It never stops an engine, and it installs nothing but for root on Debian or Ubuntu.
set -euo pipefail

answers() { curl -s --max-time 5 --unix-socket /var/run/docker.sock http://docker/_ping 2>/dev/null | grep -q OK \
    || docker version >/dev/null 2>&1; }
say() { echo "toolgym: $*" >&2; }

start() {
    if [ "$(id -u)" -ne 0 ]; then
        say "no Docker engine answers: start yours (e.g. sudo systemctl start docker), or run 'sudo make docker'"
        return 1
    fi
    if ! command -v dockerd >/dev/null; then
        if ! command -v apt-get >/dev/null; then
            say "no Docker engine: install one from your distribution or from docs.docker.com/engine/install"
            return 1
        fi
        say "installing docker.io from the distribution"
        apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends docker.io >/dev/null || { say "docker.io cannot be installed"; return 1; }
        answers && return 0   # its package has started it
    fi
    # Boxes have no network, so the engine needs neither a bridge nor rules in the firewall. A session of its own: it
    # outlives the shell that started it.
    say "starting dockerd, log in /var/log/toolgym-dockerd.log"
    setsid nohup dockerd --iptables=false --bridge=none </dev/null >/var/log/toolgym-dockerd.log 2>&1 &
    for _ in $(seq 120); do
        answers && return 0
        sleep 0.5
    done
    say "dockerd did not come up, see /var/log/toolgym-dockerd.log"
    return 1
}

answers || start
