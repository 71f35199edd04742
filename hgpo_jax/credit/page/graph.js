// The states of a task as a graph: values of nodes, credit of edges.

views.graph = { title: 'State graph', draw: drawGraph };

const WIDE = 126;
const HIGH = 66;
const ABOVE = 96; // Room for the arcs of edges that go back.
const TERMS = {
  edge: 'change of value, against all steps of the task',
  node: 'value reached, against steps from the same state',
};

function drawGraph(view) {
  const task = tasks[chosen.task];
  const { nodes, edges } = task.graph;
  if (!TERMS[chosen.edge]) chosen.edge = 'edge';
  const rows = nodes.map((n) => n.row);
  const low = Math.min(...rows);
  const columns = [...new Set(nodes.map((n) => n.column))].sort((a, b) => a - b);
  const at = (n) => [70 + columns.indexOf(n.column) * WIDE, ABOVE + (n.row - low) * HIGH];
  const width = 140 + (columns.length - 1) * WIDE;
  const height = ABOVE + 60 + (Math.max(...rows) - low) * HIGH;
  const here = nodeOfStep(nodes);
  const credit = edges.map((e) => e.credit[chosen.edge]);
  const scale = Math.max(...credit.map(Math.abs), 1e-9);
  const top = Math.max(...nodes.map((n) => Math.abs(n.value)), 1e-9);
  const picture = el('svg', {
    width, height, viewBox: `0 0 ${width} ${height}`, role: 'group',
    'aria-label': 'State graph', id: 'graph', onkeydown: moveInGraph,
  });
  columns.slice(0, -1).forEach((column, i) => picture.append(
    el('text', { class: 'column', x: 70 + i * WIDE, y: 14 }, i ? String(column) : 'step 0')));
  const order = range(edges.length).sort((a, b) =>
    Math.abs(credit[a]) - Math.abs(credit[b]));
  for (const i of order) picture.append(edgePath(edges[i], credit[i] / scale, nodes, at, here));
  nodes.forEach((node, i) => picture.append(nodeMark(node, i, at(node), top, i === here)));
  view.append(
    el('div', { class: 'intro' }, taskHeading(task), legend(signedScale(scale))),
    el('p', { class: 'lead' },
      'A state stands in the column of the fewest steps that led to it, with its value V (G2PO) inside and the action that most often led to it below. An edge is coloured by the mean credit of its steps; the wider, the more steps. Edges to a state that can be reached sooner arch upwards.'),
    el('div', { class: 'legend', style: 'margin-bottom:12px' }, 'Edge credit',
      el('select', { 'aria-label': 'Edge credit', id: 'edge',
        onchange: (e) => choose({ edge: e.target.value }, '#edge') },
        Object.entries(TERMS).map(([name, text]) =>
          el('option', { value: name, selected: name === chosen.edge ? '' : null }, text)))),
    picture,
    nodeTable(nodes[here], edges.filter((e) => e.source === here)));
}

const signedScale = (x) => Number(x.toPrecision(2));
const nodeOfStep = (nodes) => nodes.findIndex((n) => n.state === steps.state[chosen.step]);

function edgePath(edge, share, nodes, at, here) {
  const [x1, y1] = at(nodes[edge.source]);
  const [x2, y2] = at(nodes[edge.target]);
  const back = x2 <= x1;
  const bow = back ? Math.min(34 + 0.08 * (x1 - x2), ABOVE) : 0;
  const bend = back ? 30 : 0.45 * (x2 - x1);
  const d = edge.source === edge.target
    ? `M${x1 - 9},${y1 - 12} C${x1 - 26},${y1 - 44} ${x1 + 26},${y1 - 44} ${x1 + 9},${y1 - 12}`
    : `M${x1},${y1} C${x1 + bend},${y1 - bow} ${x2 - bend},${y2 - bow} ${x2},${y2}`;
  const sign = share > 0 ? 'pos' : share < 0 ? 'neg' : 'zero';
  const active = edge.source === here || edge.rows.includes(chosen.step);
  return el('path', {
    d, class: `edge ${sign} ${active ? '' : 'quiet'}`,
    style: `--p:${Math.round(25 + 75 * Math.sqrt(Math.abs(share)))}%`,
    'stroke-width': 1 + 1.6 * Math.sqrt(edge.rows.length),
    'stroke-opacity': active ? 1 : 0.4,
  }, el('title', {}, `${plural(edge.rows.length, 'step')}, mean credit ${signed(edge.credit[chosen.edge])}`));
}

function nodeMark(node, index, [x, y], top, on) {
  const end = node.state < 0;
  const radius = 13 + 1.7 * Math.sqrt(node.visits);
  const full = Math.round(6 + 86 * Math.abs(node.value) / top);
  const short = node.label.length > 19 ? node.label.slice(0, 18) + '…' : node.label;
  const label = `${node.label}: value ${node.value.toFixed(2)}, ${plural(node.visits, 'visit')}`;
  const pick = () => end || choose({ step: firstStepOf(node) }, `[data-node="${index}"]`);
  return el('g', {
    class: `node ${on ? 'on' : ''}`, tabindex: on ? 0 : -1, role: 'button',
    'aria-label': label, 'data-node': index, style: `--p:${full}%`, onclick: pick,
  },
    el('title', {}, label),
    end
      ? el('rect', { x: x - 19, y: y - 15, width: 38, height: 30, rx: 7 })
      : el('circle', { cx: x, cy: y, r: Math.min(radius, 24) }),
    el('text', { class: `in ${full > 55 ? 'dark' : ''}`, x, y: y + 3.5 }, node.value.toFixed(1)),
    el('text', { x, y: y + Math.min(radius, 24) + 13 }, short));
}

const firstStepOf = (node) => range(steps.task.length).find((r) =>
  steps.task[r] === chosen.task && steps.state[r] === node.state);

/** To the nearest node in the direction of the arrow. */
function moveInGraph(event) {
  const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!way) return;
  event.preventDefault();
  const { nodes } = tasks[chosen.task].graph;
  const now = nodes[nodeOfStep(nodes)];
  const far = (n) => {
    const [dx, dy] = [n.column - now.column, n.row - now.row];
    const ahead = dx * way[0] + dy * way[1];
    return ahead > 0 && n.state >= 0 ? ahead + 3 * Math.abs(dx * way[1] + dy * way[0]) : Infinity;
  };
  const best = nodes.reduce((a, n) => (far(n) < far(a) ? n : a), now);
  if (far(best) === Infinity) return;
  choose({ step: firstStepOf(best) }, `[data-node="${nodes.indexOf(best)}"]`);
}

function nodeTable(node, out) {
  return el('div', {},
    el('h3', {}, `Out of “${node.label}”: value ${node.value.toFixed(2)}, ${plural(node.visits, 'visit')} by ${plural(node.episodes, 'episode')}, ${percent(node.solved)} of which solved the task`),
    stepTable(out.flatMap((e) => e.rows)));
}
