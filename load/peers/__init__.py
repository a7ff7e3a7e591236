"""Other engines beside ours: how each is installed (`install_*`) and driven (`run_*`), for `load/bench/peers.py`.

Each lives in an environment of its own below the cache folder; its `run_*` is started with that environment's Python
as `python -m load.peers.run_NAME`, and speaks JSON lines (`line.py`). Nothing of a peer is ever imported into ours.
"""
