// One step of M equal micro-batches: the orders of partition/schedules.py, run as partition/replay.py runs them.
// Tested against both, schedule by schedule, by tests/integration/test_report_page.py.
const FORWARD = 0, BACKWARD = 1, WEIGHT = 2;

function repeat(number, blocks) {
  return Array.from({ length: Math.max(0, number) }, () => blocks).flat();
}

// [chunk, kind] of every block of a device, in the order in which it runs them
function deviceOrder(schedule, device, P, V, M) {
  const F = (chunk) => [chunk, FORWARD], B = (chunk) => [chunk, BACKWARD], W = (chunk) => [chunk, WEIGHT];
  if (schedule === "ZBVZeroBubble") {
    const N = Math.max(M, 2 * P - 1), ahead = N - (2 * P - 1 - device);
    const down = [B(0), W(0)], up = [B(1), W(1)];
    return [
      ...repeat(2 * (P - device) - 1, [F(0)]), ...repeat(device, [F(1), F(0)]), ...repeat(P - device, [F(1), ...up]),
      ...repeat(ahead, [F(0), ...down, F(1), ...up]), ...repeat(N - P - ahead, [...down, F(1), ...up]),
      ...repeat(device, [B(0), B(1)]), ...repeat(P - device, down), ...repeat(device, [W(1)]), ...repeat(device, [W(0)]),
    ];
  }
  const chunkOf = (k) => (V > 1 ? Math.floor((k % (P * V)) / P) : 0);
  const early = schedule === "Interleaved1F1B" ? 2 * (P - device - 1) + (V - 1) * P : P - device - 1;
  const ahead = schedule === "GPipe" ? M : Math.min(early, V * M), order = [];
  for (let k = 0; k < ahead; k++) order.push(F(chunkOf(k)));
  for (let k = 0; k < V * M; k++) {
    if (k + ahead < V * M) order.push(F(chunkOf(k + ahead)));
    order.push(B(V - 1 - chunkOf(k)));
    if (schedule === "ZBH1" && k >= device) order.push(W(0));
  }
  return schedule === "ZBH1" ? [...order, ...repeat(Math.min(device, M), [W(0)])] : order;
}

// seconds of the step, the idle share of its pipeline, and the most bytes of each device
function simulateStep({ schedule, apart, num_devices: P, reserve_bytes, reserve_share }, split, M) {
  const S = split.seconds[0].length, V = S / P, comesBack = schedule === "ZBVZeroBubble";
  const deviceOf = (stage) => (comesBack && stage >= P ? 2 * P - 1 - stage : stage % P);
  const stageOf = (device, chunk) => (comesBack && chunk ? 2 * P - 1 - device : device + chunk * P);
  const rows = [], peak_bytes = [];
  for (let d = 0; d < P; d++) {
    const done = {}, held = Array.from({ length: V }, () => [0, 0]), row = [];
    let peak = 0, state = 0, transient = 0;
    for (const [chunk, kind] of deviceOrder(schedule, d, P, V, M)) {
      const microbatch = (done[[chunk, kind]] = (done[[chunk, kind]] ?? -1) + 1);
      if (microbatch >= M) continue; // ZBV is laid out for 2 P - 1 micro-batches at least
      row.push([stageOf(d, chunk), microbatch, kind]);
      held[chunk][0] += kind === FORWARD ? 1 : kind === BACKWARD ? -1 : 0;
      if (apart) held[chunk][1] += kind === BACKWARD ? 1 : kind === WEIGHT ? -1 : 0;
      const bytes = held.map(([waiting, begun], c) => {
        const stage = stageOf(d, c);
        return waiting * split.saved_bytes[stage] + begun * split.whole_bytes[stage];
      });
      peak = Math.max(peak, bytes.reduce((sum, x) => sum + x));
    }
    for (let c = 0; c < V; c++) {
      state += split.state_bytes[stageOf(d, c)];
      transient = Math.max(transient, split.transient_bytes[stageOf(d, c)]);
    }
    rows.push(row);
    peak_bytes.push((state + peak + transient) * (1 + reserve_share) + reserve_bytes);
  }
  const end = [0, 1, 2].map(() => Array.from({ length: S }, () => Array(M).fill(-1)));
  const at = Array(P).fill(0), free = Array(P).fill(0);
  const readyAt = (d, stage, m, kind) => {
    if (kind === WEIGHT) return end[BACKWARD][stage][m];
    if (kind === BACKWARD && stage === S - 1) return end[FORWARD][stage][m];
    if (kind === FORWARD && stage === 0) return 0;
    const source = kind === FORWARD ? stage - 1 : stage + 1, ended = end[kind][source][m];
    return ended < 0 || deviceOf(source) === d ? ended : ended + split.sends[kind][source];
  };
  let busy = 0;
  for (let moved = true; moved; ) {
    moved = false;
    for (let d = 0; d < P; d++) {
      for (; at[d] < rows[d].length; at[d]++) {
        const [stage, m, kind] = rows[d][at[d]], ready = readyAt(d, stage, m, kind);
        if (ready < 0) break;
        const spent = split.seconds[kind][stage];
        end[kind][stage][m] = free[d] = Math.max(free[d], ready) + spent;
        busy += spent;
        moved = true;
      }
    }
  }
  const pipeline_s = Math.max(...free);
  return { step_s: pipeline_s + split.update_s, idle: 1 - busy / (P * pipeline_s), peak_bytes };
}

function showWhatIf(section) {
  const data = JSON.parse(section.querySelector("script").textContent);
  const [microbatches, cap] = section.querySelectorAll("input");
  const put = (name, text) => { section.querySelector(`[data-out="${name}"]`).textContent = text; };
  const digits = (x) => (x >= 99.95 ? x.toFixed(0) : x >= 9.995 ? x.toFixed(1) : x.toFixed(2));
  const seconds = (x) => (x >= 1 ? `${digits(x)} s` : `${digits(1e3 * x)} ms`);
  const gib = (x) => `${(x / 2 ** 30).toFixed(1)} GiB`;
  // how far uneven packs and ranks keep the plan below a step of equal micro-batches
  const equal = simulateStep(data, data.splits[0], data.num_microbatches);
  const evenness = (data.samples_per_s * equal.step_s) / (data.samples_per_microbatch * data.num_microbatches);
  const update = () => {
    const M = Number(microbatches.value), split = data.splits[data.splits.length - 1 - Number(cap.value)];
    const { step_s, idle, peak_bytes } = simulateStep(data, split, M);
    const samples = data.samples_per_microbatch * M, peak = Math.max(...peak_bytes), fits = peak <= split.cap_bytes;
    put("microbatches", `${M}`);
    put("cap", gib(split.cap_bytes));
    put("step", seconds(step_s));
    put("rate", `${digits((evenness * samples) / step_s)}`);
    put("samples", `${Math.round(samples).toLocaleString("en")} a step`);
    put("idle", `${(100 * idle).toFixed(1)} %`);
    put("memory", gib(peak));
    put("fits", fits ? "fits" : "does not fit the cap");
    section.querySelector('[data-out="fits"]').classList.toggle("bad", !fits);
  };
  for (const input of [microbatches, cap]) input.addEventListener("input", update);
  update();
}

if (typeof document !== "undefined") document.querySelectorAll("#what-if").forEach(showWhatIf);
