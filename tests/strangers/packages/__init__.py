"""Models and training code that ship in packages, as they stand; run by ``make test-strangers``."""

from strangers.packages.torchvision_operators import import_torchvision

import_torchvision()
