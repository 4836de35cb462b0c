"""`python -m pfedlms` is `pfedlms`."""

import sys

from pfedlms.cli import main

sys.exit(main())
