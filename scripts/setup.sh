#!/bin/sh
# The environments that `make` works in; the Makefile calls this only when one is missing or out of date.
#   setup.sh create PYTHON TORCH     an empty .venv
#   setup.sh install TORCH           accelpatch (editable), its requirements and the developer's tools into .venv
#   setup.sh oldest REQUIREMENT      .venv-oldest: REQUIREMENT and what it asks for, all else borrowed from .venv
# TORCH is `pinned` (constraints.txt), `installed` (the one that PYTHON already has) or a requirement of pip's.
set -eu

fail() {
    echo "setup: $*" >&2
    exit 1
}

need_python() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null || install_python
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$1 is older than 3.11: make PYTHON=python3.12 ..."
}

install_python() {
    missing='no Python 3.11 or newer with its venv module'
    command -v apt-get >/dev/null || fail "$missing: install one, then call make again"
    [ "$(id -u)" = 0 ] || fail "$missing: sudo apt-get install python3 python3-venv, then call make again"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3 python3-venv
}

create() {
    need_python "$1"
    case $2 in
        installed)
            "$1" -c 'import torch' || fail "TORCH=installed, but $1 has no torch: make PYTHON=/path/of/the/python/that/has/it ..."
            "$1" -m venv --clear --system-site-packages .venv ;;
        *) "$1" -m venv --clear .venv ;;
    esac
}

install() {
    pip='.venv/bin/python -m pip install --disable-pip-version-check --quiet'
    case $1 in
        pinned) $pip -c constraints.txt -e '.[dev]' ;;
        *)
            # Another torch brings other versions of what it pins, so that block of the constraints does not hold.
            sed '/^# torch/,/^$/d' constraints.txt > .venv/constraints.txt
            # Unquoted: a requirement may come with options of pip's.
            # shellcheck disable=SC2086
            [ "$1" = installed ] || $pip $1
            $pip -c .venv/constraints.txt -e '.[dev]' ;;
    esac
}

oldest() {
    .venv/bin/python -m venv --clear .venv-oldest
    folder='import sysconfig; print(sysconfig.get_path("purelib"))'
    borrowed=$(.venv/bin/python -c "$folder")
    echo "import site; site.addsitedir('$borrowed')" > "$(.venv-oldest/bin/python -c "$folder")/borrowed.pth"
    .venv-oldest/bin/python -m pip install --disable-pip-version-check --quiet "$1"
}

action=$1
shift
"$action" "$@"
