"""The parts of the build that are not data: three small libraries in C, each left out where there is no compiler."""

from pathlib import Path

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension("supertuner.core._bulk_io", ["supertuner/core/_bulk_io.c"], optional=True),
        Extension(
            "supertuner.optim.automagic._automagic",
            ["supertuner/optim/automagic/_automagic.c"],
            # No multiply-add: the result is the same on every CPU.
            extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"],
            extra_link_args=["-lm"],
            optional=True,
        ),
        Extension(
            "supertuner.memory.overflow_allocator._overflow",
            ["supertuner/memory/overflow_allocator/_overflow.c"],
            depends=[str(path) for path in Path("supertuner/memory/overflow_allocator").glob("_overflow*.h")],
            extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread", "-ldl"],
            optional=True,
        ),
    ]
)
