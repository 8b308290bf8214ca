"""Each rule of the house finds its own bad example, and leaves the good one alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture import code_rules, doc_rules, import_rules


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("arena/home.py", "from supertuner.data import stage"),
        ("arena/home.py", "import supertuner.data.staging.stage"),
        ("arena/home.py", "def f():\n    from supertuner.data.staging.stage import stage"),
        ("arena/home.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from supertuner.data import stage"),
        ("arena/home.py", "from supertuner import data"),
        ("arena/home.py", "from ..data import stage"),
        ("arena/home.py", "from .. import data"),
        ("data/sources/folder.py", "from ...tools import preview"),
        ("config/sources/load.py", "from supertuner.sinks import jsonlines"),
        ("sinks/console.py", "import importlib\nimportlib.import_module('supertuner.config.sources.load')"),
        ("tools/preview.py", "class A:\n    def f(self):\n        import supertuner.cli"),
    ],
)
def test_an_import_from_above_or_beside_is_found(path: str, source: str) -> None:
    assert import_rules.layer_violations(path, source) != []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("data/stage.py", "from supertuner.arena.home import Home\nfrom supertuner.core import errors"),
        ("data/sources/folder.py", "from ..stage import stage\nfrom supertuner.data.probe import image"),
        ("cli/__init__.py", "from supertuner.cli import run\nfrom supertuner.tools import preview"),
        ("core/host.py", "import os\nfrom supertuner.core.types import KIB"),
    ],
)
def test_an_import_from_below_or_of_the_same_room_is_fine(path: str, source: str) -> None:
    assert import_rules.layer_violations(path, source) == []
    assert import_rules.core_violations(path, source) == []


def test_a_command_that_goes_around_the_api_is_found() -> None:
    assert import_rules.cli_violations("cli/arena.py", "def f():\n    from supertuner.arena.home import Home") != []
    assert import_rules.cli_violations("cli/arena.py", "from supertuner.api import arenas") == []
    assert import_rules.cli_violations("tools/caches.py", "from supertuner.arena.home import Home") == []


def test_a_folder_without_a_level_is_found() -> None:
    assert import_rules.unknown_packages("utils/strings.py") != []
    assert import_rules.unknown_packages("data/sources/folder.py") == []


def test_core_importing_a_package_is_found() -> None:
    assert import_rules.core_violations("core/types.py", "def f():\n    import numpy") != []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("memory/hints/api.py", "from cuda.bindings import driver"),
        ("train/loop.py", "def f():\n    import torch.distributed as dist"),
        ("train/loop.py", "from torch import distributed"),
        ("data/stage.py", "import diffusers"),
    ],
)
def test_a_package_outside_its_one_place_is_found(path: str, source: str) -> None:
    assert import_rules.reserved_violations(path, source) != []


def test_a_package_in_its_one_place_is_fine() -> None:
    assert import_rules.reserved_violations("memory/cuda.py", "from cuda.bindings import driver") == []
    assert import_rules.reserved_violations("distributed/torch_process_group.py", "import torch.distributed") == []
    assert (
        import_rules.reserved_violations(
            "models/families/wan22/family.py", "def f():\n    from diffusers import WanPipeline"
        )
        == []
    )


def test_torch_at_the_top_of_a_light_file_is_found_and_inside_a_function_fine() -> None:
    assert import_rules.torch_violations("arena/reader.py", "import torch") != []
    assert import_rules.torch_violations("arena/reader.py", "def f():\n    import torch") == []
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"
    assert import_rules.torch_violations("arena/reader.py", typed) == []
    assert import_rules.torch_violations("config/sources/load.py", "def f():\n    from torch import Tensor") != []
    assert import_rules.torch_violations("models/families/wan22/family.py", "import torch") == []


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    f()\nexcept:\n    g()",
        "try:\n    f()\nexcept Exception as e:\n    log(e)  # said",
        "try:\n    f()\nexcept (ValueError, BaseException):\n    g()",
        "try:\n    f()\nexcept Exception:\n    def again():\n        raise",
        "try:\n    f()\nexcept OSError:\n    pass",
        "for x in y:\n    try:\n        f()\n    except OSError:\n        continue",
        "import contextlib\nwith contextlib.suppress(Exception):  # why not\n    f()",
        "from contextlib import suppress\n\nwith suppress(OSError):\n    f()",
    ],
)
def test_a_swallowed_error_is_found(source: str) -> None:
    assert code_rules.swallowed(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    f()\nexcept BaseException:\n    undo()\n    raise",
        "try:\n    f()\nexcept Exception as e:\n    raise Better() from e",
        "try:\n    f()\nexcept OSError:\n    pass  # the file is gone already, which is what we want",
        "try:\n    f()\nexcept OSError as error:\n    return Refused(error)",
    ],
)
def test_an_error_that_is_answered_is_fine(source: str) -> None:
    assert code_rules.swallowed(f"def h():\n    {source.replace(chr(10), chr(10) + '    ')}") == []


@pytest.mark.parametrize(
    "source",
    [
        "cache = {}",
        "CACHE: dict[str, int] = {}",
        "SEEN = set()",
        "names = ['a', 'b']",
        "import threading\n_LOCK = threading.Lock()",
        "client = Client()",
        "def f():\n    global x\n    x = 1",
        "TABLE = {'a': 1}\ndef f(k):\n    TABLE[k] = 2",
        "NAMES = ['a']\ndef f(k):\n    NAMES.append(k)",
    ],
)
def test_state_of_a_module_is_found(source: str) -> None:
    assert code_rules.global_state(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "TABLE = {'a': 1}",
        "__all__ = ['f']",
        "LIMIT = 3\nRATES = (1, 2)",
        "import typer\napp = typer.Typer(help='x')",
        "from typing import TypeVar\nT = TypeVar('T')",
        "def f():\n    found = []\n    found.append(1)\n    return found",
    ],
)
def test_constants_and_local_values_are_fine(source: str) -> None:
    assert code_rules.global_state(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nx = os.environ['A']",
        "import os\nos.getenv('A')",
        "from os import environ",
        "import os\nos.putenv('A', 'b')",
    ],
)
def test_a_look_at_the_environment_is_found(source: str) -> None:
    assert code_rules.environment_reads(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import dill",
        "torch.load(path)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.load(text)",
        "class Mine(yaml.Loader):\n    pass\nyaml.load(text, Loader=Mine)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_a_format_that_runs_code_is_found(source: str) -> None:
    assert code_rules.unsafe_loads(source) != []


def test_safe_loads_are_fine() -> None:
    strict = "class Strict(yaml.SafeLoader):\n    pass\nyaml.load(text, Loader=Strict)\n"
    assert code_rules.unsafe_loads(strict + "yaml.safe_load(text)\nnp.load(path, allow_pickle=False)") == []


def test_a_print_a_missing_docstring_and_a_giant_are_found() -> None:
    assert code_rules.prints("def f():\n    print('x')") != []
    assert code_rules.missing_docstring("import os") != []
    assert code_rules.oversized("x = 1\n" * 501) != []
    assert code_rules.oversized("def f():\n" + "    x = 1\n" * 80) != []
    assert code_rules.oversized("def f():\n" + "    x = 1\n" * 79) == []


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# The title, `here`\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md) [b](other.md#the-title-here) [c](#own)\n\n## Own\n\n```\n[no](gone.md)\n```\n")
    assert doc_rules.broken_links(page, tmp_path) == []
    page.write_text("[a](gone.md) [b](other.md#elsewhere) [c](../../etc/passwd) ![d](gone.png)\n\n[ref]: gone.md\n")
    assert len(doc_rules.broken_links(page, tmp_path)) == 5


def test_folders_that_import_each_other_are_found() -> None:
    fine = {
        "train/loop.py": {"train/offload/manager.py"},
        "train/offload/manager.py": {"plan/x.py"},
        "plan/x.py": set(),
    }
    assert import_rules.folder_cycles(fine) == []
    direct = {**fine, "train/offload/apply.py": {"train/memory.py"}}
    assert import_rules.folder_cycles(direct) == ["train: offload → own files → offload"]
    through = {"a/b/x.py": {"a/c/x.py"}, "a/c/x.py": {"a/d/x.py"}, "a/d/x.py": {"a/b/y.py"}}
    assert import_rules.folder_cycles(through) == ["a: b → c → d → b"]


def test_many_parameters_and_public_classes_are_found() -> None:
    wide = "def f(self, a, b, c, d, e, f, *, g, h): ..."
    assert code_rules.many_parameters(wide) != []
    assert code_rules.many_parameters(f"{wide}  # many parameters: a C function's arguments") == []
    assert code_rules.many_parameters("def f(self, a, b, c, d, e, *, f, g): ...") == []
    assert code_rules.public_classes("class A: ...\nclass _B: ...") == ["A"]


def test_a_family_or_an_expert_that_is_named_elsewhere_is_found() -> None:
    names = ("flux", "high_noise")
    for source in ("x = 'flux'", "x = ['a', 'high_noise_lr']", "settings.high_noise.rank", "high_noise = 1"):
        assert code_rules.named_families(source, names) != []
    for source in ("'A family, such as flux.'", "x = 'a flux of noise'"):
        assert code_rules.named_families(source, names) == []
