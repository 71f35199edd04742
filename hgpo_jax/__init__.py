"""Group-based reinforcement learning of language-model agents in JAX.

Importing this package imports neither jax nor an environment.
"""

__version__ = '0.1.0'
