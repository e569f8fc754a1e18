"""The HTTP server: OpenAI's endpoints, streaming, limits, auth and metrics, in its own process.

Never imports torch; speaks to the brain only through `engine.client`.
"""
