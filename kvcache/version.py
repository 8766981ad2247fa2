"""The version of the package, for modules that the package itself imports.

A build writes the commit behind a version under development, as in ``0.1.0.dev0+g3f71afa2b`` (``setup.py``).
"""

__version__ = "0.1.0.dev0"
