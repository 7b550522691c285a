"""``python -m halfstep`` is ``halfstep``."""

import sys

from halfstep.cli.main import main

sys.exit(main())
