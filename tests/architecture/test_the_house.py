"""The package keeps to the house's rules; each rule is shown to bite in test_the_rules_bite.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from supertuner.config import families
from tests.architecture import code_rules, doc_rules, import_rules

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "supertuner"
FILES = sorted(PACKAGE.rglob("*.py"))
OURS = [*FILES, *sorted((ROOT / "benchmarks").glob("*.py")), *sorted((ROOT / "scripts").glob("*.py"))]
HOLDERS = (
    # set_uvm_hint_override() of the GH200 forks has no object as a parameter
    ("supertuner/memory/hints/api.py", "_process is an object made at import"),
    # libraries replace functions of torch for the whole process while they load a model
    ("supertuner/models/library_guards.py", "_construction_lock is mutable state of the module"),
)
"""The only process-wide state."""
SKIPPED_FOLDERS = {".git", ".hypothesis", "node_modules", "quickstart", "runs"}


@pytest.fixture(scope="module", autouse=True)
def trees_are_given_back() -> Iterator[None]:
    yield
    code_rules.tree_of.cache_clear()


def relative(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def violations(files: list[Path], rule: Callable[[str], list[str]]) -> list[str]:
    return [f"{file.relative_to(ROOT)}: {line}" for file in files for line in rule(file.read_text())]


def hold(found: list[str]) -> None:
    """Nothing was found; if something was, all of it is shown, and nothing else."""
    if found:
        pytest.fail("\n".join(found), pytrace=False)


@pytest.mark.parametrize(
    "rule",
    [
        import_rules.layer_violations,
        import_rules.core_violations,
        import_rules.reserved_violations,
        import_rules.torch_violations,
        import_rules.cli_violations,
    ],
)
def test_packages_import_only_packages_below_them(rule: Callable[[str, str], list[str]]) -> None:
    hold([line for file in FILES for line in rule(relative(file), file.read_text())])


def test_every_folder_of_the_package_has_a_level() -> None:
    hold([line for file in FILES for line in import_rules.unknown_packages(relative(file))])


def test_no_two_folders_import_each_other() -> None:
    files = {relative(file): file.read_text() for file in FILES}
    modules = {
        f"supertuner/{path}".removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files
    }
    imported = {
        path: {modules[item.module] for item in import_rules.imports(path, text) if item.module in modules}
        for path, text in files.items()
    }
    hold(import_rules.folder_cycles(imported))


def test_no_folder_has_too_many_files() -> None:
    count = Counter(file.parent for file in FILES if file.name != "__init__.py")
    most = code_rules.FOLDER_FILES
    hold([f"{folder.relative_to(ROOT)}: {n} files, more than {most}" for folder, n in count.items() if n > most])


def test_a_public_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = {}
    for file in FILES:
        for name in code_rules.public_classes(file.read_text()):
            places.setdefault(name, []).append(relative(file))
    hold([f"{name}: {', '.join(files)}" for name, files in sorted(places.items()) if len(files) > 1])


def test_no_function_takes_too_many_parameters() -> None:
    hold(violations(FILES, code_rules.many_parameters))
    allowed = sum(file.read_text().count("# many parameters: ") for file in FILES)
    assert allowed <= 5, (
        f"{allowed} functions say why they take more than {code_rules.PARAMETERS} parameters; at most 5 may"
    )


def test_no_error_is_swallowed() -> None:
    hold(violations(OURS, code_rules.swallowed))


def test_no_module_keeps_state_but_two() -> None:
    found = violations(FILES, code_rules.global_state)
    allowed = [line for line in found for file, end in HOLDERS if line.startswith(file) and line.endswith(end)]
    assert len(allowed) == len(HOLDERS)
    hold([line for line in found if line not in allowed])


def test_the_environment_is_read_in_one_place() -> None:
    elsewhere = [file for file in FILES if relative(file) != "config/sources/environment.py"]
    hold(violations(elsewhere, code_rules.environment_reads))


def test_families_and_experts_are_named_in_their_folders_and_in_one_table() -> None:
    names = (*families.FAMILIES, *families.expert_names())
    own = ("models/families/", "config/families.py", "tools/quickstart.py")  # the quickstart trains one of them
    elsewhere = [file for file in FILES if not relative(file).startswith(own)]
    hold(violations(elsewhere, lambda source: code_rules.named_families(source, names)))


def test_nothing_loads_a_format_that_runs_code() -> None:
    # The benchmark of caches times torch.load, which is what others use; it reads files that it has just written.
    hold(violations([file for file in OURS if file.name != "bench_cache.py"], code_rules.unsafe_loads))


def test_only_the_command_line_prints() -> None:
    hold(violations([f for f in FILES if not relative(f).startswith("cli")], code_rules.prints))


def test_every_file_opens_with_what_it_is_for() -> None:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    hold(violations([*OURS, *tests], code_rules.missing_docstring))


def test_files_and_functions_stay_readable_in_one_go() -> None:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    hold(violations([*OURS, *tests], code_rules.oversized))


def test_every_link_in_the_docs_leads_somewhere() -> None:
    pages = [
        page
        for page in ROOT.rglob("*.md")
        if not any(part in SKIPPED_FOLDERS or part.startswith(".venv") for part in page.relative_to(ROOT).parts)
    ]
    assert pages
    hold([f"{page.relative_to(ROOT)}: {line}" for page in pages for line in doc_rules.broken_links(page, ROOT)])
