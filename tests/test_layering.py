"""Imports point one way: between kvjax's modules, from `kvjax_torch` to kvjax, and away from jax's private modules."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from support.layers import LAYERS, TORCH_LAYERS

ROOT = Path(__file__).parents[1]

# The files of WORKSPACE.md's table.
PRIVATE_JAX_MODULES = (
    "kvjax.kernels.compat",
    "kvjax.kernels.placement",
    "kvjax.kernels.registers",
    "kvjax.kernels.tiles",
    "kvjax.kernels.ptx",
    "kvjax.kernels.mla.exchange",
    "kvjax.kernels.warpgroups",
    "kvjax.kernels.lanes.words",
    "kvjax.kernels.lanes.warps",
    "kvjax.kernels.lanes.access",
    "kvjax.kernels.lanes.copies",
    "kvjax.binaries.compiling",
    "kvjax.binaries.lowering",
    "kvjax.binaries.module",
    "support.interpret_mode",
    "support.gpu_compile",
)
# What the bridge uses of kvjax: public names, and what it shares with the operations on JAX arrays.
PUBLIC_TO_TORCH = ("kvjax", "kvjax.kernels", "kvjax.binaries", "kvjax.ops.options", "kvjax.ops.route")
# An extra of its own: what needs transformers is imported by its users alone.
NEED_TRANSFORMERS = ("transformers", "transformers_cache")
# A command that needs torch imports its part in the bridge when it runs: importing it loads no torch.
COMMANDS = {"kvjax.cli.calibrate": "kvjax_torch.transformers.calibrate"}


class Module(NamedTuple):
    package: tuple[str, ...]
    tree: ast.Module
    nodes: tuple[ast.AST, ...]


Modules = Mapping[str, Module]


def parse_modules(folder: Path) -> Modules:
    """Every module under a package's folder, by its dotted name."""
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        package = path.parent.relative_to(folder.parent).parts
        name = ".".join(package if path.stem == "__init__" else (*package, path.stem))
        tree = ast.parse(path.read_text(), filename=str(path))
        modules[name] = Module(package, tree, tuple(ast.walk(tree)))
    return modules


def imported_names(module: Module) -> Iterator[str]:
    """What a module imports, wherever in it, relative imports made absolute; `from a.b import c` is `a.b.c`."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = module.package[: len(module.package) - node.level + 1] if node.level else ()
            source = ".".join([*prefix, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def defining_module(name: str, modules: Modules) -> str:
    """The module that an imported name stands for or lives in: its longest prefix that is a module."""
    parts = name.split(".")
    return next((found for end in range(len(parts), 0, -1) if (found := ".".join(parts[:end])) in modules), parts[0])


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def order_violations(package: Modules, layers: Sequence[str], modules: Modules) -> Iterator[str]:
    for name, module in package.items():
        layer = layer_of(name)
        if layer not in layers:
            yield f"{name} has no place in the layers: add {layer!r} after those that it imports"
            continue
        allowed = layers[: layers.index(layer) + 1]
        for imported in (defining_module(imported, modules) for imported in imported_names(module)):
            if imported in package and layer_of(imported) in layers and layer_of(imported) not in allowed:
                yield f"{name} imports {imported}, which is above it"


def bridge_imports(kvjax_modules: Modules, modules: Modules) -> Iterator[str]:
    for name, module in kvjax_modules.items():
        for imported in (defining_module(imported, modules) for imported in imported_names(module)):
            if imported.split(".")[0] in ("torch", "kvjax_torch") and imported != COMMANDS.get(name):
                yield f"{name} imports {imported}"


def circles(package: Modules) -> Iterator[str]:
    """Modules of one layer that import each other."""
    imports = {
        name: {
            used
            for used in (defining_module(used, package) for used in imported_names(module))
            if used in package and used != name and layer_of(used) == layer_of(name)
        }
        for name, module in package.items()
    }
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        yield " imports ".join(reversed(error.args[1]))


def non_public_imports(torch_modules: Modules, kvjax_modules: Modules) -> Iterator[str]:
    """What kvjax_torch and kvjax_vllm import of kvjax, or take from it as an attribute, beyond the public names."""
    for name, module in torch_modules.items():
        attributes = (
            f"kvjax.{node.attr}"
            for node in module.nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kvjax"
        )
        for used in (*imported_names(module), *attributes):
            public = defining_module(used, kvjax_modules) in PUBLIC_TO_TORCH and "._" not in used
            if used.split(".")[0] == "kvjax" and not public:
                yield f"{name} uses {used}, which is not public"


def private_jax_imports(modules: Modules) -> Iterator[str]:
    """Imports of what jax does not document: `_src`, interpreters, Mosaic GPU below Pallas, and jaxlib's MLIR."""
    for name, module in modules.items():
        for imported in imported_names(module) if name not in PRIVATE_JAX_MODULES else ():
            if re.match(r"jaxlib\b|jax\.experimental\.mosaic\b|jax\.interpreters\b|jax\.(.*\.)?_", imported):
                yield f"{name} imports {imported}"


def needs_transformers(module: str) -> bool:
    return module.split(".")[0] == "kvjax_torch" and layer_of(module) in NEED_TRANSFORMERS


def transformers_imports(modules: Modules) -> Iterator[str]:
    for name, module in modules.items():
        for imported in imported_names(module) if not needs_transformers(name) else ():
            if imported.split(".")[0] == "transformers":
                yield f"{name} imports {imported}"


def asserts(modules: Modules) -> Iterator[str]:
    for name, module in modules.items():
        for node in module.nodes:
            if isinstance(node, ast.Assert):
                yield f"{name}:{node.lineno} asserts; raise one of kvjax.errors"


MAX_FILE_LINES, MAX_PARAMETERS = 450, 7
# Packages whose public names have the signatures of contracts, of vLLM's operations or of transformers' interfaces.
CONTRACTS = ("kvjax", "kvjax_torch", "kvjax_torch.transformers_cache")
# What vLLM and transformers call: they say which parameters.
CALLED_FROM_OUTSIDE = (
    "kvjax_vllm.attention",
    "kvjax_vllm.backend",
    "kvjax_vllm.mla",
    "kvjax_torch.transformers.attention",
)


def public_names(modules: Modules) -> set[str]:
    """What the packages of contracts export by name."""
    return {
        name.rpartition(".")[2]
        for package in CONTRACTS
        if package in modules
        for name in imported_names(modules[package])
    }


def long_signatures(modules: Modules) -> Iterator[str]:
    """Functions with too many parameters to tell apart, where no caller's contract asks for them."""
    public = public_names(modules)
    for name, module in modules.items():
        if name in CALLED_FROM_OUTSIDE:
            continue
        for node in private_functions(module.tree, public):
            of = node.args
            own = [each.arg for each in (*of.posonlyargs, *of.args, *of.kwonlyargs) if each.arg not in ("self", "cls")]
            if len(own) > MAX_PARAMETERS:
                yield f"{name}:{node.lineno} has {len(own)} parameters, expected at most {MAX_PARAMETERS}"


def private_functions(tree: ast.AST, public: Collection[str]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods within, without those of public names and the methods of public classes."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (is_function or isinstance(node, ast.ClassDef)) and node.name in public:
            continue
        if is_function:
            yield node
        yield from private_functions(node, public)


# The bridge's windows and types of keyword arguments are those of the operations of the same names, with tensors.
SHARED_CLASS_NAMES = frozenset({"AttentionOptions", "RaggedOptions", "MLAOptions", "MLARaggedOptions", "ExactWindow"})


def shared_class_names(modules: Modules) -> Iterator[str]:
    """Classes of one name in several modules: a name means one thing."""
    found: dict[str, list[str]] = {}
    for name, module in modules.items():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and node.name not in SHARED_CLASS_NAMES:
                found.setdefault(node.name, []).append(f"{name}:{node.lineno}")
    for class_name, places in found.items():
        if len(places) > 1:
            yield f"{', '.join(places)} each have a class {class_name}"


NAME_QUANT_MODES = ("kvjax", "kvjax.dtypes", "kvjax.spec")


def quant_modes(modules: Modules) -> Iterator[str]:
    """What chooses by the granularity of scales, for which a dtype's row of the table has the answers."""
    for name, module in modules.items():
        if name in NAME_QUANT_MODES or name.startswith("kvjax_vllm"):  # vLLM's layers have a mode of their own
            continue
        for node in module.nodes:
            if getattr(node, "attr", getattr(node, "id", None)) in ("quant_mode", "KVQuantMode"):
                yield f"{name}:{node.lineno} asks for the quant_mode; ask kvjax.dtypes.DTypeInfo what it means"


def vllm_imports(modules: Modules) -> Iterator[str]:
    for name, module in modules.items():
        for imported in imported_names(module) if name.split(".")[0] != "kvjax_vllm" else ():
            if imported.split(".")[0] in ("vllm", "kvjax_vllm"):
                yield f"{name} imports {imported}"


def all_violations(kvjax: Path, interop: Path, support: Path) -> list[str]:
    kvjax_modules = parse_modules(kvjax)
    bridge = parse_modules(interop / "kvjax_torch")
    torch_modules = {**bridge, **parse_modules(interop / "kvjax_vllm")}
    both = {**kvjax_modules, **torch_modules}
    return [
        *order_violations(kvjax_modules, LAYERS, both),
        *order_violations(bridge, TORCH_LAYERS, both),
        *bridge_imports(kvjax_modules, both),
        *circles(kvjax_modules),
        *circles(bridge),
        *non_public_imports(torch_modules, kvjax_modules),
        *private_jax_imports({**both, **parse_modules(support)}),
        *transformers_imports(both),
        *vllm_imports(both),
        *asserts(both),
        *quant_modes(both),
        *long_signatures(both),
        *shared_class_names(both),
    ]


def test_the_sources_hold_every_rule():
    assert all_violations(ROOT / "kvjax", ROOT / "interop", ROOT / "tests" / "support") == []


def test_files_can_be_read_at_one_sitting():
    files = [path for package in ("kvjax", "interop") for path in (ROOT / package).rglob("*.py")]
    assert [path.name for path in files if len(path.read_text().splitlines()) > MAX_FILE_LINES] == []


def test_the_table_of_what_imports_private_jax_is_complete():
    row = r"^\| `((?:kernels|binaries|tests/support)/.*?)\.py` \|"
    paths = re.findall(row, (ROOT / "WORKSPACE.md").read_text(), re.MULTILINE)
    files = [path.removeprefix("tests/") if path.startswith("tests/") else f"kvjax/{path}" for path in paths]
    assert {file.replace("/", ".") for file in files} == {*PRIVATE_JAX_MODULES}


ALLOWED = {
    "kvjax/__init__.py": "from .cache import KVCache as KVCache",
    "kvjax/errors.py": "import jax",
    "kvjax/cache.py": "import kvjax.errors\nclass KVCache:\n    def f(self, a, b, c, d, e, f, g, h): ...",
    "kvjax/kernels/__init__.py": "from kvjax.kernels.write import build",
    "kvjax/kernels/write.py": "from . import compat\nfrom .. import errors\nfrom ..cache import KVCache",
    "kvjax/kernels/compat.py": "from jax._src import core",
    "kvjax/cli.py": "import kvjax\nfrom kvjax import cache",
    "kvjax/cli/calibrate.py": "def run():\n    from kvjax_torch.transformers.calibrate import run",
    "kvjax_torch/transformers/calibrate.py": "import transformers",
    "kvjax_torch/__init__.py": "import kvjax\nfrom kvjax import KVCache\nkvjax.KVCache",
    "kvjax/ops/__init__.py": "",
    "kvjax/ops/options.py": "",
    "kvjax_torch/ops.py": "from kvjax import kernels\nfrom kvjax.kernels import build\nfrom kvjax.ops.options import f",
    "kvjax/binaries/module.py": "from jax._src.lib.mlir import ir",
    "kvjax_torch/launch/loading.py": "from kvjax import binaries\nimport torch",
    "kvjax_torch/transformers/attention.py": "from transformers import AttentionInterface\nfrom kvjax_torch import ops",
    "kvjax_torch/transformers_cache.py": "from kvjax_torch.transformers import attention",
    "support/interpret_mode.py": "from jax._src import callback",
    "kvjax_vllm/step.py": "import kvjax_torch\nimport vllm\nfrom kvjax import KVCache",
}


def write_sources(folder: Path, sources: Mapping[str, str]) -> list[str]:
    for path, text in sources.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return all_violations(folder / "kvjax", folder, folder / "support")


def test_what_the_rules_allow(tmp_path: Path):
    assert write_sources(tmp_path, ALLOWED) == []


@pytest.mark.parametrize(
    ("path", "text", "violation"),
    [
        ("kvjax/errors.py", "from kvjax.cache import KVCache", "kvjax.errors imports kvjax.cache, which is above it"),
        ("kvjax/errors.py", "from kvjax import cache", "kvjax.errors imports kvjax.cache, which is above it"),
        ("kvjax/errors.py", "from .cache import KVCache", "kvjax.errors imports kvjax.cache, which is above it"),
        ("kvjax/errors.py", "import kvjax.cache", "kvjax.errors imports kvjax.cache, which is above it"),
        ("kvjax/errors.py", "from kvjax import KVCache", "kvjax.errors imports kvjax, which is above it"),
        ("kvjax/cache.py", "def f():\n    from .kernels.write import g", "kvjax.cache imports kvjax.kernels.write"),
        ("kvjax/kernels/write.py", "from .. import cli", "kvjax.kernels.write imports kvjax.cli, which is above it"),
        ("kvjax/__init__.py", "from . import cli", "kvjax imports kvjax.cli, which is above it"),
        ("kvjax/new/thing.py", "", "kvjax.new.thing has no place in the layers: add 'new'"),
        (
            "kvjax/kernels/compat.py",
            "from kvjax.kernels import write",
            "kvjax.kernels.write imports kvjax.kernels.compat imports kvjax.kernels.write",
        ),
        ("kvjax_torch/new.py", "", "kvjax_torch.new has no place in the layers: add 'new'"),
        (
            "kvjax_torch/launch/loading.py",
            "from kvjax_torch import ops",
            "kvjax_torch.launch.loading imports kvjax_torch.ops, which is above it",
        ),
        ("kvjax/cli.py", "import torch.nn", "kvjax.cli imports torch"),
        ("kvjax/cli.py", "from kvjax_torch import ops", "kvjax.cli imports kvjax_torch"),
        ("kvjax/cli/calibrate.py", "from kvjax_torch import ops", "kvjax.cli.calibrate imports kvjax_torch.ops"),
        ("kvjax_torch/ops.py", "from kvjax.cache import KVCache", "kvjax_torch.ops uses kvjax.cache.KVCache"),
        ("kvjax_torch/ops.py", "from kvjax import cache", "kvjax_torch.ops uses kvjax.cache, which is not public"),
        ("kvjax_torch/ops.py", "import kvjax\nkvjax.cache.f", "kvjax_torch.ops uses kvjax.cache, which is not public"),
        ("kvjax_torch/ops.py", "from kvjax.kernels import _f", "kvjax_torch.ops uses kvjax.kernels._f"),
        ("kvjax_torch/ops.py", "from kvjax.kernels.write import f", "kvjax_torch.ops uses kvjax.kernels.write.f"),
        ("kvjax_torch/ops.py", "from kvjax.ops.softmax import f", "kvjax_torch.ops uses kvjax.ops.softmax.f"),
        ("kvjax_torch/ops.py", "from jax._src import core", "kvjax_torch.ops imports jax._src.core"),
        ("kvjax/cache.py", "import jax._src.core", "kvjax.cache imports jax._src.core"),
        ("kvjax/cache.py", "from jax import _src", "kvjax.cache imports jax._src"),
        ("support/helpers.py", "from jax._src import core", "support.helpers imports jax._src.core"),
        ("kvjax/cache.py", "from jaxlib.mlir import ir", "kvjax.cache imports jaxlib.mlir.ir"),
        ("kvjax/cache.py", "from jax.interpreters import ad", "kvjax.cache imports jax.interpreters.ad"),
        (
            "kvjax/cache.py",
            "from jax.experimental.mosaic import gpu",
            "kvjax.cache imports jax.experimental.mosaic.gpu",
        ),
        ("kvjax_torch/ops.py", "import transformers", "kvjax_torch.ops imports transformers"),
        ("kvjax_torch/ops.py", "from transformers import Cache", "kvjax_torch.ops imports transformers.Cache"),
        ("kvjax_torch/ops.py", "from . import transformers_cache", "kvjax_torch.ops imports kvjax_torch.transformers_"),
        ("kvjax_torch/ops.py", "from .transformers import attention", "kvjax_torch.ops imports kvjax_torch.transform"),
        ("kvjax/cli.py", "from transformers import Cache", "kvjax.cli imports transformers.Cache"),
        ("kvjax/cache.py", "def f(x):\n    assert x", "kvjax.cache:2 asserts"),
        ("kvjax/cache.py", "def f(spec):\n    return spec.quant_mode", "kvjax.cache:2 asks for the quant_mode"),
        ("kvjax/cache.py", "def f(a, b, c, d, *, e, f, g, h): ...", "kvjax.cache:1 has 8 parameters, expected at most"),
        ("kvjax/cache.py", "class A:\n    def f(self, a, b, c, d, e, f, g, h): ...", "kvjax.cache:2 has 8 parameters"),
        ("kvjax/cache.py", "class A: ...\nclass A: ...", "kvjax.cache:1, kvjax.cache:2 each have a class A"),
    ],
)
def test_what_the_rules_catch(tmp_path: Path, path: str, text: str, violation: str):
    [found] = write_sources(tmp_path, {**ALLOWED, path: text})
    assert found.startswith(violation)


IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
import kvjax
print(*sys.modules)
for module in pkgutil.walk_packages(kvjax.__path__, "kvjax."):
    if module.name.rpartition(".")[2] != "__main__":
        importlib.import_module(module.name)
print(*sys.modules)
"""


def import_in_a_fresh_process(folder: Path) -> tuple[set[str], set[str]]:
    """The modules loaded after `import kvjax`, and after every submodule too, where any look for a device fails."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "JAX_PLATFORMS": "no_device_may_be_asked_for"}
    command = [sys.executable, "-P", "-W", "error", "-c", IMPORT_EVERYTHING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr)
    public, everything = done.stdout.splitlines()
    return set(public.split()), set(everything.split())


def test_importing_loads_no_torch_and_asks_for_no_device():
    public, everything = import_in_a_fresh_process(ROOT)
    assert "kvjax.cache" in public
    assert not public & {"safetensors", "tqdm", "kvjax.cli", "kvjax.demo"}
    assert not everything & {"torch", "kvjax_torch"}


def test_importing_the_torch_bridge_loads_no_transformers():
    pytest.importorskip("torch")
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "interop")))
    command = [sys.executable, "-P", "-c", "import sys, kvjax_torch; print(*sys.modules)"]
    environment = {**os.environ, "PYTHONPATH": folders}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    loaded = set(done.stdout.split())
    assert "kvjax_torch.ops" in loaded
    assert "transformers" not in loaded
    assert not [name for name in loaded if needs_transformers(name)]


@pytest.mark.parametrize("text", ["import jax; jax.devices()", "import jax.numpy as jnp; ZERO = jnp.zeros(1)"])
def test_an_import_that_asks_for_a_device_is_caught(tmp_path: Path, text: str):
    write_sources(tmp_path, {"kvjax/__init__.py": "", "kvjax/cache.py": text})
    with pytest.raises(RuntimeError, match="no_device_may_be_asked_for"):
        import_in_a_fresh_process(tmp_path)


def test_no_test_file_is_imported():
    """What several need is in `support`, so that a file of tests can be read, moved and run alone."""
    for path in (ROOT / "tests").rglob("*.py"):
        found = re.search(r"^\s*(?:from|import) test_\w+", path.read_text(), re.MULTILINE)
        assert found is None, f"{path}: {found}"
