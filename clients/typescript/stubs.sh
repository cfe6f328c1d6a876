#!/bin/sh
# Generates src/gen from protos/. Needs a protoc: PROTOC, or the one of grpcio-tools.
set -e
cd "$(dirname "$0")"
PROTOC="${PROTOC:-python3 -m grpc_tools.protoc}"
GOOGLE="${GOOGLE_PROTOS:?the folder that holds google/rpc, such as that of googleapis-common-protos}"
rm -rf src/gen && mkdir -p src/gen
$PROTOC -I ../../protos -I "$GOOGLE" --plugin=protoc-gen-ts_proto=node_modules/.bin/protoc-gen-ts_proto \
  --ts_proto_out=src/gen --ts_proto_opt=outputServices=grpc-js,esModuleInterop=true,forceLong=bigint,oneof=unions-value,useExactTypes=false,outputJsonMethods=false,useDate=false,env=node,comments=false \
  sluice/v1/inference.proto sluice/v1/control.proto google/rpc/status.proto google/rpc/error_details.proto
