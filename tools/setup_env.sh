#!/bin/sh
# setup_env.sh ENV REQUIREMENT...: creates the virtual environment ENV, unless a usable one exists, and installs into it
# (the arguments after ENV are pip's: requirements and options such as --constraint). PIP_CONSTRAINT names a lock, which
# has uv too.
# If that includes a plugin of jax's, jax uses the CPU without an NVIDIA driver, unless JAX_PLATFORMS is set.
# PYTHON names the interpreter; the default is the first that is new enough.
set -eu
env=$1
shift
minimum=$(sed -n 's/^requires-python = ">=\([0-9.]*\)"$/\1/p' pyproject.toml)
candidates=${PYTHON:-python3 python3.12 python3.13 python3.14 python}

# Run it: a name on PATH may be a version manager's broken shim, and Debian packages ensurepip separately.
usable() {
    "$1" -c "import ensurepip, sys; sys.exit(sys.version_info < tuple(map(int, '$minimum'.split('.'))))" >/dev/null 2>&1
}

describe() {
    command -v "$1" >/dev/null || { echo "not found" && return; }
    "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo "does not run"
}

if ! usable "$env/bin/python"; then
    base=
    for candidate in $candidates; do
        if usable "$candidate"; then
            base=$candidate
            break
        fi
    done
    if [ -z "$base" ]; then
        {
            echo "error: kvjax needs Python $minimum or later with its venv and ensurepip modules:"
            for candidate in $candidates; do
                echo "    $candidate: $(describe "$candidate")"
            done
            echo "Install a newer one, or pass its path: make PYTHON=/path/to/python$minimum ..."
        } >&2
        exit 1
    fi
    echo "==> creating $env (python $(describe "$base"))"
    "$base" -m venv --clear "$env"
fi
"$env/bin/python" -c "import pip" 2>/dev/null || "$env/bin/python" -m ensurepip >/dev/null
echo "==> installing $* into $env"
by_pip() {
    "$env/bin/python" -m pip install -qq --disable-pip-version-check --no-input "$@"
}

# uv takes a quarter of pip's time. It does not read pip's configuration, for instance of which index to use.
by_uv() {
    by_pip uv || return 1
    UV_CONSTRAINT=$PIP_CONSTRAINT UV_BUILD_CONSTRAINT=${PIP_BUILD_CONSTRAINT:-} SSL_CERT_FILE=${SSL_CERT_FILE:-${PIP_CERT:-}}
    export UV_CONSTRAINT UV_BUILD_CONSTRAINT SSL_CERT_FILE
    [ -n "$UV_BUILD_CONSTRAINT" ] || unset UV_BUILD_CONSTRAINT
    [ -n "$SSL_CERT_FILE" ] || unset SSL_CERT_FILE
    "$env/bin/python" -m uv pip install --quiet --python "$env/bin/python" "$@"
}

if [ -z "${PIP_CONSTRAINT:-}" ]; then
    by_pip "$@"
elif ! by_uv "$@"; then
    echo "==> uv failed, installing by pip"
    by_pip "$@"
fi

# Without a driver, the plugin that compiles kernels must not be initialized.
if "$env/bin/python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("jax_plugins"))'; then
    packages=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp tools/jax_without_driver.py "$packages"
    echo "import jax_without_driver" >"$packages/jax_without_driver.pth"
fi
