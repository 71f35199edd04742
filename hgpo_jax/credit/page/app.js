// What all views share: the data, what is chosen, and small helpers.

const data = JSON.parse(document.getElementById('data').textContent);
const { steps, tasks, estimators } = data;
const byId = (id) => document.getElementById(id);
const views = {}; // Name -> {title, draw(view)}; in the order of the tabs.

// What is chosen; it is also the fragment of the address.
const chosen = {
  view: 'episodes', task: 0, estimator: '', level: '', step: -1, edge: 'edge',
  pair: '',
};

const estimatorOf = (name) => estimators.find((e) => e.name === name);
const currentEstimator = () => estimatorOf(chosen.estimator);

/** The values that are coloured: {value, scale, size}, size only of levels. */
function series() {
  const estimator = currentEstimator();
  return estimator.levels.find((l) => l.name === chosen.level) || estimator;
}

/** Changes what is chosen and draws again. */
function choose(changes, focus) {
  Object.assign(chosen, changes);
  settle();
  history.replaceState(null, '', '#' + new URLSearchParams(chosen));
  draw();
  if (focus) document.querySelector(focus)?.focus();
}

/** Makes what is chosen consistent, whatever the address said. */
function settle() {
  const inside = (n, size) => Math.min(Math.max(Number(n) || 0, 0), size - 1);
  if (!views[chosen.view]) chosen.view = 'episodes';
  if (!currentEstimator()) chosen.estimator = firstEstimator();
  const levels = currentEstimator().levels.map((l) => l.name);
  if (!levels.includes(chosen.level)) chosen.level = '';
  chosen.task = inside(chosen.task, tasks.length);
  const step = inside(chosen.step, steps.task.length);
  const fits = chosen.step >= 0 && steps.task[step] === chosen.task;
  chosen.step = fits ? step : tasks[chosen.task].episodes[0].first;
}

const firstEstimator = () => (estimatorOf('hgpo') || estimators[0]).name;

/** An element; children may be strings, null is left out. */
function el(tag, attributes = {}, ...children) {
  const svg = ['svg', 'g', 'path', 'circle', 'rect', 'text', 'title'];
  const node = svg.includes(tag)
    ? document.createElementNS('http://www.w3.org/2000/svg', tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((c) => c !== null));
  return node;
}

/** class and style that colour a signed value: {class, style}. */
function colour(value, scale, more = '') {
  const sign = value > 0 ? 'pos' : value < 0 ? 'neg' : 'zero';
  // A square root, so that small values are told from none.
  const full = scale > 0 ? Math.min(Math.sqrt(Math.abs(value) / scale), 1) : 0;
  return {
    class: `v ${sign} ${more}`,
    style: `--p:${Math.round(12 + 88 * full)}%`,
  };
}

const signed = (x) =>
  x === 0 ? '0' : (x > 0 ? '+' : '−') + Math.abs(x).toFixed(
    Math.abs(x) >= 9.995 ? 1 : 2);
const among = (size) => (size > 1 ? `of ${size}` : size ? 'alone' : '–');
const percent = (x) => (x === 0 ? '0' : x < 0.001 ? '<0.1' :
  (100 * x).toFixed(x < 0.1 ? 1 : 0)) + ' %';
const plural = (n, word) => `${n} ${word}${n === 1 ? '' : 's'}`;
const range = (n) => [...Array(n).keys()];

function legend(scale) {
  return el('div', { class: 'legend' },
    signed(-scale), el('span', { class: 'ramp' }), signed(scale),
    el('span', {}, el('i', { class: 'key v zero' }), ' exactly 0'));
}

/** Steps of the task of an episode, as rows. */
const rowsOf = (episode) => range(episode.steps).map((i) => episode.first + i);
const episodeOf = (row) => tasks[steps.task[row]].episodes.find(
  (e) => row >= e.first && row < e.first + e.steps);
