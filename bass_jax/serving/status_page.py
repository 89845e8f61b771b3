"""The page at ``/``: plain HTML that reads ``/metrics`` every second."""

STATUS_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>bass-jax</title>
<style>
  :root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
  body { max-width: 44rem; margin: 2rem auto; padding: 0 1rem; }
  td { padding: .15rem 1rem .15rem 0; }
  td:last-child { text-align: right; font-variant-numeric: tabular-nums; }
  meter { width: 12rem; }
</style>
<h1>bass-jax</h1>
<p>The API is at <code>/v1</code>, all figures at <a href="/metrics"><code>/metrics</code></a>.</p>
<table id="figures"></table>
<h2>Accepted drafts by position</h2>
<table id="positions"></table>
<script>
function values(text) {
  const found = {};
  for (const line of text.split("\\n"))
    if (line && !line.startsWith("#")) {
      const at = line.lastIndexOf(" ");
      found[line.slice(0, at)] = Number(line.slice(at + 1));
    }
  return found;
}
function cell(row, content) { const td = row.insertCell(); td.append(content); }
let before = null;
async function update() {
  const response = await fetch("/metrics");
  if (!response.ok) { figures.textContent = "/metrics: HTTP " + response.status; return; }
  const now = values(await response.text());
  const time = performance.now() / 1000;
  const tokens = now["bass_jax_tokens_total"];
  const steps = now["bass_jax_step_seconds_count"], drafts = now["bass_jax_draft_length_count"];
  const rows = {
    "running requests": now["bass_jax_running_requests"],
    "waiting requests": now["bass_jax_waiting_requests"],
    "use of the cache": (100 * now["bass_jax_cache_use_ratio"]).toFixed(0) + " %",
    "tokens": tokens,
    "tokens per second": before ? ((tokens - before.tokens) / (time - before.time)).toFixed(1) : "",
    "mean step": steps ? (1000 * now["bass_jax_step_seconds_sum"] / steps).toFixed(1) + " ms" : "",
    "drafts per row and step": drafts ? (now["bass_jax_draft_length_sum"] / drafts).toFixed(2) : "",
  };
  before = { tokens, time };
  figures.replaceChildren();
  for (const [name, value] of Object.entries(rows)) {
    const row = figures.insertRow();
    cell(row, name); cell(row, String(value));
  }
  positions.replaceChildren();
  for (let position = 1; position <= 32; position++) {
    const drafted = now[`bass_jax_drafted_tokens_total{position="${position}"}`];
    if (!drafted) break;
    const accepted = now[`bass_jax_accepted_tokens_total{position="${position}"}`] || 0;
    const row = positions.insertRow(), meter = document.createElement("meter");
    meter.value = accepted / drafted;
    cell(row, String(position)); cell(row, meter); cell(row, (100 * meter.value).toFixed(0) + " %");
  }
}
const figures = document.getElementById("figures"), positions = document.getElementById("positions");
update();
setInterval(update, 1000);
</script>
"""
