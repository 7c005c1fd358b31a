"""The gRPC API: the Inference service."""

from coordinator.grpc_api.service import INFERENCE, InferenceService, add_inference_service

__all__ = ["INFERENCE", "InferenceService", "add_inference_service"]
