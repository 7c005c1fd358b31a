"""A client that knows nothing of pdserve: services, messages and fields come from the server, by gRPC reflection.

python examples/reflection_client.py 127.0.0.1:50051 --model NAME
"""

import argparse
import sys
from typing import cast

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, MessageToJson, ParseDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

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


def show(channel: grpc.Channel, model: str | None) -> None:
    """The services, a method's answer, and a completion of `model`, or of the first that is served."""
    database = ProtoReflectionDescriptorDatabase(channel)
    for name in sorted(database.get_services()):
        print(name)
    pool = DescriptorPool(database)
    for method in pool.FindServiceByName(INFERENCE).methods:
        print(f"{INFERENCE}/{method.name}({method.input_type.name})")
    (served,) = call(channel, pool, "ListModels", {})
    print(MessageToJson(served))
    name = model or MessageToDict(served)["models"][0]["info"]["name"]
    request: dict[str, object] = {"model": name, "text": "Once upon a time", "sampling": {"max_tokens": 4}}
    for answer in call(channel, pool, "Generate", request):
        print(MessageToJson(answer, indent=None))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051")
    parser.add_argument("--model", help="the first that is served, if not given")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    with grpc.insecure_channel(given.address) as channel:
        try:
            show(channel, given.model)
        except grpc.RpcError as error:
            ended = cast("grpc.Call", error)
            print(f"{ended.code().name}: {ended.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
