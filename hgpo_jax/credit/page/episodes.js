// Episodes as rows of coloured steps; and the same under every estimator.

views.episodes = { title: 'Episodes', draw: drawEpisodes };
views.compare = { title: 'Compare', draw: drawCompare };

function drawEpisodes(view) {
  const { value, scale } = series();
  const task = tasks[chosen.task];
  const longest = Math.max(...task.episodes.map((e) => e.steps));
  const state = steps.state[chosen.step];
  const grid = el('div', {
    class: 'grid', id: 'grid', role: 'grid', 'aria-label': 'Steps of the episodes',
    style: 'grid-template-columns:auto auto', onkeydown: moveInGrid,
  });
  grid.append(el('span', {}), el('div', { class: 'cells', 'aria-hidden': 'true' },
    range(longest).map((i) => el('span', { class: 'axis', style: 'width:23px' },
      i % 5 === 0 ? String(i) : ''))));
  let before = null;
  for (const episode of ordered(task)) {
    if (before && before.success !== episode.success) {
      grid.append(el('span', { class: 'gap' }), el('span', {}));
    }
    before = episode;
    grid.append(episodeName(episode), el('div', { class: 'cells', role: 'row' },
      rowsOf(episode).map((row) => {
        const kind = !steps.valid[row] ? 'bad' : !steps.admissible[row] ? 'off' : '';
        const same = steps.state[row] === state && row !== chosen.step ? 'same' : '';
        const action = steps.actions[steps.action[row]];
        const label = `step ${steps.step[row]}: ${action}, ${signed(value[row])}`;
        return el('button', {
          ...colour(value[row], scale, `cell ${kind} ${same}`),
          role: 'gridcell', 'data-row': row, title: label, 'aria-label': label,
          tabindex: row === chosen.step ? 0 : -1,
          'aria-selected': row === chosen.step,
          onclick: () => choose({ step: row }, `[data-row="${row}"]`),
        });
      })));
  }
  view.append(
    el('div', { class: 'intro' }, taskHeading(task), legend(scale)),
    grid,
    el('p', { class: 'lead', style: 'margin-top:16px' },
      el('span', { class: 'key', style: 'box-shadow:0 0 0 2px var(--value)' }),
      ' starts in the same state as the chosen step. A dot marks an action that was not admissible, × one that was malformed.'),
    levelCards(task),
    episodeTable(episodeOf(chosen.step)));
}

/** The parts of the chosen estimator as small pictures; a click shows one. */
function levelCards(task) {
  const estimator = currentEstimator();
  const parts = [{ ...estimator, name: 'advantage', key: '' },
    ...estimator.levels.map((l) => ({ ...l, key: l.name }))];
  return el('div', {},
    el('h3', {}, `${estimator.name}, level by level`),
    el('div', { class: 'cards small' }, parts.map((part) => el('button', {
      class: `card ${part.key === chosen.level ? 'on' : ''}`, 'data-level': part.key,
      'aria-pressed': part.key === chosen.level,
      onclick: () => choose({ level: part.key }, `[data-level="${part.key}"]`),
    },
      el('div', { class: 'top' }, el('b', {}, part.name),
        el('span', { class: 'soft' }, part.silent ? `${percent(part.silent)} silent` : '')),
      miniature(part, task)))));
}

/** The chosen episode as a table: what was done, and what each level says. */
function episodeTable(episode) {
  const estimator = currentEstimator();
  const head = ['step', 'action', 'advantage', ...estimator.levels.map((l) => l.name)];
  return el('div', {},
    el('h3', {}, `Episode ${episode.id}, ${outcomeText(episode)}`),
    el('table', { class: 'list', id: 'episode' },
      el('thead', {}, el('tr', {}, head.map((t, i) =>
        el('th', { scope: 'col', class: i === 1 ? '' : 'num' }, t)))),
      el('tbody', {}, rowsOf(episode).map((row) => el('tr', {
        class: row === chosen.step ? 'on' : '', onclick: () => choose({ step: row }),
      },
        el('td', { class: 'num soft' }, String(steps.step[row])),
        el('td', { class: 'mono' }, steps.actions[steps.action[row]] || '(no action)'),
        el('td', { class: 'num' }, chip(estimator.value[row], estimator.scale)),
        estimator.levels.map((level) => el('td', { class: 'num' },
          el('span', { class: 'soft of' }, among(level.size[row]), ' '),
          chip(level.value[row], level.scale))))))));
}

const ordered = (task) => [...task.episodes].sort((a, b) =>
  b.success - a.success || a.steps - b.steps || a.id - b.id);

function taskHeading(task) {
  const solved = task.episodes.filter((e) => e.success).length;
  return el('div', {},
    el('h2', {}, task.kind.replaceAll('_', ' ')),
    el('p', { class: 'lead' },
      `${solved} of ${plural(task.episodes.length, 'episode')} solved it · `,
      el('span', { class: 'mono' }, task.id)));
}

function episodeName(episode) {
  return el('div', { class: 'name', role: 'rowheader' },
    el('span', {}, `episode ${episode.id}`),
    el('b', { class: episode.success ? 'good' : 'bad', title: outcomeText(episode) },
      episode.success ? '✓' : '✗'));
}

function moveInGrid(event) {
  const row = chosen.step;
  const episode = episodeOf(row);
  const order = ordered(tasks[chosen.task]);
  const place = order.indexOf(episode);
  const last = episode.first + episode.steps - 1;
  const across = (by) => {
    const other = order[place + by];
    return other ? other.first + Math.min(row - episode.first, other.steps - 1) : row;
  };
  const target = {
    ArrowLeft: () => Math.max(row - 1, episode.first),
    ArrowRight: () => Math.min(row + 1, last),
    ArrowUp: () => across(-1),
    ArrowDown: () => across(1),
    Home: () => episode.first,
    End: () => last,
  }[event.key];
  if (!target) return;
  event.preventDefault();
  choose({ step: target() }, `[data-row="${target()}"]`);
}

function drawCompare(view) {
  const task = tasks[chosen.task];
  const mine = estimators.findIndex((e) => e.name === chosen.estimator);
  view.append(
    taskHeading(task),
    el('p', { class: 'lead' },
      'The same steps under every estimator, each in its own scale. ρ is the rank correlation with ',
      el('b', {}, chosen.estimator), ' over all steps of the file.'),
    el('div', { class: 'cards' }, estimators.map((estimator, index) => el('button', {
      class: `card ${index === mine ? 'on' : ''}`,
      'aria-pressed': index === mine, title: estimator.doc,
      onclick: () => choose({ estimator: estimator.name, level: '' }),
    },
      el('div', { class: 'top' }, el('b', {}, estimator.name),
        el('span', { class: 'soft' }, index === mine ? 'chosen'
          : `ρ ${data.agreement.rank[mine][index].toFixed(2)}`)),
      miniature(estimator, task)))));
}

function miniature(estimator, task) {
  return el('div', { class: 'mini', 'aria-hidden': 'true' },
    ordered(task).map((episode) => el('div', {}, rowsOf(episode).map((row) =>
      el('i', colour(estimator.value[row], estimator.scale,
        row === chosen.step ? 'here' : ''))))));
}
