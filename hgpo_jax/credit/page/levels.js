// How many steps a step is compared with, estimator by estimator.

views.levels = { title: 'Groups', draw: drawLevels };

const SIZES = ['none', '1', '2', '3–4', '5–8', '9–16', '17+'];

function drawLevels(view) {
  view.append(
    el('h2', {}, 'Group sizes by level'),
    el('p', { class: 'lead' },
      'Of all steps of the file, how many others each level compares a step with. A step that is alone, or whose group is all the same, gets nothing from that level.'),
    el('div', { class: 'legend', style: 'margin-bottom:14px' }, 'steps in the group',
      SIZES.map((name, i) => el('span', {}, el('i', {
        class: 'key', style: i ? `background:color-mix(in oklab,var(--value) ${shade(i)}%,var(--cell))`
          : 'box-shadow:inset 0 0 0 1px var(--line)',
      }), ` ${name}`))),
    el('table', { id: 'levels' },
      el('thead', {}, el('tr', {}, ['estimator', 'level', 'group size', 'alone', 'all the same', 'no signal']
        .map((t, i) => el('th', { class: i > 2 ? 'num' : '', scope: 'col' }, t)))),
      el('tbody', {}, estimators.flatMap(levelRows))));
}

const shade = (i) => 8 + 15 * i;

function levelRows(estimator) {
  const pick = (level) => () => choose({ estimator: estimator.name, level, view: 'episodes' });
  const rows = estimator.levels.map((level, i) => el('tr', { class: i ? '' : 'first' },
    el('th', { scope: 'row' }, i ? '' : estimator.name),
    el('td', {}, el('button', { class: 'plain', onclick: pick(level.name) }, level.name)),
    el('td', {}, el('div', { class: 'stack', role: 'img', 'aria-label': sizesText(level) },
      level.bars.map((share, k) => (share ? el('i', {
        class: k ? '' : 'none', style: `flex:${share};--p:${shade(k)}%`,
        title: `${SIZES[k]}: ${percent(share)}`,
      }) : null)))),
    el('td', { class: 'num' }, percent(level.alone)),
    el('td', { class: 'num' }, percent(level.degenerate)),
    el('td', { class: 'num' }, percent(level.silent))));
  return [...rows, el('tr', {}, el('td', {}),
    el('td', {}, el('button', { class: 'plain', onclick: pick('') }, el('b', {}, 'advantage'))),
    el('td', {}), el('td', {}), el('td', {}),
    el('td', { class: 'num' }, el('b', {}, percent(estimator.silent))))];
}

const sizesText = (level) => level.bars.map((share, k) =>
  `${SIZES[k]}: ${percent(share)}`).join(', ');
