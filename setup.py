"""Installs hgpo_jax; constraints.txt has the versions that are tested."""

import pathlib

import setuptools

_ROOT = pathlib.Path(__file__).parent

_NOTEBOOK = ['ipykernel>=6.29', 'nbclient>=0.10', 'nbformat>=5.10']

setuptools.setup(
    name='hgpo-jax',
    version='0.1.0',
    description=(
        'Group-based, step-level reinforcement learning of language-model '
        'agents in JAX'
    ),
    long_description=(_ROOT / 'README.md').read_text()
    if (_ROOT / 'README.md').exists()
    else '',
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    python_requires='>=3.11',
    # The gin files travel inside the package, so that
    # --gin_file=runs/quickstart.gin works without a checkout.
    packages=[
        *setuptools.find_packages(include=['hgpo_jax', 'hgpo_jax.*']),
        'hgpo_jax.gin_files',
    ],
    package_dir={'hgpo_jax.gin_files': 'gin'},
    package_data={
        'hgpo_jax.gin_files': ['*.gin', '*/*.gin'],
        'hgpo_jax.assets': ['*/*'],
        'hgpo_jax.credit': ['page/*'],
    },
    install_requires=[
        'absl-py>=2.1',
        # The engine of the household games. The pair is tested together;
        # other versions speak another grammar.
        'alfworld==0.4.2',
        'textworld==1.7.0',
        'fast-downward-textworld==20.6.4',
        'chex>=0.1.90',
        'flax>=0.12.0',
        'gin-config==0.5.0',
        'jax>=0.10.0',
        'numpy>=2.0',
        'optax>=0.2.5',
        'orbax-checkpoint>=0.11.30',
        'safetensors>=0.5',
        'tensorboardX>=2.6.2',
        'tokenizers>=0.22',
        'tqdm>=4.66',
        'transformers>=5.0',
    ],
    extras_require={
        'test': ['pytest>=8.0', 'hypothesis>=6.100', *_NOTEBOOK],
        'tpu': ['jax[tpu]>=0.10.0'],
        'cuda': ['jax[cuda12]>=0.10.0'],
        # Nothing of their own: the engines that launch jobs live outside of
        # this environment.
        'webshop': [],
        'launch': [],
        'notebooks': _NOTEBOOK,
        'ray': ['ray>=2.40'],
        'wandb': ['wandb>=0.19'],
        'dev': ['pre-commit>=4.0', 'pyink>=24.10', 'isort>=5.13', 'ruff>=0.9'],
    },
)
