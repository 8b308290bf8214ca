"""The one part of the build that is not data: a few lines of C, left out where there is no compiler."""

from setuptools import Extension, setup

setup(ext_modules=[Extension("supertuner.core._many", ["supertuner/core/_many.c"], optional=True)])
