#!/bin/sh
# Builds the client and its driver against the system's gRPC in build/, two jobs at a time. Unchanged files are not
# built again.
set -e
if [ ! -f /usr/include/grpcpp/grpcpp.h ] || ! command -v grpc_cpp_plugin >/dev/null; then
  echo "libgrpc++-dev or protobuf-compiler-grpc is not installed" >&2
  exit 3
fi
nice -n 15 cmake -S . -B build -DSLUICE_CONFORMANCE=ON -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS="-O1 -Werror"
nice -n 15 cmake --build build --parallel 2
