"""An HTTP server with OpenAI's API on top of `bass_jax.engine.Engine`.

Imports `bass_jax.engine` and lower packages, Starlette and the Prometheus client (the extra ``serve``). Start with
`app.py`, the routes; `requests.py` checks the bodies, `responses.py` builds the answers, `metrics.py` counts.
"""
