import os

# Set before torch is imported: two test workers with two threads each would fight over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
