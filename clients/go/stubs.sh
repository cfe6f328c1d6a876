#!/bin/sh
# Generates sluicev1 from protos/ with protoc, protoc-gen-go and protoc-gen-go-grpc.
set -e
cd "$(dirname "$0")"
rm -rf sluicev1 && mkdir sluicev1
for name in types inference control; do map="$map,Msluice/v1/$name.proto=example.com/sluice/go/sluicev1;sluicev1"; done
protoc -I ../../protos --go_out="module=example.com/sluice/go$map:." \
  --go-grpc_out="module=example.com/sluice/go,require_unimplemented_servers=false$map:." \
  sluice/v1/types.proto sluice/v1/inference.proto sluice/v1/control.proto
