"""Lockstep's shared-memory backend for torch.distributed.

Importing this package registers the backend, so that `init_process_group("shm")` and "cpu:shm" work.
"""

import torch
import torch.distributed

from . import _build

# Checked before the compiled module is loaded: with another torch it would fail with a missing symbol, or load a second torch.
if torch.__version__ != _build.torch_version:
    raise ImportError(
        f"lockstep_torch was built for torch {_build.torch_version}, this is torch {torch.__version__} "
        f"({torch.__path__[0]}). Build it for this one: make python LOCKSTEP_PYTHON=<this Python>"
    )

from . import _lockstep_torch  # noqa: E402


def _create(options, _backend_options):
    # A mixed group ("cpu:shm,cuda:nccl") hands every backend the same pg_options: they are for somebody else.
    return _lockstep_torch.create(options)


torch.distributed.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])
