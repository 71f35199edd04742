// The frame: tasks, tabs, pickers, keys.

function draw() {
  drawTasks();
  drawTabs();
  drawPicks();
  const view = byId('view');
  const place = [view.scrollLeft, view.scrollTop];
  const same = view.dataset.view === chosen.view;
  view.replaceChildren();
  view.dataset.view = chosen.view;
  view.setAttribute('aria-labelledby', `tab-${chosen.view}`);
  views[chosen.view].draw(view);
  view.scrollTo(...(same ? place : [0, 0]));
  drawDetail();
}

function drawTasks() {
  byId('tasks').replaceChildren(...tasks.map((task, i) => {
    const solved = task.episodes.filter((e) => e.success).length;
    return el('button', {
      class: 'task', 'aria-current': i === chosen.task, title: task.id,
      onclick: () => choose({ task: i, step: -1 }),
    },
      el('span', { class: 'kind' }, task.kind.replaceAll('_', ' ') || task.id),
      el('span', { class: 'row' },
        el('span', { class: 'pips', 'aria-hidden': 'true' }, ordered(task).slice(0, 16).map((e) =>
          el('i', { class: e.success ? 'won' : '' }))),
        el('span', {}, `${solved}/${task.episodes.length}`)));
  }));
}

function drawTabs() {
  const names = Object.keys(views);
  byId('tabs').replaceChildren(...names.map((name, i) => el('button', {
    role: 'tab', id: `tab-${name}`, 'aria-controls': 'view',
    'aria-selected': name === chosen.view, tabindex: name === chosen.view ? 0 : -1,
    onclick: () => choose({ view: name }, `#tab-${name}`),
    onkeydown: (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const next = names[(i + by + names.length) % names.length];
      choose({ view: next }, `#tab-${next}`);
    },
  }, views[name].title)));
}

function drawPicks() {
  const estimator = currentEstimator();
  const pick = (id, text, options, value, change) => el('label', {}, text, el('select', {
    id, onchange: (event) => choose(change(event.target.value), `#${id}`),
  }, options.map(([key, name]) =>
    el('option', { value: key, selected: key === value ? '' : null }, name))));
  byId('picks').replaceChildren(
    pick('estimator', 'Estimator', estimators.map((e) => [e.name, e.name]),
      estimator.name, (name) => ({ estimator: name, level: '' })),
    pick('level', 'Level', [['', 'advantage'], ...estimator.levels.map((l) => [l.name, l.name])],
      chosen.level, (name) => ({ level: name })));
  byId('estimator').title = estimator.doc + '\n' + Object.entries(estimator.fields)
    .map(([name, value]) => `${name} = ${value}`).join('\n');
}

const turn = (list, now, by) => list[(list.indexOf(now) + by + list.length) % list.length];

const keys = {
  j: () => choose({ task: chosen.task + 1, step: -1 }),
  k: () => choose({ task: chosen.task - 1, step: -1 }),
  e: () => choose({ estimator: turn(estimators.map((e) => e.name), chosen.estimator, 1) }),
  E: () => choose({ estimator: turn(estimators.map((e) => e.name), chosen.estimator, -1) }),
  l: () => choose({ level: turn(['', ...currentEstimator().levels.map((l) => l.name)], chosen.level, 1) }),
  t: () => setTheme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark'),
  '?': () => byId('keys').showModal(),
};
Object.keys(views).forEach((name, i) => { keys[String(i + 1)] = () => choose({ view: name }); });

document.addEventListener('keydown', (event) => {
  const typing = event.target.closest?.('select, input, dialog');
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
  event.preventDefault();
  const cell = document.activeElement?.closest('#grid, #graph')?.id;
  keys[event.key]();
  // What had the focus was drawn anew.
  if (cell) document.querySelector(`#${cell} [tabindex="0"]`)?.focus();
});

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem('theme', theme); } catch { /* Not for files. */ }
}

function start() {
  let theme = null;
  try { theme = localStorage.getItem('theme'); } catch { /* Not for files. */ }
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  setTheme(given.theme || theme || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'));
  for (const name of Object.keys(chosen)) if (given[name] !== undefined) chosen[name] = given[name];
  for (const name of ['task', 'step']) chosen[name] = Number(chosen[name]);
  byId('theme').addEventListener('click', keys.t);
  byId('help').addEventListener('click', keys['?']);
  const episodes = tasks.reduce((n, t) => n + t.episodes.length, 0);
  const note = [data.source, plural(tasks.length, 'task'), plural(episodes, 'episode'),
    plural(steps.task.length, 'step')];
  if (data.aborted) note.push(`${plural(data.aborted, 'aborted episode')} left out`);
  if (tasks.length === 1) note.push('one task: estimators that look at the whole batch see only it');
  byId('about').textContent = note.join(' · ');
  settle();
  draw();
  document.documentElement.dataset.ready = 'yes';
}

start();
