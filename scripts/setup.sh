#!/bin/sh
# The environments that `make` works in; the Makefile calls this only when one is missing or out of date.
#   setup.sh create PYTHON TORCH     an empty .venv
#   setup.sh install TORCH           accelpatch (editable), its requirements and the developer's tools into .venv
#   setup.sh gate                    what compiles for AMD where there is no ROCm, and runs what is for 64-bit ARM: Debian's
#                                    packages, wheels in .venv/gate
#   setup.sh wheel                   what compiles the CPU kernels of our wheels and checks these, in .venv/wheel
#   setup.sh oldest REQUIREMENT      .venv-oldest: REQUIREMENT and what it asks for, all else borrowed from .venv
# TORCH is `pinned` (constraints.txt), `installed` (the one that PYTHON already has) or a requirement of pip's.
set -eu

fail() {
    echo "setup: $*" >&2
    exit 1
}

need_python() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null || install_python
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
        || fail "$1 is missing, or older than 3.11: make PYTHON=python3.12 ..."
}

install_python() {
    missing='no Python 3.11 or newer with its venv module'
    command -v apt-get >/dev/null || fail "$missing: install one, then call make again"
    [ "$(id -u)" = 0 ] || fail "$missing: sudo apt-get install python3 python3-venv, then call make again"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3 python3-venv
}

# The CPU kernels are compiled on first use; without a compiler everything runs on plain torch, and the plan says so.
want_compiler() {
    command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null && return
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends g++
    else
        echo 'setup: no C++ compiler, so no native CPU kernels; install g++ for them' >&2
    fi
}

# borrow LENDER_FOLDER BORROWER: what lies in the folder can be imported by BORROWER/bin/python, behind its own packages.
borrow() {
    own=$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$1')" > "$own/borrowed.pth"
}

create() {
    need_python "$1"
    want_compiler
    case $2 in
        installed)
            # Its folder, and no --system-site-packages: PYTHON may itself be of a virtual environment.
            lender=$("$1" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])' \
                2>/dev/null) || fail "TORCH=installed, but $1 has no torch: make PYTHON=/path/of/the/python/that/has/it ..."
            "$1" -m venv --clear .venv
            borrow "${lender%/torch}" .venv ;;
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

# Pinned: the figures in scripts/amd_gate.json are those of these compilers. They lie apart: the Triton that a GPU build of
# torch brought stays the one that .venv has.
gate_wheels='ziglang==0.17.0 triton==3.9.0'
# Its wheel carries the headers of Composable Kernel, with the configuration filled in; nothing else of it is unpacked.
gate_headers='amd-aiter==0.1.7.post2.dev18'
gate_packages='clang-19 lld-19 llvm-19 libamdhip64-dev rocm-device-libs qemu-user libc6-arm64-cross'

gate() {
    # shellcheck disable=SC2086
    if ! dpkg -s $gate_packages >/dev/null 2>&1; then
        [ "$(uname -m)" = x86_64 ] && command -v apt-get >/dev/null || fail "the gate needs Debian on x86-64"
        [ "$(id -u)" = 0 ] || fail "the gate needs: sudo apt-get install $gate_packages"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $gate_packages >/dev/null \
            || fail "no packages $gate_packages here (Debian 12 has them)"
    fi
    [ "$(cat .venv/gate/made_of 2>/dev/null)" = "$gate_wheels $gate_headers" ] && return
    rm -rf .venv/gate
    pip='.venv/bin/python -m pip --disable-pip-version-check --quiet'
    # shellcheck disable=SC2086
    $pip install --no-deps --target .venv/gate $gate_wheels
    $pip download --no-deps --dest .venv/gate/headers "$gate_headers"
    .venv/bin/python - .venv/gate/headers/*.whl .venv/gate <<'END'
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
wanted = tuple(f"aiter_meta/3rdparty/{name}/" for name in ("ck_helper", "composable_kernel/include"))
wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.startswith(wanted)])
END
    rm -r .venv/gate/headers
    echo "$gate_wheels $gate_headers" > .venv/gate/made_of
}

# The compiler of the wheel's kernels is the gate's, whose ARM results are checked.
wheel_tools='ziglang==0.17.0 auditwheel==6.8.2 pyelftools==0.33 packaging'

wheel() {
    [ "$(cat .venv/wheel/made_of 2>/dev/null)" = "$wheel_tools" ] && return
    rm -rf .venv/wheel
    # shellcheck disable=SC2086
    .venv/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --target .venv/wheel $wheel_tools
    echo "$wheel_tools" > .venv/wheel/made_of
}

oldest() {
    .venv/bin/python -m venv --clear .venv-oldest
    borrow "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" .venv-oldest
    .venv-oldest/bin/python -m pip install --disable-pip-version-check --quiet "$1"
}

action=$1
shift
"$action" "$@"
