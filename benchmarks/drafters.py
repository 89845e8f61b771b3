r"""Tokens per target pass of drafters on the held-out answers of a distillation, by domain, at temperature 0.

    python benchmarks/drafters.py configs/distill/smollm2_quickstart.yaml --data-dir data \
        --drafters draft_model,ensemble

All drafters draft along the same answers of the target (`speculate_on`), which are written first if they are missing.
Nothing is timed. The last line is the table as JSON.
"""

import datetime
import json

import jax
from distillation import distillation_parser, overrides_of
from rich.table import Table

import bass_jax as bass
from bass_jax.cli.output import output_console
from bass_jax.training.distill_config import load_distill_config
from bass_jax.training.evaluate import held_out_groups, write_held_out
from bass_jax.training.prompts import prompt_source
from bass_jax.training.replay_speculation import speculate_on
from bass_jax.training.write_corpus import load_target


def main() -> None:
    parser = distillation_parser(__doc__)
    parser.add_argument("--pair", default="checkpoints/quickstart")
    parser.add_argument("--drafters", default="draft_model,ngram,retrieval,ensemble", help="names, or paths of drafts")
    parser.add_argument("--draft-len", type=int, default=4)
    options = parser.parse_args()

    config = load_distill_config(options.config, overrides_of(options) | {"held_out_temperatures": []})
    held_out = write_held_out(config, prompt_source(config), *load_target(config, "float32"))
    domains = held_out_groups(held_out, is_sampled=False)

    found: dict[str, dict[str, float]] = {}
    for name in options.drafters.split(","):
        drafter = bass.load_pair(options.pair, drafter=name, dtype="float32").drafter
        found[name] = {
            domain: speculate_on(drafter, rows, options.draft_len).tokens_per_pass for (domain, _), rows in domains
        }
        print(json.dumps({name: found[name]}), flush=True)

    table = Table(title=f"tokens per target pass, draft length {options.draft_len}, temperature 0")
    table.add_column("drafter")
    for (domain, _), _ in domains:
        table.add_column(domain, justify="right")
    for name, values in found.items():
        table.add_row(name, *(f"{value:.2f}" for value in values.values()))
    output_console().print(table)
    date = datetime.date.today().isoformat()
    print(json.dumps({"date": date, "jax": jax.__version__, "draft_len": options.draft_len, "drafters": found}))


if __name__ == "__main__":
    main()
