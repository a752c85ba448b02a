# Sourced by scripts/setup and scripts/setup-engine: which Python, one run at a time, and what counts as done.
# An environment is done when its stamp says so. The stamp is removed before the first change and written after the last,
# so an install that was interrupted is built again from nothing instead of looking complete.

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "${0##*/}: $*"
    exit 2
}

# The interpreter: $PYTHON where it is set, else the first of the names given, or of the usual ones, that runs and is supported.
# A name may exist and not run (a pyenv shim of a version that is not selected), so each is asked for its version.
choose_python() {
    local candidate version='' candidates=("$@" python3 python3.13 python3.12 python3.11)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        case $version in
        3.11 | 3.12 | 3.13)
            # not the interpreter of an activated environment, which may be the one about to be replaced
            "$candidate" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))'
            return
            ;;
        esac
    done
    if [ -n "${PYTHON:-}" ]; then
        if [ -n "$version" ]; then version="Python $version"; fi
        fail "PYTHON=$PYTHON is ${version:-not a Python that runs}: name one of Python 3.11, 3.12 or 3.13"
    fi
    fail "no Python 3.11, 3.12 or 3.13 found: install one, or name it, as in" \
        "PYTHON=/path/to/python3.12 scripts/${0##*/}"
}

# Prints the system's own Python if it can make environments. Distributions build theirs with profile-guided optimisation, pyenv
# does not unless told: the gateway takes 1.6 times the CPU there.
system_python() {
    local python=/usr/bin/python3
    if [ -x $python ] && $python -c 'import ensurepip, venv' 2>/dev/null; then echo $python; fi
}

# One run at a time for each environment; the lock goes with the process, also when it is killed.
# macOS has no flock(1): there a folder is the lock, and one whose owner is gone is taken over.
take_lock() {
    local name=$1 owner
    if command -v flock >/dev/null; then
        exec 9>"$name"
        if ! flock -n 9; then
            say "waiting for another ${0##*/} to finish"
            flock 9
        fi
        return
    fi
    until mkdir "$name.d" 2>/dev/null; do
        owner=$(cat "$name.d/pid" 2>/dev/null || true)
        if [ -n "$owner" ] && ! kill -0 "$owner" 2>/dev/null; then
            rm -rf "$name.d"
        fi
        sleep 1
    done
    echo $$ >"$name.d/pid"
    # shellcheck disable=SC2064  # the name is meant as it is now
    trap "rm -rf '$name.d'" EXIT
}

# What the environment is made of, as one hash: the interpreter, the platform, the recipe's number (raise it when the way of
# installing changes) and the given files.
fingerprint() {
    local python=$1 recipe=$2
    shift 2
    "$python" - "$recipe" "$@" <<'PYTHON'
import hashlib, platform, sys
digest = hashlib.sha256(repr((sys.argv[1], sys.version, sys.executable, platform.machine())).encode())
for name in sys.argv[2:]:
    with open(name, "rb") as file:
        digest.update(hashlib.sha256(file.read()).digest())
print(digest.hexdigest())
PYTHON
}

stamped() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

stamp() {
    printf '%s\n' "$2" >"$1.new"
    mv "$1.new" "$1"
}

# A package of Debian or Ubuntu, and why. Installed for root only; anyone else is told the command.
install_debian() {
    local package=$1 why=$2
    if ! command -v apt-get >/dev/null; then
        fail "$why: install what your system calls Debian's $package, then run this again"
    fi
    if [ "$(id -u)" != 0 ]; then
        fail "$why: run 'sudo apt-get install $package', then this again"
    fi
    say "$why: installing the Debian package $package"
    apt-get update -qq >&2 || fail "apt-get update failed: install $package yourself, then run this again"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >&2 ||
        fail "apt-get install $package failed: install it yourself, then run this again"
}

need_library() {
    local python=$1 library=$2 package=$3
    "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$library" 2>/dev/null ||
        install_debian "$package" "the library $library is missing"
}

# Debian and Ubuntu ship Python without ensurepip
make_venv() {
    local python=$1 folder=$2
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        install_debian "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" \
            "$python cannot make an environment (it has no ensurepip)"
    fi
    rm -rf "$folder"
    "$python" -m venv "$folder" || fail "python -m venv $folder failed: see the lines above"
}

pip_install() {
    local folder=$1
    shift
    PIP_DISABLE_PIP_VERSION_CHECK=1 "$folder/bin/python" -m pip install -qq --no-input "$@"
}
