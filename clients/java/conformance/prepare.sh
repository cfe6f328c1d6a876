#!/bin/sh
# Builds the jar, and the driver against it and Debian's jars, as a program would use them.
set -e
jars=$(sh classpath.sh gson)
if ! command -v grpc_java_plugin >/dev/null && ! command -v protoc-gen-grpc-java >/dev/null; then
  echo "protobuf-compiler-grpc-java-plugin is not installed" >&2
  exit 3
fi
sh build.sh
path=$(echo "$PWD"/build/sluice-client-*.jar):$jars
rm -rf build/driver && mkdir -p build/driver
javac --release 11 -Xlint:all,-processing,-classfile -cp "$path" -d build/driver conformance/Driver.java
jar --create --file build/driver.jar -C build/driver .
# Each case runs the driver in a short process: only the quick compiler is used, and classes come from a shared archive.
quick="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -Xlog:all=error:stderr"
java="java $quick -Djava.library.path=$PWD/build/native -cp $PWD/build/driver.jar:$path"
echo '{"call": "generate", "text": "x"}' |
  $java -XX:ArchiveClassesAtExit=build/driver.jsa Driver --address 127.0.0.1:1 >/dev/null
echo "exec $java -XX:SharedArchiveFile=$PWD/build/driver.jsa Driver \"\$@\"" >build/driver.sh
