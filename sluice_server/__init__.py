"""The import namespace of everything that is installed; `sluice` is that of the Python SDK.

Its packages are links to the folders of the same names beside this one. In an sdist and in a wheel they are folders.
"""

__version__ = "0.1.0"
