"""Everything gin 0.5.0 swallows is an error here, and says what to change."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
import textwrap
from typing import Any, Literal, Protocol

from absl import logging
import gin
import pytest

from hgpo_jax import config
from hgpo_jax import gin_source
from hgpo_jax import run_record


class Estimator(Protocol):

  def __call__(self, x: int) -> int:
    """Doubles as the protocols of the package."""


@config.configurable
@dataclasses.dataclass(frozen=True)
class Toy:
  """Stands in for an estimator."""

  alpha: float = 1.0
  depth: int = 2
  mode: Literal['mean', 'sum'] = 'mean'
  limit: int | None = None
  betas: tuple[float, float] = (0.9, 0.95)
  names: tuple[str, ...] = ()
  weights: dict[str, float] = dataclasses.field(default_factory=dict)

  def __call__(self, x: int) -> int:
    return x


@config.configurable
@dataclasses.dataclass(frozen=True)
class Other:
  alpha: float = 1.0

  def __call__(self, x: int) -> int:
    return x


@config.configurable
@dataclasses.dataclass(frozen=True)
class Holder:
  """Stands in for an estimator over another; cannot be called itself."""

  base: Any = None


@config.configurable
@dataclasses.dataclass(frozen=True)
class Walk:
  """Stands in for the experiment."""

  estimator: Estimator
  second: Toy | None = None
  seed: int = config.REQUIRED
  iterations: int = config.may_change(3)
  anything: Any = None


@config.configurable
@dataclasses.dataclass(frozen=True)
class Careless:
  """Passes a value that the configuration may bind."""

  depth: int = 1

  def __post_init__(self):
    Toy(alpha=0.25)


@config.configurable
@dataclasses.dataclass(frozen=True)
class Schedule:
  """Says which of its fields are not read."""

  kind: str = 'constant'
  steps: tuple[int, ...] = dataclasses.field(default_factory=tuple)

  def unread(self):
    if self.kind == 'wrong':
      return {'step': 'kind'}
    return {} if self.kind == 'linear' else {'steps': 'kind'}


@config.configurable
@dataclasses.dataclass(frozen=True)
class Letters:
  """Has a field that is only called like what says so."""

  unread: int = 1


class External:

  def __init__(self, k=1):
    self.k = k


ExternalConfigurable = gin.external_configurable(External, 'External')

BASE = ('Walk.estimator = @Toy()', 'Walk.seed = 1')


def load(*bindings, base=BASE):
  return config.load([], [*base, *bindings], 'Walk')


def refused(*bindings, base=BASE):
  with pytest.raises(config.ConfigError) as error:
    load(*bindings, base=base)
  assert not gin.config_is_locked()
  assert not gin.config_str().strip()  # A failure leaves nothing bound.
  return str(error.value)


# Each row of the table of what gin refuses and what it swallows.


def test_unknown_configurable():
  text = refused('Toyy.alpha = 1')
  assert "'Toyy.alpha = 1': no configurable is called Toyy; did you" in text
  assert 'did you mean Toy?' in text
  assert 'the gin file must import the module that defines it' in text


def test_unknown_reference():
  assert 'no configurable is called Tooy; did you mean Toy?' in refused(
      'Walk.second = @Tooy()'
  )


def test_unknown_parameter():
  text = refused('Toy.alhpa = 1')
  assert 'Toy has no parameter alhpa; did you mean alpha? It takes:' in text
  assert 'alpha, depth, mode' in text


def test_binding_of_what_is_never_constructed():
  text = refused('Other.alpha = 2.0')
  assert text.startswith('bindings without effect:\n  Other.alpha = 2.0 (')
  assert 'Other is never constructed' in text
  assert 'Constructed were: Toy, Walk.' in text


def test_what_was_bound_of_a_replaced_part_goes_with_it():
  found = load(
      'Toy.alpha = 2.0',
      'Walk.second = @Toy()',
      'Walk.second = None',
      'Walk.estimator = @Other()',
      'Other.alpha = 3.0',
  )
  assert found.estimator == Other(3.0) and found.second is None
  assert 'Toy' not in gin.config_str()


def test_a_replaced_part_that_is_still_used_keeps_its_bindings():
  found = load(
      'Toy.alpha = 2.0', 'Walk.second = @Toy()', 'Walk.estimator = @Other()'
  )
  assert found.second.alpha == 2.0


def test_bindings_after_the_replacement_are_refused():
  text = refused('Walk.estimator = @Other()', 'Toy.alpha = 2.0')
  assert 'Toy is never constructed' in text


def test_binding_in_a_scope_that_is_never_entered():
  text = refused('eval/Toy.alpha = 2.0')
  assert 'eval/Toy.alpha = 2.0' in text
  assert 'Toy is never constructed in the scope eval' in text


def test_binding_that_every_scope_overrides():
  text = refused(
      'Walk.estimator = @train/Toy()',
      'Toy.alpha = 2.0',
      'train/Toy.alpha = 3.0',
  )
  assert 'Toy.alpha = 2.0' in text and 'train/Toy.alpha' not in text
  assert 'constructed only where another value is bound' in text


def test_external_class_called_directly():
  @config.configurable
  def make_directly():
    return External()

  del make_directly
  text = refused('External.k = 7', 'Walk.anything = @make_directly()')
  assert 'External.k = 7' in text
  assert 'External is never constructed' in text


def test_external_class_by_reference_is_consumed():
  walk = load('External.k = 7', 'Walk.anything = @External()')
  assert walk.anything.k == 7


def test_parameter_bound_and_passed_by_the_caller():
  text = refused(
      'Walk.anything = @Careless()', 'Toy.alpha = 0.5', 'Careless.depth = 3'
  )
  assert text.startswith('Toy.alpha is bound to 0.5 (bound at --gin_bindings')
  assert 'the code passes 0.25, which would win' in text


def test_caller_that_bypasses_gin_after_loading():
  load('Toy.alpha = 0.5')
  with pytest.raises(config.ConfigError, match='Toy.alpha is bound to 0.5'):
    Toy(alpha=2.0)


def test_replace_after_loading_is_deliberate():
  walk = load('Toy.alpha = 0.5')
  assert dataclasses.replace(walk.estimator, alpha=2.0).alpha == 2.0


def test_what_a_part_does_not_read():
  part = 'Walk.anything = @Schedule()'
  assert load(part, 'Schedule.steps = ()').anything.steps == ()
  linear = load(part, 'Schedule.steps = (1,)', "Schedule.kind = 'linear'")
  assert linear.anything.steps == (1,)
  assert refused(part, 'Schedule.steps = (1,)').endswith(
      " has no effect where Schedule.kind is 'constant'. Remove the binding or"
      ' bind the default, (); or change Schedule.kind'
  )
  assert refused(part, "Schedule.kind = 'wrong'").startswith(
      "Schedule.unread gives ['step'], which are no fields"
  )
  assert load('Walk.anything = @Letters()', 'Letters.unread = 2')


def test_wrong_type():
  text = refused('Toy.alpha = "1e-6"')
  assert text.startswith(
      "Toy.alpha: got '1e-6' (str), expected float (bound at --gin_bindings"
  )


@pytest.mark.parametrize(
    ('binding', 'text'),
    [
        ('Toy.depth = 2.0', 'Toy.depth: got 2.0 (float), expected int'),
        ('Toy.depth = True', 'Toy.depth: got True (bool), expected int'),
        ('Toy.alpha = True', 'Toy.alpha: got True (bool), expected float'),
        ('Toy.alpha = None', 'Toy.alpha: got None (NoneType), expected float'),
        ('Toy.alpha = 1e999', 'Toy.alpha: got inf (float), expected float of'),
        ('Toy.alpha = 1e39', 'expected float of size 1.2e-38 to 3.4e+38, or 0'),
        ('Toy.alpha = -1e-39', 'got -1e-39 (float), expected float of size'),
        (f'Toy.alpha = 1{"0" * 400}', ' (int), expected float of size'),
        (f'Toy.depth = {2**63}', ' (int), expected int of at most 64 bits'),
        ("Toy.mode = 'max'", "got 'max' (str), expected one of 'mean', 'sum'"),
        ("Toy.limit = '3'", "got '3' (str), expected int | None"),
        ('Toy.betas = (0.9,)', 'got (0.9,) (tuple), expected tuple[float, fl'),
        ("Toy.names = ('a', 1)", 'expected tuple[str, ...]'),
        ("Toy.names = 'ab'", "got 'ab' (str), expected tuple[str, ...]"),
        ("Toy.weights = {'a': 'b'}", 'expected dict[str, float]'),
        ("Walk.estimator = 'Toy'", "got 'Toy' (str), expected Estimator"),
        ('Walk.estimator = @Toy', 'write @Toy(), with the parentheses'),
        ('Walk.estimator = @Holder()', 'expected Estimator, something to call'),
        ('Walk.second = @Other()', 'expected Toy | None'),
    ],
)
def test_wrong_types(binding, text):
  assert text in refused(binding)


def test_types_are_checked_by_hand_too_and_ints_become_floats():
  assert isinstance(Toy(alpha=1).alpha, float)
  for wrong in ('1', float('nan')):
    with pytest.raises(config.ConfigError, match='Toy.alpha: got .* expected '):
      Toy(alpha=wrong)


def test_values_that_fit():
  walk = load(
      'Toy.alpha = 2',
      'Toy.betas = [0, 1]',
      'Toy.limit = 4',
      "Toy.names = ['a', 'b']",
      "Toy.weights = {'x': 1}",
      "Toy.mode = 'sum'",
  )
  toy = walk.estimator
  assert toy == Toy(2.0, 2, 'sum', 4, (0.0, 1.0), ('a', 'b'), {'x': 1.0})
  assert isinstance(toy.alpha, float) and isinstance(toy.betas, tuple)
  assert pickle.loads(pickle.dumps(toy)) == toy
  with pytest.raises(dataclasses.FrozenInstanceError):
    toy.alpha = 3.0


def test_same_key_twice_is_logged(monkeypatch):
  lines = []
  monkeypatch.setattr(logging, 'info', lambda f, *a: lines.append(f % a))
  assert load('Toy.alpha = 2', 'Toy.alpha = 3').estimator.alpha == 3
  assert lines == [
      "config: Toy.alpha = 3 (--gin_bindings 'Toy.alpha = 3') replaces 2 "
      "(--gin_bindings 'Toy.alpha = 2')"
  ]


@pytest.mark.parametrize(
    'binding', ['trian/Toy.depth = 5', 'Walk.second = @trian/Toy()']
)
def test_misspelt_scope(binding):
  text = refused(binding)
  assert 'has the unknown scope trian; did you mean train?' in text
  assert 'The scopes are: train, eval' in text


def test_scopes_give_each_its_values():
  walk = load(
      'Walk.estimator = @train/Toy()',
      'Walk.second = @eval/Toy()',
      'Toy.depth = 4',
      'train/Toy.alpha = 1.0',
      'eval/Toy.alpha = 0.4',
  )
  assert (walk.estimator.alpha, walk.second.alpha) == (1.0, 0.4)
  assert walk.estimator.depth == walk.second.depth == 4


def test_unused_macro():
  text = refused('LR = 1.0', 'LRR = 5.0', 'Toy.alpha = %LR')
  assert (
      'the macro LRR is defined but nothing uses it; did you mean LR?' in text
  )


def test_undefined_macro():
  text = refused('LR = 1.0', 'Toy.alpha = %LRR', 'Other.alpha = %LR')
  assert 'Toy.alpha uses the macro %LRR, which is never defined' in text
  assert 'did you mean LR? Define it: LRR = <value>' in text


def test_macro_defined_by_itself():
  text = refused('A = %B', 'B = %A', 'Toy.alpha = %A')
  assert 'is defined by itself' in text


def test_macros_resolve():
  assert load('A = %B', 'B = 3', 'Toy.alpha = %A').estimator.alpha == 3.0


def test_required_without_a_value():
  assert refused(base=BASE[:1]) == (
      'Walk.seed is required and has no value. Pass one: '
      '--gin_bindings "Walk.seed = <value>"'
  )


def test_required_macro_without_a_value():
  text = refused('Toy.depth = %gin.REQUIRED')
  assert text.startswith('Toy.depth is required (--gin_bindings')
  assert load('Toy.depth = %gin.REQUIRED', 'Toy.depth = 1').estimator.depth == 1


def test_missing_field():
  text = refused(base=BASE[1:])
  assert (
      "Walk: missing a required argument: 'estimator'. Bind it in gin" in text
  )


@pytest.mark.parametrize('value', ['true', 'yes', '1e', '(1', '%'])
def test_syntax(value):
  text = refused(f'Toy.alpha = {value}')
  assert 'A value is a Python literal (True, None, 0.5' in text
  assert ' at 0x' not in text


def test_binding_after_loading_is_refused():
  load()
  with pytest.raises(RuntimeError, match='locked'):
    gin.bind_parameter('Toy.alpha', 2.0)
  with pytest.raises(RuntimeError, match='locked'):
    gin.parse_config('Toy.alpha = 2.0')


def test_a_module_imported_after_loading_may_register():
  load()

  @config.configurable
  @dataclasses.dataclass(frozen=True)
  class Late:
    x: int = 1

  assert Late().x == 1
  assert gin.config_is_locked()


@pytest.mark.parametrize(
    'lines',
    [
        ['Holder.base = @Holder()'],
        ['Holder.base = (@Other(), @Walk())', 'Walk.estimator = @Holder()'],
    ],
)
def test_a_part_of_itself_is_refused_by_place(lines):
  text = refused('Walk.anything = @Holder()', *lines)
  assert 'makes a part of itself' in text and "--gin_bindings '" in text


def test_an_error_of_a_constructor_is_the_configurations():
  @config.configurable
  def fails():
    raise ValueError('a group of one has no spread')

  del fails
  assert 'a group of one has no spread' in refused('Walk.anything = @fails()')


# Files.


@pytest.fixture
def folder(tmp_path, monkeypatch):
  gin_folder = tmp_path / 'shipped'
  gin_folder.mkdir()
  monkeypatch.setattr(gin_source, 'SEARCH_PATH', (gin_folder,))
  monkeypatch.chdir(tmp_path)
  (gin_folder / 'base.gin').write_text(
      'Walk.estimator = @Toy()\nWalk.seed = 1\nToy.depth = 3\n'
  )
  return gin_folder


def test_files_are_found_from_anywhere_and_overridden_in_order(folder):
  (folder / 'runs').mkdir()
  (folder / 'runs/quick.gin').write_text("include 'base.gin'\nToy.depth = 4\n")
  assert config.load(['runs/quick.gin'], [], 'Walk').estimator.depth == 4
  walk = config.load(['runs/quick.gin'], ['Toy.depth = 5'], Walk)
  assert walk.estimator.depth == 5


def test_a_file_included_twice_is_read_once(folder):
  (folder / 'a.gin').write_text("include 'base.gin'\nToy.depth = 7\n")
  (folder / 'b.gin').write_text("include 'base.gin'\nToy.alpha = 2\n")
  (folder / 'c.gin').write_text("include 'a.gin'\ninclude 'b.gin'\n")
  assert config.load(['c.gin'], [], 'Walk').estimator.depth == 7


def test_a_file_that_is_given_is_read_with_all_it_includes(folder):
  (folder / 'a.gin').write_text("include 'base.gin'\nToy.depth = 7\n")
  (folder / 'b.gin').write_text("include 'base.gin'\nToy.alpha = 2\n")
  for last in ('base.gin', 'b.gin'):
    assert config.load(['a.gin', last], [], 'Walk').estimator.depth == 3
  assert config.load(['b.gin', 'a.gin'], [], 'Walk').estimator.depth == 7


def test_missing_file(folder):
  with pytest.raises(config.ConfigError) as error:
    config.load(['bse.gin'], [], 'Walk')
  text = str(error.value)
  assert '--gin_file: no gin file bse.gin; did you mean base.gin?' in text
  assert str(folder) in text


@pytest.mark.parametrize(
    ('content', 'text'),
    [
        ('\nToy.alfa = 1', 'x.gin:2: Toy has no parameter alfa'),
        ('\n\nToi.alpha = 1', 'x.gin:3: no configurable is called Toi'),
        ('\nWalk.second = @Toi()', 'x.gin:2: no configurable is called Toi'),
        ('\nToy.alpha = true', "x.gin:2: Failed to parse token 'true'"),
        ('\nToi:\n  alpha = 1', 'x.gin:2: no configurable is called Toi'),
        ('\neva/Toy.alpha = 1', 'x.gin:2: eva/Toy.alpha has the unknown sc'),
        ('\nLR = 1', 'x.gin:2: the macro LR is defined but nothing uses it'),
        (
            '\nToy.alpha = "a"',
            "got 'a' (str), expected float (bound at x.gin:2",
        ),
        ("\ninclude 'y.gin'", 'x.gin:2: no gin file y.gin'),
        ("\ninclude 'x.gin'", 'x.gin:2: x.gin includes itself'),
        ('\nimport no_such', 'x.gin:2: cannot import no_such: No module named'),
        ('\nimport no_such', 'must be in a folder of PYTHONPATH'),
    ],
)
def test_errors_name_file_and_line(folder, content, text):
  (folder / 'x.gin').write_text(content)
  with pytest.raises(config.ConfigError) as error:
    config.load(['base.gin', 'x.gin'], [], 'Walk')
  assert text in str(error.value)


def test_imports_register(folder, monkeypatch):
  monkeypatch.syspath_prepend(str(folder))
  (folder / 'late_module.py').write_text(textwrap.dedent("""
          import dataclasses
          from hgpo_jax import config

          @config.configurable
          @dataclasses.dataclass(frozen=True)
          class Imported:
            x: int = 1
      """))
  (folder / 'x.gin').write_text(
      'import late_module\nImported.x = 2\nWalk.anything = @Imported()\n'
  )
  assert config.load(['base.gin', 'x.gin'], [], 'Walk').anything.x == 2


def test_ambiguous_name():
  for module in ('a.b', 'a.c'):
    gin.register('Twin', module=module)(lambda x=1: x)
  assert 'Twin is ambiguous, it may be any of a.b.Twin, a.c.Twin' in refused(
      'Twin.x = 2'
  )
  assert load('a.b.Twin.x = 2', 'Walk.anything = @a.b.Twin()').anything == 2


# The run folder.


def test_what_is_written_and_that_it_makes_the_same_run(tmp_path):
  load('LR = 2', 'Toy.alpha = %LR', 'Walk.second = @eval/Toy()')
  record = config.write(tmp_path, seed=1, devices=['cpu:0'])
  before = config.fingerprint()
  assert json.loads((tmp_path / 'run.json').read_text()) == record
  assert record['fingerprint'] == before and record['seed'] == 1
  assert record['config']['Walk.estimator.alpha'] == 2.0
  attempt = record['attempts'][0]
  assert attempt['devices'] == ['cpu:0']
  assert attempt['versions']['gin-config'] == '0.5.0'
  assert attempt['versions']['jax']
  assert 'pytest' in attempt['command']
  assert 'Toy.depth = 2' in (tmp_path / 'operative.gin').read_text()
  config.load([str(tmp_path / 'config.gin')], [], 'Walk')
  assert config.fingerprint() == before


def test_commit_of_the_checkout(tmp_path):
  load()
  git = config.write(tmp_path)['attempts'][0]['git']
  assert git is None or (len(git['commit']) == 40 and 'dirty' in git)


def test_resume_adds_an_attempt(tmp_path):
  load()
  assert not config.check_resume(tmp_path)
  config.write(tmp_path)
  assert config.check_resume(tmp_path)
  assert len(config.write(tmp_path)['attempts']) == 2


def test_resume_with_another_configuration_is_refused(tmp_path):
  load()
  config.write(tmp_path)
  load('Toy.alpha = 2', 'Walk.iterations = 9')
  for call in (config.check_resume, config.write):
    with pytest.raises(config.ConfigError) as error:
      call(tmp_path)
    assert str(error.value) == (
        f'{tmp_path} holds a run of another configuration:\n'
        '  Walk.estimator.alpha: 1.0 in the run, 2.0 now\n'
        'Go on with the old values, or give another --run_dir'
    )


def test_resume_may_run_longer(tmp_path):
  load()
  config.write(tmp_path)
  load('Walk.iterations = 9')
  assert config.check_resume(tmp_path)


def test_resume_of_a_run_older_than_a_field(tmp_path):
  load()
  config.write(tmp_path)
  path = tmp_path / 'run.json'
  record = json.loads(path.read_text())
  del record['config']['Walk.estimator.alpha']
  path.write_text(json.dumps(record | {'fingerprint': 'of fewer fields'}))
  assert config.check_resume(tmp_path)
  load('Toy.alpha = 2')
  with pytest.raises(config.ConfigError) as error:
    config.check_resume(tmp_path)
  assert "Walk.estimator.alpha: '(absent)' in the run, 2.0 now" in str(
      error.value
  )


def test_resume_of_a_run_older_than_a_field_of_several_values(tmp_path):
  load("Toy.weights = {'a.b': 1.0}")
  config.write(tmp_path)
  path = tmp_path / 'run.json'
  record = json.loads(path.read_text())
  record['config'] = {
      key: value
      for key, value in record['config'].items()
      if 'betas' not in key and 'weights' not in key
  }
  path.write_text(json.dumps(record | {'fingerprint': 'of fewer fields'}))
  with pytest.raises(config.ConfigError) as error:
    config.check_resume(tmp_path)
  assert "weights['a.b']: '(absent)' in the run, 1.0 now" in str(error.value)
  assert 'betas' not in str(error.value)
  load('Toy.weights = {}')
  assert config.check_resume(tmp_path)
  load('Toy.betas = (0.9, 0.99)')
  with pytest.raises(config.ConfigError, match=r'betas\[1\]: .*, 0.99 now'):
    config.check_resume(tmp_path)


def test_resume_of_something_else_is_refused(tmp_path):
  load()
  (tmp_path / 'run.json').write_text('{"a": ')
  with pytest.raises(config.ConfigError, match='is not the record of a run'):
    config.check_resume(tmp_path)


def test_fingerprint_sees_every_value_and_no_spelling():
  load('Toy.alpha = 2')
  first = config.fingerprint()
  load('A = 2.0', 'Toy.alpha = %A')
  assert config.fingerprint() == first
  seen = {first}
  for binding in (
      'Toy.depth = 9',
      "Toy.mode = 'sum'",
      'Toy.limit = 0',
      'Toy.betas = (0.5, 0.95)',
      "Toy.names = ('a',)",
      'Walk.seed = 2',
      "Toy.weights = {'a': 1}",
      'Walk.second = @Toy()',
      'Walk.estimator = @Other()',
  ):
    load(binding)
    seen.add(config.fingerprint())
  assert len(seen) == 10


def test_nothing_is_loaded_yet():
  with pytest.raises(config.ConfigError, match='no configuration is loaded'):
    config.fingerprint()


def test_versions_import_nothing():
  code = (
      'import sys; from hgpo_jax import run_record; '
      'run_record._versions(); '
      'print([m for m in ("jax", "numpy", "transformers") if m in sys.modules])'
  )
  result = subprocess.run(
      [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert result.stdout == '[]\n'


def test_flatten_names_what_is_not_data():
  assert run_record.flatten(Walk(load, anything=dict, seed=1)) == {
      'Walk': 'Walk',
      'Walk.estimator': f'{__name__}.load',
      'Walk.second': None,
      'Walk.seed': 1,
      'Walk.iterations': 3,
      'Walk.anything': 'builtins.dict',
  }
