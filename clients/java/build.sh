#!/bin/sh
# Builds build/sluice-client-VERSION.jar from protos/ and src/, with protoc, its grpc-java plugin, javac and jar alone.
set -e
cd "$(dirname "$0")"
version=$(sed -n 's:^  <version>\(.*\)</version>:\1:p' pom.xml)
path=$(sh classpath.sh geronimo-annotation-1.3-spec error-prone-annotations)
sh stubs.sh
rm -rf build/classes && mkdir -p build/classes
# The generated stubs, 110,000 lines, are compiled without the linter.
javac --release 11 -nowarn -cp "$path" -d build/classes $(find build/stubs -name '*.java')
javac --release 11 -Xlint:all,-processing -Werror -cp "build/classes:$path" -d build/classes src/main/java/sluice/*.java
printf 'Automatic-Module-Name: sluice\nImplementation-Version: %s\n' "$version" >build/manifest
rm -f build/sluice-client-*.jar
jar --create --file "build/sluice-client-$version.jar" --manifest build/manifest -C build/classes .
