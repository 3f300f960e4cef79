"""For all tests: one thread per process, as ranks have; set before torch is imported.

Setting it by torch.set_num_threads makes a thread pool that does not survive a fork.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
