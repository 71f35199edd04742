// Where estimators disagree: a matrix of pairs, and the steps behind a pair.

views.agreement = { title: 'Disagreement', draw: drawAgreement };

const MOST = 40; // Steps listed.

function drawAgreement(view) {
  const names = estimators.map((e) => e.name);
  const pair = currentPair(names);
  const { rank, opposed, silent } = data.agreement;
  const cell = (i, j) => {
    if (i === j) return el('td', {});
    const above = j > i;
    const value = above ? rank[i][j] : opposed[i][j];
    const shown = above ? colour(value, 2) : colour(-value, 0.6);
    const text = above ? value.toFixed(2).replace('-', '−') : percent(value).replace(' %', '');
    const what = above ? 'rank correlation' : 'opposite signs';
    return el('td', {}, el('button', {
      ...shown, title: `${names[i]}, ${names[j]}: ${what} ${text}`,
      'aria-label': `${names[i]}, ${names[j]}: ${what} ${text}`,
      'aria-pressed': pair[0] === i && pair[1] === j,
      'data-pair': `${i},${j}`,
      onclick: () => choose({ pair: `${names[i]},${names[j]}` }, `[data-pair="${i},${j}"]`),
    }, text));
  };
  const [a, b] = pair;
  view.append(
    el('h2', {}, 'Where estimators disagree'),
    el('p', { class: 'lead' },
      'Above the diagonal: rank correlation (Spearman) over all steps. Below: share of steps, in percent, that get opposite signs. Choose a pair to see its steps.'),
    el('table', { class: 'matrix', id: 'matrix' },
      el('thead', {}, el('tr', {}, el('th', {}), names.map((n) =>
        el('th', { class: 'top', scope: 'col' }, el('span', {}, n))))),
      el('tbody', {}, names.map((name, i) => el('tr', {},
        el('th', { scope: 'row', class: 'num' }, name), names.map((_, j) => cell(i, j)))))),
    el('h3', {}, `${names[a]} against ${names[b]}`),
    el('p', { class: 'lead' },
      `Rank correlation ${rank[a][b].toFixed(2)}; opposite signs on ${percent(opposed[a][b])} of the steps; on ${percent(silent[a][b])} one of the two says nothing. The steps furthest apart, in their own scales:`),
    pairTable(estimators[a], estimators[b]));
}

function currentPair(names) {
  const found = chosen.pair.split(',').map((n) => names.indexOf(n));
  if (found.length === 2 && found[0] >= 0 && found[1] >= 0 && found[0] !== found[1]) return found;
  const other = names.findIndex((n) => n !== chosen.estimator);
  return [names.indexOf(chosen.estimator), Math.max(other, 0)];
}

function pairTable(one, two) {
  const scaled = (e, r) => (e.scale ? e.value[r] / e.scale : 0);
  const apart = range(steps.task.length)
    .map((r) => [Math.abs(scaled(one, r) - scaled(two, r)), r])
    .sort((x, y) => y[0] - x[0])
    .slice(0, MOST)
    .filter(([distance]) => distance > 0);
  return el('table', { class: 'list', id: 'apart' },
    el('thead', {}, el('tr', {}, ['task', 'episode', 'step', 'action', one.name, two.name]
      .map((t, i) => el('th', { class: i > 3 ? 'num' : '', scope: 'col' }, t)))),
    el('tbody', {}, apart.map(([, r]) => {
      const episode = episodeOf(r);
      return el('tr', { onclick: () => choose({ step: r, task: steps.task[r] }) },
        el('td', {}, tasks[steps.task[r]].kind.replaceAll('_', ' ')),
        el('td', { class: episode.success ? 'good' : 'bad' },
          `${episode.success ? '✓' : '✗'} ${episode.id}`),
        el('td', { class: 'num' }, String(steps.step[r])),
        el('td', {}, el('button', { class: 'plain mono' }, steps.actions[steps.action[r]] || '(no action)')),
        el('td', { class: 'num' }, chip(one.value[r], one.scale)),
        el('td', { class: 'num' }, chip(two.value[r], two.scale)));
    })));
}
