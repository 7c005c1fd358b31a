"""A client that knows nothing of pdserve: services, messages and fields come from the server, by gRPC reflection.

python examples/reflection_client.py 127.0.0.1:50051
"""

import sys

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToJson, ParseDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

ADDRESS = "127.0.0.1:50051"
INFERENCE = "pdserve.v1.Inference"


def to_bytes(message: Message) -> bytes:
    return message.SerializeToString()


def call(channel: grpc.Channel, pool: DescriptorPool, method: str, request: dict[str, object]) -> list[Message]:
    """All answers of one of the service's methods to a request given as JSON would be."""
    found = pool.FindServiceByName(INFERENCE).methods_by_name[method]
    invoke: grpc.UnaryStreamMultiCallable[Message, Message] = channel.unary_stream(
        f"/{INFERENCE}/{method}",
        request_serializer=to_bytes,
        response_deserializer=GetMessageClass(found.output_type).FromString,
    )
    return list(invoke(ParseDict(request, GetMessageClass(found.input_type)()), timeout=60))


def main() -> int:
    address = sys.argv[1] if len(sys.argv) > 1 else ADDRESS
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        for name in sorted(database.get_services()):
            print(name)
        pool = DescriptorPool(database)
        for method in pool.FindServiceByName(INFERENCE).methods:
            print(f"{INFERENCE}/{method.name}({method.input_type.name})")
        for answer in call(channel, pool, "ListModels", {}):
            print(MessageToJson(answer))
        request: dict[str, object] = {"text": "Once upon a time", "sampling": {"max_tokens": 4}}
        for answer in call(channel, pool, "Generate", request):
            print(MessageToJson(answer, indent=None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
