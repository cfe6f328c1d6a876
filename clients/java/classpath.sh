#!/bin/sh
# Prints the class path of the client's dependencies: Debian's jars, the oldest versions supported. If one is missing,
# names it and exits with status 3.
#
# Debian's netty has no ALPN, and so no HTTP/2, with the TLS of the JDK. It has both with OpenSSL (netty-tcnative), if
# the library has the name that netty looks for: add build/native to java.library.path.
set -e
cd "$(dirname "$0")"
packages="libgrpc-java libnetty-java libnetty-tcnative-java libprotobuf-java libperfmark-java libgoogle-gson-java"
for name in grpc-api grpc-context grpc-core grpc-netty grpc-protobuf grpc-protobuf-lite grpc-stub guava protobuf \
  perfmark-api netty-buffer netty-codec netty-codec-http netty-codec-http2 netty-common netty-handler netty-resolver \
  netty-transport netty-tcnative "$@"; do
  jar=/usr/share/java/$name.jar
  if [ ! -e "$jar" ]; then
    echo "$jar is not there; Debian has it in one of $packages" >&2
    exit 3
  fi
  path="${path:+$path:}$jar"
done
mkdir -p build/native
cp /usr/lib/*/jni/libnetty-tcnative.so build/native/libnetty_tcnative.so
echo "$path"
