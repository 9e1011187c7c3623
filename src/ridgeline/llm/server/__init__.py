"""An HTTP server that speaks OpenAI's protocol in front of one Engine.

    socket ──protocol.py: header time, connections──> gate.py: key, host, body limits, one error form, metrics
      ──> app.py: routes ──schemas.py: what may be asked──> prepare.py: tokens and Sampling
      ──> worker.py: one thread owns the Engine; jobs in, events out ──> answers.py: JSON, or stream.py: server-sent events

    limits.py every bound · auth.py keys · errors.py OpenAI's error object · metrics.py Prometheus · run.py start, drain, stop

Nothing is imported here: FastAPI and uvicorn come with the extra `serve`, and only when a server is started.
"""
