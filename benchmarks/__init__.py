"""Measurements behind the claims of the documentation: ``python -m benchmarks`` runs them and refreshes the tables.

Everything runs in one process on one thread, and times are CPU times of the process: on a machine that others use too,
they say more than wall time, and ratios between candidates that took turns say more than either.
"""

import os

# Read once, when numpy and torch are loaded: this package has to be imported before them.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
