"""The OpenAI-compatible HTTP API, health and metrics."""

from coordinator.http_api.app import build_http_app
from coordinator.http_api.server import HttpServer, serve_http

__all__ = ["HttpServer", "build_http_app", "serve_http"]
