"""Imports point one way, heavy ones are lazy, and the public names are what they say.

The rules are read from the source, so that they hold for code that no test runs; then the interpreter is asked too.
"""

import ast
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

import lightning_dali

PACKAGE = Path(lightning_dali.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
WORKER_ROOMS = (
    "proxies",
    "media",
    "wire",
    "worker",
    "workers",
    "fetch",
    "repair",
    "collate",
    "structure",
    "sampling",
    "seeding",
    "failures",
    "padded",
    "testing",
)


class Rule(NamedTuple):
    """Who must not import what."""

    rooms: str
    """A pattern for the importing module, without `lightning_dali.`."""
    never: str
    """A pattern for the imported module."""
    why: str


RULES = [
    Rule(rf"({'|'.join(WORKER_ROOMS)})(\..*)?", r"nvidia(\..*)?", "workers hold no DALI"),
    Rule(
        r"(?!datamodules(\..*)?$|monitor$|testing\.fault_run$).*",  # fault_run: a Trainer in a process of its own
        r"(lightning|pytorch_lightning|lightning_fabric|lightning_utilities)(\..*)?",
        "only datamodules and monitor know Lightning",
    ),
    Rule(r".*", r"(hydra|pytest|psutil|sklearn)(\..*)?", "not a dependency of the package"),
    Rule(
        r"server|passes|delivery",
        r"(torchvision|torchaudio|PIL|av|soundfile)(\..*)?"
        r"|lightning_dali\.(proxies|media|modalities|datamodules)(\..*)?"
        r"|lightning_dali\.graph\.(?!spec).*",
        "the server knows no modality",
    ),
    Rule(
        r"graph(\..*)?",
        r"lightning_dali\.(datamodules|modalities|loader|server|passes|sources|fetch|workers?|sampling)(\..*)?|torch\.utils\.data(\..*)?",
        "the graph knows no dataset",
    ),
    Rule(
        r"(proxies|media)(\..*)?",
        r"lightning_dali\.(graph|server|passes|loader|datamodules)(\..*)?",
        "imports point one way",
    ),
    Rule(
        r"(?!cli(\..*)?$|testing).*", r"lightning_dali\.testing(\..*)?", "the package does not lean on its test helpers"
    ),
]


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def walk(node: ast.AST, skip: Callable[[ast.AST], bool]) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not skip(child):
            yield from walk(child, skip)


def imported(source: str, name: str, *, is_package: bool = False) -> set[str]:
    """What a module imports anywhere in it, except for type checkers; `from a import b` counts as a and a.b."""
    here = ["lightning_dali", *filter(None, name.split("."))]
    here = here if is_package else here[:-1]
    found = [_imported_by(node, here) for node in walk(ast.parse(source), is_type_checking)]
    return set().union(*found)


def _imported_by(node: ast.AST, here: Sequence[str] = ()) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()
    above = here[: len(here) - node.level + 1] if node.level else []
    base = ".".join([*above, *filter(None, [node.module])])
    return {base, *(f"{base}.{alias.name}" for alias in node.names)}


def cuda_at_import(source: str) -> list[int]:
    """Lines that touch torch.cuda when the module is imported."""
    bodies: set[ast.AST] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            bodies |= set(node.body)
        elif isinstance(node, ast.Lambda):
            bodies.add(node.body)
    found = []
    for node in walk(tree, lambda child: child in bodies or is_type_checking(child)):
        if isinstance(node, ast.Attribute):
            touches = ast.unparse(node).startswith("torch.cuda")
        else:
            touches = isinstance(node, ast.stmt) and "torch.cuda" in _imported_by(node)
        if touches:
            found.append(node.lineno)
    return found


# -- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda file: module_name(file) or "lightning_dali")
def test_imports_keep_the_rules(file: Path) -> None:
    name = module_name(file)
    modules = imported(file.read_text(), name, is_package=file.name == "__init__.py")
    for rule in RULES:
        if re.fullmatch(rule.rooms, name):
            broken = sorted(module for module in modules if re.fullmatch(rule.never, module))
            assert not broken, f"lightning_dali.{name} imports {broken}: {rule.why}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: module_name(file) or "lightning_dali")
def test_importing_touches_no_cuda(file: Path) -> None:
    assert not cuda_at_import(file.read_text())


def test_the_rules_see_what_they_forbid() -> None:
    source = """
import nvidia.dali.fn as fn
from .. import graph
from ..graph.image import x
if TYPE_CHECKING:
    import hydra
def f():
    from lightning import Trainer
"""
    assert imported(source, "proxies.image") == {
        "nvidia.dali.fn",
        "lightning_dali",
        "lightning_dali.graph",
        "lightning_dali.graph.image",
        "lightning_dali.graph.image.x",
        "lightning",
        "lightning.Trainer",
    }
    assert "lightning_dali.graph.spec" in imported("from .spec import A", "graph", is_package=True)
    lines = "x = torch.cuda.is_available()\nfrom torch import cuda\ndef f(a=torch.cuda.Stream()):\n  torch.cuda.init()"
    assert set(cuda_at_import(lines)) == {1, 2, 3}
    for name, module, is_broken in [
        ("proxies.image", "nvidia.dali", True),
        ("wire", "nvidia", True),
        ("graph.dali", "nvidia.dali", False),
        ("server", "lightning", True),
        ("datamodules.image", "lightning.pytorch", False),
        ("monitor", "lightning", False),
        ("monitoring", "lightning", True),
        ("loader", "lightning_dali.server", False),
        ("", "hydra", True),
        ("server", "lightning_dali.graph.image", True),
        ("server", "lightning_dali.graph.spec", False),
        ("server", "lightning_dali.graph.spec.Device", False),
        ("graph.image", "lightning_dali.datamodules", True),
    ]:
        hits = [rule for rule in RULES if re.fullmatch(rule.rooms, name) and re.fullmatch(rule.never, module)]
        assert bool(hits) == is_broken, (name, module, hits)


# -- what the interpreter says ---------------------------------------------------------------------------------------


def test_importing_the_package_imports_nothing_heavy(run_script: Callable[..., tuple[int, str, str]]) -> None:
    code = "import lightning_dali, sys; print(sorted({m.split('.')[0] for m in sys.modules}))"
    names = set(ast.literal_eval(run_script(code)[1]))
    assert "lightning_dali" in names
    assert not names & {
        "nvidia",
        "lightning",
        "pytorch_lightning",
        "torch",
        "torchvision",
        "torchaudio",
        "numpy",
        "PIL",
    }


def test_importing_the_package_takes_less_than_torch(run_script: Callable[..., tuple[int, str, str]]) -> None:
    def seconds(module: str) -> float:
        code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
        return float(run_script(code)[1])

    assert seconds("lightning_dali") < 1.5 * seconds("torch")


def test_worker_rooms_bring_no_dali_lightning_or_cuda(run_script: Callable[..., tuple[int, str, str]]) -> None:
    names = [module_name(file) for file in FILES if module_name(file).split(".")[0] in WORKER_ROOMS]
    names.remove("testing.fault_run")  # a program, with a Trainer
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(f"lightning_dali.{{name}}")
import torch
heavy = {{"nvidia.dali", "lightning", "pytorch_lightning", "hydra"}}
print(sorted(heavy & set(sys.modules)), torch.cuda.is_initialized())
"""
    rc, stdout, stderr = run_script(code)
    assert (rc, stdout) == (0, "[] False\n"), stderr


# -- the public names ------------------------------------------------------------------------------------------------


def test_public_names_exist_and_type_checkers_see_the_same() -> None:
    homes = lightning_dali._HOMES
    for name, home in homes.items():
        assert getattr(lightning_dali, name) is getattr(importlib.import_module(home), name)
    assert sorted(homes) == lightning_dali.__all__
    assert set(homes) <= set(dir(lightning_dali))
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    imports = [node for block in tree.body if is_type_checking(block) for node in ast.walk(block)]
    static = {alias.asname: node.module for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert static == homes, "the TYPE_CHECKING imports and _HOMES differ"


def test_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'ImagesDataModule'; it has .*BadSampleError"):
        lightning_dali.ImagesDataModule  # noqa: B018


def test_cheap_names_stay_cheap(run_script: Callable[..., tuple[int, str, str]]) -> None:
    code = "from lightning_dali import BadSample; import sys; print({'torch', 'numpy'} & set(sys.modules))"
    assert run_script(code)[1] == "set()\n"
