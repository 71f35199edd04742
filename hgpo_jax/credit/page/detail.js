// The panel on the right: one step, under every estimator.

function drawDetail() {
  const row = chosen.step;
  const episode = episodeOf(row);
  const flags = [
    steps.valid[row] ? null : el('span', { class: 'bad' }, 'malformed'),
    steps.admissible[row] ? null : el('span', { class: 'bad' }, 'not admissible'),
    steps.reward[row] ? el('span', { class: 'good' }, `reward ${steps.reward[row]}`) : null,
  ].filter(Boolean);
  byId('detail').replaceChildren(
    el('h2', {}, `Episode ${episode.id}, step ${steps.step[row]}`),
    el('p', { class: 'soft' }, outcomeText(episode), ...flags.flatMap((f) => [' · ', f])),
    el('p', { class: 'action' }, steps.actions[steps.action[row]] || '(no action)'),
    el('h3', {}, 'What the agent saw'),
    el('div', { class: 'quote', tabindex: 0 }, steps.texts[steps.observation[row]]),
    el('h3', {}, 'What it led to'),
    el('div', { class: 'quote', tabindex: 0 }, steps.texts[steps.next[row]]),
    el('h3', {}, 'Credit under every estimator, each in its own scale'),
    el('div', { class: 'bars', id: 'bars' }, estimators.flatMap((e) => bars(e, row))),
    el('h3', {}, 'Other steps from the same state'),
    siblings(row),
  );
}

const outcomeText = (e) =>
  `${e.success ? 'solved' : `not solved (${e.end.replace('_', ' ')})`} after ${plural(e.steps, 'step')}`;

function bars(estimator, row) {
  const on = estimator.name === chosen.estimator;
  const lines = [bar(estimator, row, on ? 'on' : '', estimator.name, () =>
    choose({ estimator: estimator.name, level: '' }))];
  if (on) {
    for (const level of estimator.levels) {
      const label = `${level.name} ${among(level.size[row])}`;
      lines.push(bar(level, row, 'sub', label, () =>
        choose({ level: level.name })));
    }
  }
  return lines.flat();
}

function bar(found, row, kind, label, onclick) {
  const value = found.value[row];
  const width = found.scale ? Math.min(Math.abs(value) / found.scale, 1) * 50 : 0;
  return [
    el('button', { class: `plain ${kind}`, onclick }, label),
    el('div', { class: 'track' }, el('i', {
      class: value > 0 ? 'pos' : 'neg', style: `width:${width}%`,
    })),
    el('span', { class: `num ${kind}` }, signed(value)),
  ];
}

function siblings(row) {
  const rows = range(steps.task.length).filter((r) =>
    r !== row && steps.task[r] === steps.task[row] && steps.state[r] === steps.state[row]);
  if (!rows.length) {
    return el('p', { class: 'soft' }, 'None: no estimator can compare it at its state.');
  }
  return stepTable([row, ...rows]);
}

/** Steps with action, outcome and the chosen credit; a click goes there. */
function stepTable(rows) {
  const { value, scale } = series();
  const order = [...rows].sort((a, b) => value[b] - value[a]);
  return el('table', {}, el('tbody', {}, order.map((r) => {
    const episode = episodeOf(r);
    return el('tr', {},
      el('td', {}, el('button', {
        class: 'plain mono', onclick: () => choose({ step: r, task: steps.task[r] }),
      }, r === chosen.step ? '▸ ' : '', steps.actions[steps.action[r]] || '(no action)')),
      el('td', { class: episode.success ? 'good nowrap' : 'soft nowrap' },
        `${episode.success ? '✓' : '✗'} ep ${episode.id}`),
      el('td', { class: 'num' }, chip(value[r], scale)));
  })));
}

function chip(value, scale) {
  // At most half the colour, so that the figure stays legible.
  const found = colour(value, scale * 4, 'chip');
  return el('span', found, signed(value));
}
