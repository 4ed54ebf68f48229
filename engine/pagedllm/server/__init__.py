"""OpenAI's API over any engine, with FastAPI and uvicorn: ``run.Server``; or ``app.create_app`` for a server of yours.

What to serve and to whom (``config``, ``auth``) needs neither of the two.
"""
