"""Personalized federated learning: a low-rank global model plus a sparse personal part for every client.

federation = fedslr.load("digits", clients=20, split="dirichlet", alpha=0.1, seed=0)
result = fedslr.run(fedslr.FedSLR(), federation, model="cnn", rounds=30, clients_per_round=5)
result.summary, result.global_params, result.personal_model(3)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedslr.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """A public name or a module, once it is asked for.

        With them comes torch, which takes seconds to import: the command line answers ctrl-C before that.
        """
        from importlib import import_module
        from importlib.util import find_spec

        # Modules first: some are asked for while the public names are still being imported.
        if name.isidentifier() and not name.startswith("__") and find_spec(f"fedslr.{name}") is not None:
            return import_module(f"fedslr.{name}")
        if not name.startswith("__") or name in ("__all__", "__version__"):
            public = import_module("fedslr.public")
            if name in public.__all__ or name == "__all__":
                # From now on it is a name like any other.
                return globals().setdefault(name, getattr(public, name))
        raise AttributeError(f"module 'fedslr' has no attribute '{name}'")

    def __dir__() -> list[str]:
        from fedslr import public

        return sorted({*globals(), *public.__all__})
