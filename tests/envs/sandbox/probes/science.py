"""Done inside a box with packages."""

import importlib.metadata
import os
import sys

import numpy
import sympy

x = sympy.Symbol("x")
assert str(sympy.integrate(sympy.cos(x), x)) == "sin(x)"
assert numpy.allclose(numpy.linalg.inv(numpy.eye(3) * 2), numpy.eye(3) / 2)
assert numpy.random.default_rng(0).integers(10, size=3).shape == (3,)
assert importlib.metadata.version("numpy") == numpy.__version__
assert os.access(numpy.__file__, os.R_OK)
assert not os.access(numpy.__file__, os.W_OK)
print(numpy.__version__, sympy.__version__, os.getuid(), sys.flags.isolated)
