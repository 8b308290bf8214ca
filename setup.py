"""The parts of the build that are not data: two small libraries in C, each left out where there is no compiler."""

from pathlib import Path

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension("supertuner.core._many", ["supertuner/core/_many.c"], optional=True),
        Extension(
            "supertuner.memory._overflow",
            ["supertuner/memory/_overflow.c"],
            depends=[str(path) for path in Path("supertuner/memory").glob("_overflow*.h")],
            extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread", "-ldl"],
            optional=True,
        ),
    ]
)
