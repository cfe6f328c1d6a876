#!/bin/sh
# Generates build/stubs from protos/ with protoc and protoc-gen-grpc-java. Nothing generated is kept in the repository.
set -e
cd "$(dirname "$0")"
rm -rf build/stubs && mkdir -p build/stubs
plugin=$(command -v grpc_java_plugin || command -v protoc-gen-grpc-java)
protoc -I ../../protos -I src/main/proto --plugin=protoc-gen-grpc-java="$plugin" \
  --java_out=build/stubs --grpc-java_out=build/stubs \
  sluice/v1/types.proto sluice/v1/inference.proto sluice/v1/control.proto google/rpc/details.proto
